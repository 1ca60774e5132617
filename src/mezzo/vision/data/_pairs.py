"""Segmentation data as pairs of image and label files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mezzo._arguments import check_integer
from mezzo.vision.data._errors import DataError
from mezzo.vision.data._images import read_image, read_label
from mezzo.vision.data._sample import IGNORE, Sample

Pair = tuple[str, str | None]
"""Image file and label file; a test list may lack the labels."""


class PairDataset:
    """Images with label maps.

    Args:
        pairs: Image and label file of each sample.
        num_classes: Labels are 0 to num_classes - 1.
        ignore_index: Label value of ignored pixels in the files; `read` converts it to 255.
    """

    def __init__(self, pairs: Sequence[Pair], num_classes: int, ignore_index: int = IGNORE) -> None:
        self.pairs = list(pairs)
        self.num_classes = check_integer("num_classes", num_classes, at_least=1, at_most=IGNORE)  # labels have 8 bits
        self.ignore_index = check_integer("ignore_index", ignore_index, at_most=255)

    def __len__(self) -> int:
        return len(self.pairs)

    def path(self, index: int) -> str:
        """Return the image file of a sample."""
        return self.pairs[index][0]

    def read(self, index: int) -> Sample:
        """Return a sample with a checked label.

        Raises:
            DataError: A file cannot be read, the two differ in size, or the label contains a value that is not a class.
        """
        image_path, label_path = self.pairs[index]
        image = read_image(image_path)
        if label_path is None:
            return Sample(image, None, image_path)
        label = self._meaning(read_label(label_path))
        if image.shape[:2] != label.shape:
            raise DataError(
                f"{image_path} is {_wxh(image)} and its label {label_path} is {_wxh(label)} (width x height); "
                "they must have the same size"
            )
        check_range(label, self.num_classes, label_path)
        return Sample(image, label, image_path)

    def _meaning(self, label: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the label with ignored pixels as 255."""
        if self.ignore_index != IGNORE:
            label[label == self.ignore_index] = IGNORE
        return label


def check_range(label: NDArray[np.uint8], num_classes: int, path: str) -> None:
    """Raise a DataError if a label is neither a class nor 255."""
    wrong = label[(label >= num_classes) & (label != IGNORE)]
    if wrong.size:
        raise DataError(
            f"{path}: label {wrong[0]} in {wrong.size} pixels, but there are {num_classes} classes "
            f"(0 to {num_classes - 1}, {IGNORE} is ignored)"
        )


def _wxh(array: NDArray[np.uint8]) -> str:
    return f"{array.shape[1]} x {array.shape[0]}"
