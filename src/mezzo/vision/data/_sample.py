"""What travels from a data set through the transforms: one image, its label, and where it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

IGNORE = 255
"""The label of pixels that count for nothing; data sets that use another value are translated when read."""


@dataclass(slots=True)
class Sample:
    """One image with its label."""

    image: NDArray[Any]
    """(H, W, 3) uint8, RGB; float32 after a Normalize that ran on the host."""
    label: NDArray[np.uint8] | int | None
    """(H, W) class ids, 255 ignored; or a class index; or nothing, where a test list has no labels."""
    path: str
    """Of the image, for messages."""
    undo: tuple[tuple[str, int, int], ...] = ()
    """In evaluation: what changed the image's size (`resize` or `pad`) and the height and width before it, in order."""


class Transform(Protocol):
    """Changes a sample; everything random in it comes from the generator that it is given."""

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the changed sample; the one that came may share arrays with it."""
        ...


class Dataset(Protocol):
    """Samples by number, decoded and not transformed."""

    num_classes: int

    def __len__(self) -> int:
        """Return how many samples there are."""
        ...

    def path(self, index: int) -> str:
        """Return the image file of a sample."""
        ...

    def read(self, index: int) -> Sample:
        """Return a sample in arrays of its own."""
        ...
