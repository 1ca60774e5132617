"""Label maps of a segmentation network at the size of the image file, and pictures of them.

K classes, H height, W width of the image; h, w of the network's output.
"""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from mezzo.errors import RunError
from mezzo.export import DeployError
from mezzo.files import write_file

Labels = NDArray[np.uint8] | NDArray[np.int32]
"""(H, W) class ids: uint8, or int32 for more than 256 classes."""

_Resize = Callable[[NDArray[Any], int, int], NDArray[Any]]
_JPEG_QUALITY = 92
_PALETTE = 256  # maximum number of colours of a PNG file
_HIGHEST_ID = 2**16 - 1  # maximum of a grey PNG file


def to_labels(
    output: NDArray[Any],
    undo: Sequence[tuple[str, int, int]],
    size: tuple[int, int],
    num_classes: int,
    input_size: tuple[int, ...] | None = None,
) -> Labels:
    """Return the class of each pixel of the image as it is in the file.

    Args:
        output: Of one image: class ids (h, w), which take the nearest value, or scores (K, h, w), which are resized
            bilinearly before the best one is looked for, as evaluation does.
        undo: What changed the image's size before the network (`InputBatch.undo`); the last change is undone first.
        size: Height and width of the image in its file.
        num_classes: Classes of the network.
        input_size: Height and width that the network was given; an output of another size is brought to it first. None: the
            output has it.

    Raises:
        DeployError: The output is neither, or is for another number of classes.
    """
    if output.ndim == 2 and output.dtype.kind in "iu":
        ids = _checked_ids(output, num_classes)
        ids = ids if input_size is None else _resized_ids(ids, *input_size)
        return _resized_ids(_undone(ids, undo, _resized_ids), *size)
    if output.ndim != 3 or output.dtype.kind != "f":
        raise DeployError(
            f"the network gives {output.dtype} {output.shape} for an image; segmentation gives "
            "whole class ids (height, width) or float scores (classes, height, width)"
        )
    if len(output) != num_classes:
        raise DeployError(f"the network gives scores of {len(output)} classes, but the model has {num_classes}")
    output = output if input_size is None else _resized_scores(output, *input_size)
    return _best_class(_resized_scores(_undone(output, undo, _resized_scores), *size))


def class_colors(count: int) -> NDArray[np.uint8]:
    """Return a different RGB colour for each class, (K, 3): those of Pascal VOC; class 0 is black.

    Three bits of the class id at a time become one bit of red, green and blue each, the highest first: small ids, which
    occur most, are far apart.

    >>> class_colors(3).tolist()
    [[0, 0, 0], [128, 0, 0], [0, 128, 0]]
    """
    return colors_of(np.arange(count))


