"""Segmentation data sets by their PaddleSeg type: list files, Cityscapes and other public sets."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mezzo.errors import unknown_choice
from mezzo.vision.data._errors import DataError
from mezzo.vision.data._lists import check_listed, existing_folder, listed_path, read_list_file
from mezzo.vision.data._pairs import Pair, PairDataset
from mezzo.vision.data._sample import IGNORE

MODES = ("train", "val", "test")


class ListDataset(PairDataset):
    """The samples of a list file: one `image label` per line, paths relative to the root or absolute.

    Args:
        dataset_root: Folder that the lines are relative to.
        num_classes: Labels are 0 to num_classes - 1.
        mode: Which list is read: train, val or test. Only a test list may lack the labels.
        train_path: List for training, relative to the current folder or else to the root; so are the next two.
        val_path: List for evaluation.
        test_path: List for testing.
        separator: Separator of the columns.
        ignore_index: Label value of ignored pixels in the files.
        edge: Not supported: must be false.
        img_channels: Only 3.

    Raises:
        DataError: A folder, a list or a listed file is missing, or a line is wrong; the message names the line.
    """

    MODES: tuple[str, ...] = MODES

    def __init__(
        self,
        dataset_root: str,
        num_classes: int,
        mode: str = "train",
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        separator: str = " ",
        ignore_index: int = IGNORE,
        edge: bool = False,
        img_channels: int = 3,
    ) -> None:
        _check_unsupported(edge, img_channels)
        given = {"train": train_path, "val": val_path, "test": test_path}[_mode(mode, self.MODES)]
        if not given:
            raise ValueError(f"Dataset: mode={mode!r} needs {mode}_path, the list file")
        if not separator:
            raise ValueError("Dataset: separator='' is empty; give what stands between the columns")
        root = existing_folder(dataset_root, "dataset_root")
        pairs = _read_pairs(_list_file(given, root), root, separator, label_required=mode != "test")
        super().__init__(pairs, num_classes, ignore_index)


class Cityscapes(PairDataset):
    """The tree `leftImg8bit/MODE/CITY/ID_leftImg8bit.png`, `gtFine/MODE/CITY/ID_gtFine_labelTrainIds.png`.

    Args:
        dataset_root: Folder that holds both trees.
        mode: train, val or test; test may lack the labels.
        edge: Not supported: must be false.
    """

    NUM_CLASSES = 19
    MODES = MODES

    def __init__(self, dataset_root: str, mode: str = "train", edge: bool = False) -> None:
        _check_unsupported(edge)
        root = existing_folder(dataset_root, "dataset_root")
        images = _tree(root, "leftImg8bit", _mode(mode), "_leftImg8bit.png")
        labels = _tree(root, "gtFine", mode, "_gtFine_labelTrainIds.png")
        if not images:
            raise DataError(f"{root}: no leftImg8bit/{mode}/*/*_leftImg8bit.png; is this the Cityscapes folder?")
        if mode == "test" and not labels:
            super().__init__([(path, None) for path in images.values()], self.NUM_CLASSES)
        else:
            super().__init__(_match(images, labels, root, mode), self.NUM_CLASSES)


class ADE20K(PairDataset):
    """ADE20K, 150 classes: `images/training/x.jpg`, `annotations/training/x.png`; its label 0 is ignored.

    Args:
        dataset_root: Folder that holds `images` and `annotations`.
        mode: train or val (`training`, `validation` in the paths).
        edge: Not supported: must be false.
    """

    NUM_CLASSES = 150
    MODES = ("train", "val")

    def __init__(self, dataset_root: str, mode: str = "train", edge: bool = False) -> None:
        _check_unsupported(edge)
        split = {"train": "training", "val": "validation"}[_mode(mode, self.MODES)]
        root = existing_folder(dataset_root, "dataset_root")
        images = sorted(glob.glob("*.jpg", root_dir=os.path.join(root, "images", split)))
        if not images:
            raise DataError(f"{root}: no images/{split}/*.jpg; is this the ADE20K folder?")
        labels = [os.path.join(root, "annotations", split, f"{Path(name).stem}.png") for name in images]
        pairs = zip((os.path.join(root, "images", split, name) for name in images), labels, strict=True)
        super().__init__(list(pairs), self.NUM_CLASSES)

    def _meaning(self, label: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return label - np.uint8(1)  # classes are 1 to 150 in the files; 0, not labelled, becomes 255


class PascalVOC(PairDataset):
    """Pascal VOC 2012, 21 classes, by the names in `VOC2012/ImageSets/Segmentation/MODE.txt`.

    Args:
        dataset_root: Folder that holds `VOC2012`, or that folder itself.
        mode: train, val, trainval or trainaug. trainaug is train plus the images of `aug.txt`, with labels from
            `SegmentationClassAug`.
        edge: Not supported: must be false.
    """

    NUM_CLASSES = 21
    MODES = ("train", "val", "trainval", "trainaug")

    def __init__(self, dataset_root: str, mode: str = "train", edge: bool = False) -> None:
        _check_unsupported(edge)
        root = existing_folder(dataset_root, "dataset_root")
        nested = os.path.join(root, "VOC2012")
        base = nested if os.path.isdir(nested) else root
        if _mode(mode, self.MODES) == "trainaug":
            pairs = self._pairs(base, "train") + self._pairs(base, "aug", "SegmentationClassAug")
        else:
            pairs = self._pairs(base, mode)
        super().__init__(pairs, self.NUM_CLASSES)

    @staticmethod
    def _pairs(base: str, name: str, labels: str = "SegmentationClass") -> list[Pair]:
        """Return the pairs of a list, in its order."""
        return [
            (listed_path(base, f"JPEGImages/{stem}.jpg", where), listed_path(base, f"{labels}/{stem}.png", where))
            for where, stem in read_list_file(Path(base, "ImageSets", "Segmentation", f"{name}.txt"))
        ]


class _TwoClasses(ListDataset):
    """Two classes, with a list for each mode in the folder of the data.

    Args:
        dataset_root: Folder that holds the lists.
        mode: One of `MODES`.
        edge: Not supported: must be false.
    """

    NUM_CLASSES = 2
    LIST_NAME = "{mode}.txt"
    SEPARATOR = " "

    def __init__(self, dataset_root: str, mode: str = "train", edge: bool = False) -> None:
        lists = {name: os.path.join(dataset_root, self.LIST_NAME.format(mode=name)) for name in self.MODES}
        super().__init__(
            dataset_root,
            self.NUM_CLASSES,
            mode,
            train_path=lists["train"],
            val_path=lists["val"],
            test_path=lists.get("test"),
            separator=self.SEPARATOR,
            edge=edge,
        )


class OpticDiscSeg(_TwoClasses):
    """The optic disc set, two classes, with `train_list.txt`, `val_list.txt`, `test_list.txt` in its folder."""

    LIST_NAME = "{mode}_list.txt"


class PPHumanSeg14K(_TwoClasses):
    """PP-HumanSeg14K, people in video conferences, two classes, with `train.txt`, `val.txt`, `test.txt` in its folder."""


class MiniDeepGlobeRoadExtraction(_TwoClasses):
    """Roads from the air, two classes, with `train.txt` and `val.txt` in its folder; a line is `image|label`."""

    MODES = ("train", "val")
    SEPARATOR = "|"


DATASETS: dict[str, Callable[..., PairDataset]] = {
    "Dataset": ListDataset,
    "Cityscapes": Cityscapes,
    "ADE20K": ADE20K,
    "PascalVOC": PascalVOC,
    "OpticDiscSeg": OpticDiscSeg,
    "PPHumanSeg14K": PPHumanSeg14K,
    "MiniDeepGlobeRoadExtraction": MiniDeepGlobeRoadExtraction,
}
"""Type names of PaddleSeg's files; the arguments are those of the file, without `type` and `transforms`."""


