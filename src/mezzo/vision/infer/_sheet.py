"""A contact sheet: each image beside its overlay, with a legend of the colours."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps

from mezzo.files import one_line, write_file
from mezzo.vision.infer.maps import Labels, colors_of, overlay

SHOWN = 12
"""Maximum number of results on a sheet."""

LEGEND = 200
"""Maximum number of classes in the legend."""

CELL = 240
"""Longest side of a picture on the sheet, in pixels."""

SheetRow = tuple[str, NDArray[np.uint8], Labels]
"""Name, image (H, W, 3) RGB, and the classes of its pixels (H, W)."""

_GAP = 12
_LINE = 20
_ACROSS = 2  # columns, if there are more than a few results
_INK = (32, 32, 32)


def contact_sheet(
    rows: Sequence[SheetRow], target: Path, *, num_classes: int, class_names: Sequence[str] | None = None
) -> None:
    """Write a PNG with the first results, image beside overlay, and a legend of the classes that occur in them.

    Args:
        rows: Results; those after the first `SHOWN` are left out.
        target: The file; its folder is made.
        num_classes: Classes of the network.
        class_names: Of all classes; None or empty where they are not known.

    Raises:
        ValueError: There is no result.
        RunError: The file cannot be written.
    """
    if not rows:
        raise ValueError(f"{target}: no result to show on a sheet")
    results = rows[:SHOWN]
    cells = [_cell(row, num_classes) for row in results]
    grid = _grid(cells, _ACROSS if len(cells) > 3 else 1)
    legend = _legend(_occurring(results), num_classes, class_names or (), grid.width)
    sheet = ImageOps.expand(_stacked([grid, legend]), _GAP, "white")
    file = io.BytesIO()
    sheet.save(file, "PNG")
    write_file(target, file.getvalue())


def _cell(row: SheetRow, num_classes: int) -> Image.Image:
    """Return an image beside its overlay, the name above both."""
    name, image, labels = row
    pair = [_fitted(picture) for picture in (image, overlay(image, labels, num_classes=num_classes))]
    cell = Image.new("RGB", (2 * (CELL + _GAP), pair[0].height + _LINE + _GAP), "white")
    _write(ImageDraw.Draw(cell), (0, 0), _shortened(one_line(name), 2 * CELL))
    for place, picture in enumerate(pair):
        cell.paste(picture, (place * (picture.width + _GAP // 2), _LINE))
    return cell


def _fitted(picture: NDArray[np.uint8]) -> Image.Image:
    """Return a picture, resized so that its long side fits a cell."""
    height, width = picture.shape[:2]
    factor = CELL / max(height, width)
    size = (max(1, round(width * factor)), max(1, round(height * factor)))
    how = cv2.INTER_AREA if factor < 1 else cv2.INTER_NEAREST
    return Image.fromarray(cv2.resize(picture, size, interpolation=how))


def _grid(cells: Sequence[Image.Image], across: int) -> Image.Image:
    lines = [cells[start : start + across] for start in range(0, len(cells), across)]
    return _stacked([_beside(line) for line in lines])


def _beside(cells: Sequence[Image.Image]) -> Image.Image:
    line = Image.new("RGB", (sum(cell.width for cell in cells), max(cell.height for cell in cells)), "white")
    left = 0
    for cell in cells:
        line.paste(cell, (left, 0))
        left += cell.width
    return line


def _stacked(parts: Sequence[Image.Image]) -> Image.Image:
    whole = Image.new("RGB", (max(part.width for part in parts), sum(part.height for part in parts)), "white")
    top = 0
    for part in parts:
        whole.paste(part, (0, top))
        top += part.height
    return whole


def _occurring(rows: Sequence[SheetRow]) -> list[int]:
    """Return the classes of the results, in order."""
    return sorted({int(index) for _, _, labels in rows for index in np.unique(labels)})


def _legend(classes: Sequence[int], num_classes: int, names: Sequence[str], width: int) -> Image.Image:
    """Return the legend: a coloured square and the name of each class, in several lines if needed."""
    left_out, classes = len(classes) - LEGEND, classes[:LEGEND]
    texts = [_class_text(index, num_classes, names) for index in classes]
    if left_out > 0:
        texts[-1] += f" and {left_out} more"
    places = list(_places([_text_width(text) + _LINE + _GAP for text in texts], width))
    legend = Image.new("RGB", (width, (places[-1][1] + 1) * _LINE + _GAP), "white")
    draw = ImageDraw.Draw(legend)
    colours = colors_of(np.array(classes))
    for index, colour, text, (left, line) in zip(classes, colours, texts, places, strict=True):
        top = line * _LINE
        fill = "white" if _is_untouched(index, num_classes) else tuple(colour.tolist())
        draw.rectangle((left, top + 3, left + 12, top + 15), fill=fill, outline=_INK)
        _write(draw, (left + _LINE, top), text)
    return legend


def _places(widths: Sequence[int], width: int) -> Iterator[tuple[int, int]]:
    """Yield the left edge and the line number of each entry."""
    left, line = 0, 0
    for wide in widths:
        if left and left + wide > width:
            left, line = 0, line + 1
        yield left, line
        left += wide


def _class_text(index: int, num_classes: int, names: Sequence[str]) -> str:
    name = f"{index} {one_line(names[index])}" if index < len(names) else f"class {index}"
    return _shortened(f"{name} (left as it is)" if _is_untouched(index, num_classes) else name, CELL)


def _is_untouched(index: int, num_classes: int) -> bool:
    """Return whether `overlay` does not colour a class."""
    return num_classes == 2 and index == 0


def _shortened(text: str, width: int) -> str:
    """Return a text that fits the width; a longer one loses its start, because the end of a path is more specific."""
    if len(text) <= width and _text_width(text) <= width:
        return text
    text = text[-width:]  # measuring is slow, and a name may have a million characters
    while text and _text_width(f"...{text}") > width:
        text = text[1:]
    return f"...{text}"


def _text_width(text: str) -> int:
    return int(ImageDraw.Draw(Image.new("L", (1, 1))).textlength(text, font=_font())) + 1


def _write(draw: ImageDraw.ImageDraw, place: tuple[int, int], text: str) -> None:
    draw.text(place, text, fill=_INK, font=_font())


@functools.cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(13)
