"""Samples, data sets and transforms: the types of the data pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

IGNORE = 255
"""The label of ignored pixels; data sets convert other values when reading."""


@dataclass(slots=True)
class Sample:
    """One image with its label."""

    image: NDArray[Any]
    """(H, W, 3) uint8, RGB; float32 after a Normalize that ran on the host."""
    label: NDArray[np.uint8] | int | None
    """(H, W) class ids with 255 for ignored pixels, or a class index, or None in a test list without labels."""
    path: str
    """Path of the image, for messages."""
    undo: tuple[tuple[str, int, int], ...] = ()
    """In evaluation: the changes of the image size (`resize` or `pad`), with height and width before each."""


class Transform(Protocol):
    """Changes a sample; all random choices come from the given generator."""

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the changed sample; it may share arrays with the input."""
        ...


class Dataset(Protocol):
    """Decoded samples by index, before transforms."""

    num_classes: int

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def path(self, index: int) -> str:
        """Return the image file of a sample."""
        ...

    def read(self, index: int) -> Sample:
        """Return a sample with new arrays."""
        ...
