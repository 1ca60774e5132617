"""Padding and cropping to a size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mezzo._arguments import is_number
from mezzo.vision.data._errors import DataError
from mezzo.vision.data._sample import IGNORE, Sample
from mezzo.vision.data.transforms import _checks as check
from mezzo.vision.data.transforms._both import Colour, crop_both, pad_both
from mezzo.vision.data.transforms._undo import Undo

TRIES = 10
GREY = 127.5  # as in PaddleSeg; 128 in a uint8 image, see _checks.colour


@dataclass(slots=True)
class Padding:
    """Pads at the right and the bottom to [width, height]; a larger image is an error.

    Args:
        target_size: Width and height.
        im_padding_value: A grey or RGB value.
        label_padding_value: Label of the padding.
    """

    undone_by: ClassVar[Undo] = "pad"

    target_size: Sequence[int]
    im_padding_value: float | Sequence[float] = GREY
    label_padding_value: int = IGNORE

    def __post_init__(self) -> None:
        self.target_size = check.width_height(self, "target_size")
        _check_values(self)

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the padded sample."""
        height, width = sample.image.shape[:2]
        wanted_width, wanted_height = self.target_size
        if width > wanted_width or height > wanted_height:
            raise DataError(
                f"{sample.path}: the image is {width} x {height} here, larger than Padding's target_size "
                f"{list(self.target_size)}; resize or crop before it"
            )
        return pad_both(sample, wanted_width, wanted_height, _colour(self), self.label_padding_value)


@dataclass(slots=True)
class PaddingByAspectRatio:
    """Pads at the right or the bottom until width over height is `aspect_ratio`."""

    undone_by: ClassVar[Undo] = "pad"

    aspect_ratio: float = 1
    im_padding_value: float | Sequence[float] = GREY
    label_padding_value: int = IGNORE

    def __post_init__(self) -> None:
        check.above_zero(self, "aspect_ratio")
        _check_values(self)

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the padded sample."""
        height, width = sample.image.shape[:2]
        wide, high = int(height * self.aspect_ratio), int(width / self.aspect_ratio)
        return pad_both(sample, max(width, wide), max(height, high), _colour(self), self.label_padding_value)


@dataclass(slots=True)
class RandomPaddingCrop:
    """Pads at the right and the bottom to at least [width, height], then crops that size at a random position.

    Args:
        crop_size: Width and height.
        im_padding_value: A grey or RGB value.
        label_padding_value: Label of the padding.
        category_max_ratio: Below 1: draw up to ten parts until one has at least two classes, none with a larger share of
            the pixels that are not ignored. Needs a label map.
    """

    undone_by: ClassVar[Undo] = "never"

    crop_size: Sequence[int] = (512, 512)
    im_padding_value: float | Sequence[float] = GREY
    label_padding_value: int = IGNORE
    category_max_ratio: float = 1.0

    def __post_init__(self) -> None:
        self.crop_size = check.width_height(self, "crop_size")
        _check_values(self)
        check.above_zero(self, "category_max_ratio")
        if self.category_max_ratio > 1:
            raise check.fault(self, "category_max_ratio", "must be at most 1, the whole area")

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return a part of exactly the size."""
        width, height = self.crop_size
        padded = pad_both(sample, width, height, _colour(self), self.label_padding_value)
        now_height, now_width = padded.image.shape[:2]
        left, top = self._place(padded, rng)
        return padded if (now_width, now_height) == (width, height) else crop_both(padded, left, top, width, height)

    def _place(self, padded: Sample, rng: np.random.Generator) -> tuple[int, int]:
        """Return left and top of the first random part with a good mix of classes, or of the last one."""
        width, height = self.crop_size
        rows, columns = padded.image.shape[0] - height + 1, padded.image.shape[1] - width + 1
        label = padded.label if self.category_max_ratio < 1 and rows * columns > 1 else None
        for _ in range(TRIES):
            left, top = int(rng.integers(columns)), int(rng.integers(rows))
            if not isinstance(label, np.ndarray):
                break
            if _is_mixed(label[top : top + height, left : left + width], self.category_max_ratio):
                break
        return left, top


@dataclass(slots=True)
class RandomCenterCrop:
    """Crops a random part of the sides; at least `retain_ratio` of width and height is kept.

    Args:
        retain_ratio: Smallest kept shares of width and height, 0 to 1.
    """

    undone_by: ClassVar[Undo] = "never"

    retain_ratio: Sequence[float] = (0.5, 0.5)

    def __post_init__(self) -> None:
        ratios = self.retain_ratio
        if not check.is_sequence(ratios, 2) or not all(is_number(r) and 0 <= r <= 1 for r in ratios):
            raise check.fault(self, "retain_ratio", "must be two numbers from 0 to 1, [width, height]")

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the kept part."""
        left, width = _stays(sample.image.shape[1], self.retain_ratio[0], rng)
        top, height = _stays(sample.image.shape[0], self.retain_ratio[1], rng)
        return crop_both(sample, left, top, width, height)


def _stays(length: int, retain: float, rng: np.random.Generator) -> tuple[int, int]:
    """Return start and length of the kept part of a side."""
    cut = min(int(length * rng.random() * (1 - retain)), length - 1)
    return int(rng.integers(cut + 1)), length - cut


def _is_mixed(label: NDArray[np.uint8], most: float) -> bool:
    """Return whether a label has two classes or more, and none with more than a share of the pixels that are not ignored."""
    counts = np.bincount(label.ravel(), minlength=IGNORE + 1)[:IGNORE]
    return bool(np.count_nonzero(counts) > 1 and counts.max() <= most * counts.sum())


def _check_values(owner: Padding | PaddingByAspectRatio | RandomPaddingCrop) -> None:
    owner.im_padding_value = check.colour(owner, "im_padding_value")
    check.integer(owner, "label_padding_value", 0, 255)


def _colour(owner: Padding | PaddingByAspectRatio | RandomPaddingCrop) -> Colour:
    return check.colour(owner, "im_padding_value")