def colors_of(ids: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the colours of some classes, (number of ids, 3); see `class_colors`."""
    colours = np.zeros((len(ids), 3), np.uint8)
    for place in range(8):
        colours |= ((ids[:, None] >> (3 * place + np.arange(3)) & 1) << (7 - place)).astype(np.uint8)
    return colours


def colored(labels: Labels) -> NDArray[np.uint8]:
    """Return class ids as colours, (H, W, 3) RGB."""
    if (highest := int(labels.max())) <= _HIGHEST_ID:
        colours: NDArray[np.uint8] = class_colors(highest + 1)[labels]
        return colours
    ids, places = np.unique(labels, return_inverse=True)  # a table of 2**31 colours would not fit into memory
    return np.asarray(colors_of(ids)[places.reshape(labels.shape)])


def overlay(image: NDArray[np.uint8], labels: Labels, *, num_classes: int, alpha: float = 0.6) -> NDArray[np.uint8]:
    """Return the image with the colours of the classes on it.

    Args:
        image: (H, W, 3) RGB.
        labels: Of its pixels.
        num_classes: Classes of the network. With two, class 0 is what is not looked for: it stays untouched.
        alpha: Share of the colour; the rest is the image.
    """
    mixed: NDArray[np.uint8] = cv2.addWeighted(image, 1 - alpha, colored(labels), alpha, 0)  # type: ignore[assignment]
    return np.where(labels[..., None] == 0, image, mixed) if num_classes == 2 else mixed


def cut_out(image: NDArray[np.uint8], labels: Labels, person: int = 1) -> NDArray[np.uint8]:
    """Return the pixels of one class, (H, W, 4) RGBA; all others are transparent black."""
    cut = np.dstack([image, np.full(labels.shape, 255, np.uint8)])
    cut[labels != person] = 0
    return cut


def result_names(images: Sequence[Path], source: Path) -> list[Path]:
    """Return a unique file name without suffix for the results of each image.

    Folders below the source stay. Where a list names images outside of its folder, those below the folder that they
    have in common. A suffix stays where the name would be that of another image without it,
    or no name at all.

    Args:
        images: Of `find_images`.
        source: Where they were found.

    >>> [str(name) for name in result_names([Path("x/a.jpg"), Path("x/a.png"), Path("x/y/a.png")], Path("x.txt"))]
    ['x/a.jpg', 'x/a.png', 'x/y/a']
    """
    places = [os.path.abspath(path) for path in images]
    root = os.path.abspath(source if source.is_dir() else source.parent)
    folders = [os.path.dirname(place) for place in places]
    if os.path.commonpath([root, *folders]) != root:
        root = os.path.commonpath(folders)
    names = [Path(os.path.relpath(place, root)) for place in places]
    different = set(names)
    short = Counter(name.with_suffix("") for name in different)
    return [
        name if short[bare := name.with_suffix("")] > 1 or bare in different or _is_dots(bare) else bare
        for name in names
    ]


def _is_dots(name: Path) -> bool:
    """Return whether a name is not a file name without its suffix: `...png` becomes `..`."""
    return not name.name.strip(".")


def save_maps(
    folder: Path, relative: Path, image: NDArray[np.uint8], labels: Labels, *, num_classes: int, with_cut_out: bool
) -> list[Path]:
    """Write the pictures of an image's labels; return the files.

    `labels/NAME.png` holds class ids, which show as colours (more than 256 classes: 16 bits, grey);
    `overlays/NAME.jpg` the image under them; `cutouts/NAME.png` only class 1.

    Args:
        folder: Where to.
        relative: NAME, perhaps with folders; `result_names` gives those that do not overwrite each other.
        image: (H, W, 3) RGB.
        labels: Of its pixels.
        num_classes: Classes of the network.
        with_cut_out: Write the last one too.

    Raises:
        DeployError: A class id does not fit into a PNG file.
        RunError: A file cannot be encoded or written.
    """
    if (highest := int(labels.max())) > _HIGHEST_ID:
        raise DeployError(f"{relative}: the network gives class {highest}, but a label map holds up to {_HIGHEST_ID}")
    if relative.is_absolute() or ".." in relative.parts:
        raise ValueError(f"{relative}: results are named by a path inside of their folder")
    shown = overlay(image, labels, num_classes=num_classes)
    files = {
        folder / "labels" / f"{relative}.png": _label_png(labels, num_classes),
        folder / "overlays" / f"{relative}.jpg": _encoded(shown, ".jpg", relative),
    }
    if with_cut_out:
        files[folder / "cutouts" / f"{relative}.png"] = _encoded(cut_out(image, labels), ".png", relative)
    for path, data in files.items():
        write_file(path, data)
    return list(files)


def _undone(output: NDArray[Any], undo: Sequence[tuple[str, int, int]], resize: _Resize) -> NDArray[Any]:
    """Return the output with the changes of the image's size undone, last change first."""
    for kind, height, width in reversed(undo):
        output = output[..., :height, :width] if kind == "pad" else resize(output, height, width)
    return output


def _resized_scores(scores: NDArray[Any], height: int, width: int) -> NDArray[Any]:
    """Return scores resized bilinearly by PyTorch; OpenCV's result differs by 1e-4."""
    if scores.shape[1:] == (height, width):
        return scores
    planes = torch.from_numpy(np.require(scores, np.float32, ["C", "W"]))[None]
    resized = torch.nn.functional.interpolate(planes, size=(height, width), mode="bilinear", align_corners=False)
    found: NDArray[np.float32] = resized[0].numpy()
    return found


def _resized_ids(ids: NDArray[Any], height: int, width: int) -> NDArray[Any]:
    """Return class ids resized by nearest neighbour."""
    if ids.shape == (height, width):
        return ids
    rows, columns = (
        (2 * np.arange(now) + 1) * before // (2 * now) for now, before in zip((height, width), ids.shape, strict=True)
    )
    resized: NDArray[Any] = ids[rows[:, None], columns]
    return resized


def _best_class(scores: NDArray[Any]) -> Labels:
    """Return the arg-max over classes, plane by plane: ten times as fast as NumPy's."""
    best = scores[0].copy()
    labels: Labels = np.zeros(best.shape, _id_type(len(scores)))
    for index, plane in enumerate(scores[1:], start=1):
        np.copyto(labels, index, where=plane > best, casting="unsafe")
        np.maximum(best, plane, out=best)
    return labels


def _checked_ids(ids: NDArray[Any], num_classes: int) -> NDArray[Any]:
    low, high = ids.min(), ids.max()
    if low < 0 or high >= num_classes:
        wrong = low if low < 0 else high
        raise DeployError(f"the network gives class {wrong}, but the model has {num_classes} (0 to {num_classes - 1})")
    return ids.astype(_id_type(num_classes))


def _id_type(num_classes: int) -> np.dtype[Any]:
    return np.dtype(np.uint8 if num_classes <= _PALETTE else np.int32)


def _label_png(labels: Labels, num_classes: int) -> bytes:
    if num_classes > _PALETTE:
        return cv2.imencode(".png", labels.astype(np.uint16))[1].tobytes()
    picture = Image.fromarray(labels.astype(np.uint8)).convert("L")
    picture.putpalette(class_colors(num_classes).tobytes())  # class ids stay, the mode becomes P
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def _encoded(picture: NDArray[np.uint8], suffix: str, name: Path) -> bytes:
    """Return the file of an RGB or RGBA picture."""
    order = cv2.COLOR_RGB2BGR if picture.shape[2] == 3 else cv2.COLOR_RGBA2BGRA
    options = [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY] if suffix == ".jpg" else []
    try:
        done, data = cv2.imencode(suffix, cv2.cvtColor(picture, order), options)
    except cv2.error:
        done = False
    if not done:
        height, width = picture.shape[:2]
        raise RunError(f"{name}: a picture of {width} x {height} cannot be encoded as {suffix}")
    return data.tobytes()
