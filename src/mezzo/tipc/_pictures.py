"""Small pictures of what a segmentation network predicts, beside the labels of the images, in the folder of a run.

They are made right after a run, from the files that its own commands named. The page takes only files of the run's folder:
the records of a foreign run may name any file of this machine.
"""

import base64
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mezzo.errors import MezzoError
from mezzo.files import FileError, MiB, is_regular, parse_json, read_bytes, write_file, write_text
from mezzo.tipc._logs import one_line
from mezzo.tipc._record import Record
from mezzo.tipc._run_folder import RecordedRun
from mezzo.tipc._shell import option_values

FOLDER, INDEX = "pictures", "index.json"
PER_STEP = 2
"""Images of a step."""
SIDE = 112
"""Longer side in pixels."""
MAX_BYTES = 32 << 10
"""Largest picture that the page takes: three of SIDE pixels have about 5 kB."""
IGNORED = 255
"""Class id of pixels without a label."""
_QUALITY = 70
_NOT_IN_NAMES = re.compile(r"[^\w-]")
_NAME = re.compile(r"[\w-]{1,80}\.(png|jpg)")
_TYPES = {"png": (b"\x89PNG\r\n\x1a\n", "image/png"), "jpg": (b"\xff\xd8\xff", "image/jpeg")}


@dataclass(frozen=True, slots=True)
class PictureSet:
    """The pictures of one image: names of files in the folder of pictures."""

    step: str
    name: str
    """Of the image."""
    image: str
    label: str
    """Empty: the image has no label."""
    prediction: str
    equal: float | None
    """Share of the labelled pixels whose class is predicted."""


def write_pictures(run: RecordedRun, report: Callable[[str], object]) -> None:
    """Write the pictures of a run; a fault is reported in one line, and the other steps still get theirs.

    Raises:
        RunError: A file cannot be written.
    """
    found: list[PictureSet] = []
    for record in _last_writers(run.records):
        try:
            found += _pictures(run.directory / FOLDER, record)
        except (MezzoError, OSError) as error:
            report(f"no pictures of {record.step}: {one_line(str(error))}")
    if found:
        content = json.dumps([asdict(each) for each in found], indent=1, ensure_ascii=False)
        write_text(run.directory / FOLDER / INDEX, content + "\n")


def _last_writers(records: Sequence[Record]) -> list[Record]:
    """Return the inferences whose results still exist: the names of the scripts let later ones write to the same folder."""
    passed = sorted((each for each in records if each.kind == "infer" and each.status == "passed"), key=lambda r: r.end)
    return list({tuple(option_values(each.command, "--save-dir")): each for each in passed}.values())


def _pictures(folder: Path, record: Record) -> Iterator[PictureSet]:
    """Write the pictures of a step; none if it is no segmentation of mezzo, which leaves a folder `labels`."""
    sources, results = option_values(record.command, "--image-path"), option_values(record.command, "--save-dir")
    if not sources or not results or not Path(record.cwd, results[-1], "labels").is_dir():
        return
    from mezzo.vision.data import read_image, read_label
    from mezzo.vision.infer import find_images
    from mezzo.vision.infer.maps import result_names

    source = Path(record.cwd, sources[-1])
    images = find_images(source)
    labels = _listed_labels(source)
    for number, (path, name) in enumerate(zip(images[:PER_STEP], result_names(images, source)[:PER_STEP], strict=True)):
        prediction = read_label(Path(record.cwd, results[-1], "labels", f"{name}.png"))
        label = read_label(labels[number]) if number < len(labels) else None
        stem = f"{_NOT_IN_NAMES.sub('_', record.step)[:60]}-{number}"
        write_file(folder / f"{stem}-image.jpg", _photo(read_image(path)))
        write_file(folder / f"{stem}-prediction.png", _classes(prediction))
        if label is not None:
            write_file(folder / f"{stem}-label.png", _classes(label))
        yield PictureSet(
            step=record.step,
            name=one_line(path.name, 80),
            image=f"{stem}-image.jpg",
            label=f"{stem}-label.png" if label is not None else "",
            prediction=f"{stem}-prediction.png",
            equal=_equal(prediction, label),
        )


def _listed_labels(source: Path) -> list[Path]:
    """Return the labels that a list names in its second column; empty if it is no list, or has no such column."""
    if source.suffix.lower() not in (".txt", ".list"):
        return []
    from mezzo.vision.data import listed_path, read_list_file

    rows = [(where, re.split(r"[\s,]+", line)) for where, line in read_list_file(source)]
    if any(len(row) < 2 for _, row in rows):
        return []
    return [Path(listed_path(str(source.parent), row[1], where)) for where, row in rows]


def _equal(prediction: Any, label: Any) -> float | None:
    if label is None or prediction.shape != label.shape:
        return None
    known = label != IGNORED
    return float((prediction == label)[known].mean()) if known.any() else None


def _photo(image: Any) -> bytes:
    from PIL import Image

    picture = Image.fromarray(image)
    picture.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()


def _classes(labels: Any) -> bytes:
    """Return class ids as a PNG with a palette, as small as it can be; pixels without a label are white."""
    import numpy as np
    from PIL import Image

    from mezzo.vision.infer.maps import class_colors

    known = labels[labels != IGNORED]
    count = int(known.max()) + 1 if known.size else 0
    colours = np.concatenate([class_colors(count), np.full((1, 3), 255, np.uint8)])
    picture = Image.fromarray(np.where(labels == IGNORED, count, labels).astype(np.uint8))
    picture.putpalette(colours.tobytes())
    picture.thumbnail((SIDE, SIDE), Image.Resampling.NEAREST)
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return file.getvalue()


@dataclass(frozen=True, slots=True)
class ShownPictures:
    """The pictures of one image as the page shows them: addresses with their content."""

    step: str
    name: str
    parts: tuple[tuple[str, str], ...]
    """Title and `data:` address."""
    equal: float | None

    @property
    def size(self) -> int:
        """Characters of all addresses."""
        return sum(len(address) for _, address in self.parts)


def read_pictures(run: RecordedRun) -> list[ShownPictures]:
    """Return the pictures in the folder of a run; what is damaged or not a picture is left out."""
    path = run.directory / FOLDER / INDEX
    if not _is_inside(path, run):
        return []
    try:
        rows = parse_json(read_bytes(path, limit=MiB))
    except (ValueError, FileError):
        return []
    return [shown for row in rows if (shown := _shown(run, row)) is not None] if isinstance(rows, list) else []


def _shown(run: RecordedRun, row: Any) -> ShownPictures | None:
    if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in ("step", "name")):
        return None
    titles = ("image", "label", "prediction")
    parts = [(title, address) for title in titles if (address := _address(run, row.get(title)))]
    equal = row.get("equal")
    share = equal if isinstance(equal, float) and 0 <= equal <= 1 else None
    return ShownPictures(row["step"], row["name"], tuple(parts), share) if parts else None


def _address(run: RecordedRun, name: object) -> str:
    """Return a picture as a `data:` address; empty if there is none with this name, or it is something else."""
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None or not _is_inside(path := run.directory / FOLDER / match[0], run):
        return ""
    try:
        data = read_bytes(path, limit=MAX_BYTES)
    except FileError:
        return ""
    magic, kind = _TYPES[match[1]]
    return f"data:{kind};base64,{base64.b64encode(data).decode()}" if data.startswith(magic) else ""


def _is_inside(path: Path, run: RecordedRun) -> bool:
    return is_regular(path) and path.resolve().is_relative_to(run.directory.resolve())
