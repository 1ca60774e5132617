"""Classification data: a folder for each class, or a list file with class indices."""

from __future__ import annotations

import os
from pathlib import Path

from mezzo.files import check_regular
from mezzo.vision.data._errors import DataError
from mezzo.vision.data._images import SUFFIXES, read_image
from mezzo.vision.data._lists import existing_folder, listed_path, read_list_file
from mezzo.vision.data._sample import Sample

TRAIN = "train"
SPLITS = (TRAIN, "val")


class ClassDataset:
    """Images with a class index.

    Args:
        entries: Image file and class index of each sample.
        num_classes: Number of classes; some may have no image.
    """

    def __init__(self, entries: list[tuple[str, int]], num_classes: int) -> None:
        self.entries = entries
        self.num_classes = num_classes

    def __len__(self) -> int:
        return len(self.entries)

    def path(self, index: int) -> str:
        """Return the image file of a sample."""
        return self.entries[index][0]

    def read(self, index: int) -> Sample:
        """Return a sample; a file that cannot be decoded is a DataError."""
        path, label = self.entries[index]
        return Sample(read_image(path), label, path)


class ImageFolder(ClassDataset):
    """`ROOT/SPLIT/CLASS/x.jpg`; the class index is the position of the folder name in sorted order.

    If there is a train split, its folders define the classes of every split, so indices agree even if val lacks some.
    Empty folders count; folders that start with a dot do not. Images lie directly in the folder of their class.

    Args:
        root: Folder that holds the splits.
        split: train or val.
        num_classes: Number of classes, if there are more than folders.

    Raises:
        DataError: The split is missing, has no class or no image, or has a class that train does not have.
    """

    def __init__(self, root: str | Path, split: str = "train", num_classes: int | None = None) -> None:
        base = Path(existing_folder(root, "data folder"), split)
        if not base.is_dir():
            raise DataError(f"{root}: no folder {split!r}; images lie in {split}/CLASS/x.jpg")
        train = Path(root, TRAIN)
        named_by = train if train.is_dir() else base
        own, self.classes = _folders(base), _folders(named_by)
        if odd := sorted(set(own) - set(self.classes)):
            raise DataError(
                f"{base / odd[0]}: {train} has no class {odd[0]!r}; add the folder there or remove this one"
            )
        if num_classes is not None and num_classes < len(self.classes):
            raise DataError(f"{named_by}: {len(self.classes)} class folders, but num_classes={num_classes}")
        index = {name: place for place, name in enumerate(self.classes)}
        entries = [(path, index[name]) for name in own for path in _images(base / name)]
        if not entries:
            raise DataError(f"{base}: no image in {len(own)} class folders; known are {', '.join(sorted(SUFFIXES))}")
        super().__init__(entries, num_classes or len(self.classes))


class ImageList(ClassDataset):
    """The samples of a list file: one `path label` per line, the path relative to the root or absolute, labels from 0.

    Args:
        root: Folder that the paths are relative to.
        list_path: The list file.
        num_classes: Number of classes; by default the largest label plus one.
    """

    def __init__(self, root: str | Path, list_path: str | Path, num_classes: int | None = None) -> None:
        base = existing_folder(root, "data folder")
        entries = [_entry(base, line, where, num_classes) for where, line in read_list_file(Path(list_path))]
        if not entries:
            raise DataError(f"{list_path}: the list is empty")
        super().__init__(entries, num_classes or 1 + max(label for _, label in entries))


def open_classification(root: str | Path, split: str, num_classes: int | None = None) -> ImageFolder | ImageList:
    """Return the data of a split: by `SPLIT_list.txt` or `SPLIT.txt` if there is one, otherwise by the folder SPLIT.

    Args:
        root: Folder with the data.
        split: train or val.
        num_classes: Number of classes; by default that of the data of both splits.

    Raises:
        DataError: There is neither, or the data cannot be used.
    """
    base = Path(existing_folder(root, "data folder"))
    if found := _list_of(base, split):
        return ImageList(base, found, num_classes or _classes_in_lists(base))
    if not (base / split).is_dir():
        raise DataError(
            f"{root}: neither a list file ({split}_list.txt or {split}.txt) nor a folder {split!r} with a folder a class"
        )
    return ImageFolder(base, split, num_classes)


def has_split(root: str | Path, split: str) -> bool:
    """Return whether a split has a list file or a folder; their content is not checked."""
    base = Path(root)
    return _list_of(base, split) is not None or (base / split).is_dir()


def _list_of(base: Path, split: str) -> Path | None:
    candidates = (base / f"{split}_list.txt", base / f"{split}.txt")
    return next((path for path in candidates if path.is_file()), None)


def _classes_in_lists(base: Path) -> int:
    """Return the number of classes in the lists of all splits together, as a small val may lack some."""
    lists = [found for split in SPLITS if (found := _list_of(base, split))]
    return max(ImageList(base, path).num_classes for path in lists)


def _folders(base: Path) -> list[str]:
    """Return the names of the class folders of a split, sorted; one at least."""
    names = sorted(entry.name for entry in os.scandir(base) if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise DataError(f"{base}: no class folders; images lie in {base.name}/CLASS/x.jpg")
    return names


def _images(folder: Path) -> list[str]:
    entries = [entry for entry in os.scandir(folder) if os.path.splitext(entry.name)[1].lower() in SUFFIXES]
    for entry in entries:
        if not (entry.is_symlink() or entry.is_file()):  # known from the listing; links are checked when they are read
            check_regular(entry.path, raising=DataError)
    return sorted(entry.path for entry in entries)


def _entry(root: str, line: str, where: str, num_classes: int | None) -> tuple[str, int]:
    """Return image file and class index of a line; the last column is the label, so paths may contain spaces."""
    columns = line.rsplit(None, 1)
    if len(columns) < 2:
        raise DataError(f"{where}: one column in {line!r}; a line is 'path label'")
    name, label = columns
    if not (label.isascii() and label.isdigit() and len(label) <= 9):
        raise DataError(f"{where}: {label!r} is not a class index; a line is 'path label', the label an integer from 0")
    if num_classes is not None and int(label) >= num_classes:
        raise DataError(f"{where}: label {label}, but there are {num_classes} classes (0 to {num_classes - 1})")
    return listed_path(root, name, where), int(label)
