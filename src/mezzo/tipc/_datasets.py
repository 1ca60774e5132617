"""The data sets of the certification: which files each has, and which generator draws a small one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mezzo.vision.data import IMAGE_SUFFIXES, DataError, listed_path, read_list_file

VAL_LIST = "cityscapes_val_5.list"
VAL_IMAGES = 5
DEMO = "test/demo.jpg"
CLASSIFICATION = "classification"


def _add_nothing(folder: Path) -> None:
    """Leave a set unchanged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSet:
    """A data set of the certification."""

    name: str
    kind: str
    """The `type` in a recipe; `CLASSIFICATION` for folders or lists of images by class."""

    generator: str
    """The name in `mezzo.vision.lite.LITE` of the generator that draws a small set of the same form."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the generator; its defaults may take too long for a short run."""

    forms: tuple[tuple[str, ...], ...]
    """Alternative lists of patterns. A folder that matches all patterns of one list is such a set."""

    complete: Callable[[Path], None] = _add_nothing
    """Adds the files that inference needs and a real set does not have."""

    def first_missing(self, folder: Path) -> str | None:
        """Return the first pattern without a match in a folder, None if the folder looks like this set."""
        missing = [_first_missing(folder, form) for form in self.forms]
        return None if None in missing else missing[0]

    def describe_files(self) -> str:
        """Return the patterns as text, for messages."""
        return " or ".join(", ".join(form) for form in self.forms)


def _first_missing(folder: Path, patterns: tuple[str, ...]) -> str | None:
    return next((pattern for pattern in patterns if next(folder.glob(pattern), None) is None), None)


def _add_val_list(folder: Path) -> None:
    """Write the list of five images for inference that the small set of the documents has."""
    if (folder / VAL_LIST).exists():
        return
    images = sorted(path.relative_to(folder) for path in (folder / "leftImg8bit/val").glob("*/*_leftImg8bit.png"))
    lines = []
    for image in images[:VAL_IMAGES]:
        label = image.as_posix().replace("leftImg8bit/", "gtFine/", 1)
        lines.append(f"{image.as_posix()} {label.replace('_leftImg8bit.png', '_gtFine_labelTrainIds.png')}\n")
    (folder / VAL_LIST).write_text("".join(lines), encoding="utf-8")


def _add_demo(folder: Path) -> None:
    """Copy an image of the validation set to the path that inference reads."""
    demo = folder / DEMO
    if demo.exists():
        return
    image = first_image(folder)
    if demo.parent.is_symlink():  # the real set's own test images must not be changed, and are not needed
        demo.parent.unlink()
    demo.parent.mkdir(exist_ok=True)
    shutil.copyfile(image, demo)


def first_image(folder: Path) -> Path:
    """Return the first validation image of a classifier's data."""
    if (folder / "val_list.txt").is_file():
        where, line = next(read_list_file(folder / "val_list.txt"), ("", ""))
        return Path(listed_path(str(folder), line.rsplit(None, 1)[0] if line else "", where or "val_list.txt"))
    for path in (folder / "val").glob("*/*"):
        if path.suffix.lower() in IMAGE_SUFFIXES:
            return path
    raise DataError(f"{folder / 'val'}: no image in it")


DATASETS = (
    DataSet(
        name="mini_supervisely",
        kind="Dataset",
        generator="mini_supervisely",
        forms=(("train.txt", "val.txt", "test.txt"),),
    ),
    DataSet(
        name="Cityscapes",
        kind="Cityscapes",
        generator="cityscapes",
        forms=(
            (
                "leftImg8bit/train/*/*_leftImg8bit.png",
                "leftImg8bit/val/*/*_leftImg8bit.png",
                "gtFine/train/*/*_gtFine_labelTrainIds.png",
                "gtFine/val/*/*_gtFine_labelTrainIds.png",
            ),
        ),
        complete=_add_val_list,
    ),
    DataSet(
        name="ImageNet",
        kind=CLASSIFICATION,
        generator="imagenet_lite",
        options={"count": (8, 2)},  # five epochs of 32 steps at the documented batch of 4
        forms=(("train/*/*", "val/*/*"), ("train_list.txt", "val_list.txt")),
        complete=_add_demo,
    ),
)


def dataset_of(kind: str) -> DataSet | None:
    """Return the data set of a `type` in a recipe.

    >>> dataset_of("Cityscapes").generator
    'cityscapes'
    """
    return next((dataset for dataset in DATASETS if dataset.kind == kind), None)