def _mode(mode: str, allowed: tuple[str, ...] = MODES) -> str:
    if mode not in allowed:
        raise ValueError(unknown_choice("mode", mode, allowed))
    return mode


def _check_unsupported(edge: bool, img_channels: int = 3) -> None:
    if edge:
        raise ValueError("edge=True: edge labels are not offered, no network here has an edge loss; leave it out")
    if img_channels != 3:
        raise ValueError(f"img_channels={img_channels!r}: images are RGB, only 3 is possible")


def _list_file(given: str, root: str) -> Path:
    """Return the path of a list file: as given, or otherwise below the root."""
    inside_root = Path(root, given)
    return inside_root if os.path.isfile(inside_root) and not os.path.isfile(given) else Path(given)


def _read_pairs(path: Path, root: str, separator: str, *, label_required: bool) -> list[Pair]:
    """Return image and label file of every line; each must exist."""
    pairs = []
    for where, line in read_list_file(path):
        columns = [column.strip() for column in line.split(separator)]
        if not (1 if not label_required else 2) <= len(columns) <= 2:
            wanted = f"'image{separator}label'" + ("" if label_required else " or 'image'")
            raise DataError(f"{where}: {len(columns)} columns in {line!r}; a line is {wanted}")
        files = [listed_path(root, name, where) for name in columns]
        for name in files:
            check_listed(name, where)
        pairs.append((files[0], files[1] if len(files) == 2 else None))
    if not pairs:
        raise DataError(f"{path}: the list is empty")
    return pairs


def _tree(root: str, folder: str, mode: str, ending: str) -> dict[str, str]:
    """Return the files of a Cityscapes tree by city and id, sorted."""
    base = os.path.join(root, folder, mode)
    names = sorted(glob.glob(os.path.join("*", f"*{ending}"), root_dir=base))
    return {name.removesuffix(ending): os.path.join(base, name) for name in names}


def _match(images: dict[str, str], labels: dict[str, str], root: str, mode: str) -> list[Pair]:
    """Return the pairs; an image without label or the reverse is an error."""
    if odd := sorted(images.keys() ^ labels.keys()):
        lacks = "label" if odd[0] in images else "image"
        raise DataError(
            f"{root}: {len(images)} images and {len(labels)} labels (labelTrainIds) for {mode}, "
            f"{len(odd)} without partner; the first, {odd[0]}, has no {lacks}"
        )
    return [(path, labels[name]) for name, path in images.items()]
