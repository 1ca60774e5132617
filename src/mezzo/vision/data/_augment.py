"""Transforms for classification: cropping, resizing and random erasing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import cv2
import numpy as np

from mezzo._arguments import is_number
from mezzo.errors import unknown_choice
from mezzo.vision.data._sample import Sample
from mezzo.vision.data.transforms import _checks as check
from mezzo.vision.data.transforms._both import crop_both, resize_both

TRIES = 10


@dataclass(slots=True)
class RandomResizedCrop:
    """Crops a part of random area and aspect ratio, and resizes it to a square.

    Args:
        size: Side of the result in pixels.
        scale: Range of the share of the area.
        ratio: Range of width over height; its logarithm is uniform.
    """

    size: int
    scale: Sequence[float] = (0.08, 1.0)
    ratio: Sequence[float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        check.integer(self, "size")
        _check_range(self, "scale")
        _check_range(self, "ratio")
        if self.scale[1] > 1:
            raise check.fault(self, "scale", "must end at 1, the whole area")

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the part at the size."""
        left, top, width, height = self._part(sample.image.shape[1], sample.image.shape[0], rng)
        return _resize(crop_both(sample, left, top, width, height), self.size, self.size)

    def _part(self, width: int, height: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
        """Return left, top, width, height of a random part, or of the middle if none of ten fits."""
        for _ in range(TRIES):
            w, h = _draw_sides(width * height, self.scale, self.ratio, rng)
            if 0 < w <= width and 0 < h <= height:
                return int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1)), w, h
        w = max(1, min(width, round(height * self.ratio[1])))
        h = max(1, min(height, round(width / self.ratio[0])))
        return (width - w) // 2, (height - h) // 2, w, h


@dataclass(slots=True)
class ResizeShort:
    """Resizes so that the short side has length `size`."""

    size: int

    def __post_init__(self) -> None:
        check.integer(self, "size")

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample at the size."""
        height, width = sample.image.shape[:2]
        factor = self.size / min(height, width)
        return _resize(sample, round(width * factor), round(height * factor))


@dataclass(slots=True)
class CenterCrop:
    """Crops a square from the middle; a smaller image gets a black border."""

    size: int

    def __post_init__(self) -> None:
        check.integer(self, "size")

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the middle of the sample."""
        height, width = sample.image.shape[:2]
        padded = _surround(sample, (self.size - width + 1) // 2, (self.size - height + 1) // 2)
        height, width = padded.image.shape[:2]
        return crop_both(padded, (width - self.size) // 2, (height - self.size) // 2, self.size, self.size)


@dataclass(slots=True)
class RandomCrop:
    """Crops a square at a random position, after adding a black border.

    Args:
        size: Side of the result in pixels.
        padding: Minimum width of the border; it grows if the image is too small.
    """

    size: int
    padding: int = 0

    def __post_init__(self) -> None:
        check.integer(self, "size")
        check.integer(self, "padding", 0)

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return a part of the sample."""
        height, width = sample.image.shape[:2]
        lacks = [max(self.padding, (self.size - side + 1) // 2) for side in (width, height)]
        padded = _surround(sample, *lacks)
        height, width = padded.image.shape[:2]
        left, top = int(rng.integers(width - self.size + 1)), int(rng.integers(height - self.size + 1))
        return crop_both(padded, left, top, self.size, self.size)


@dataclass(slots=True)
class RandomErase:
    """Covers a random rectangle with a probability.

    Args:
        probability: The probability.
        scale: Range of the share of the area.
        ratio: Range of height over width; its logarithm is uniform.
        fill: `mean` covers with the mean colour of the image, `noise` with random grey levels.
    """

    needs_uint8: ClassVar[bool] = True

    probability: float = 0.5
    scale: Sequence[float] = (0.02, 0.33)
    ratio: Sequence[float] = (0.3, 3.3)
    fill: str = "mean"

    def __post_init__(self) -> None:
        check.probability(self, "probability")
        _check_range(self, "scale")
        _check_range(self, "ratio")
        if self.scale[1] > 1:
            raise check.fault(self, "scale", "must end at 1, the whole area")
        if self.fill not in ("mean", "noise"):
            raise ValueError("RandomErase: " + unknown_choice("fill", self.fill, ("mean", "noise")))

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample, perhaps with a covered rectangle; unchanged if none of ten fits."""
        height, width = sample.image.shape[:2]
        if rng.random() >= self.probability:
            return sample
        for _ in range(TRIES):
            h, w = _draw_sides(width * height, self.scale, self.ratio, rng)
            if 0 < w < width and 0 < h < height:
                top, left = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
                return self._cover(sample, slice(top, top + h), slice(left, left + w), rng)
        return sample

    def _cover(self, sample: Sample, rows: slice, columns: slice, rng: np.random.Generator) -> Sample:
        image = sample.image.copy()
        if self.fill == "mean":
            image[rows, columns] = np.rint(image.mean(axis=(0, 1)))
        else:
            image[rows, columns] = rng.integers(256, size=image[rows, columns].shape, dtype=np.uint8)
        return replace(sample, image=image)


def _draw_sides(area: int, scale: Sequence[float], ratio: Sequence[float], rng: np.random.Generator) -> tuple[int, int]:
    """Return random sides of a rectangle, by its share of the area and the ratio of the first to the second."""
    part = area * rng.uniform(scale[0], scale[1])
    first_by_second = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
    return round(math.sqrt(part * first_by_second)), round(math.sqrt(part / first_by_second))


def _resize(sample: Sample, width: int, height: int) -> Sample:
    """Return the resized sample; shrinking averages areas to avoid aliasing."""
    shrinks = width <= sample.image.shape[1] and height <= sample.image.shape[0]
    return resize_both(sample, width, height, cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)


def _surround(sample: Sample, across: int, down: int) -> Sample:
    """Return the sample with a black border, left and right, top and bottom."""
    x, y = max(0, across), max(0, down)
    if not x and not y:
        return sample
    return replace(sample, image=cv2.copyMakeBorder(sample.image, y, y, x, x, cv2.BORDER_CONSTANT, value=(0, 0, 0)))


def _check_range(owner: RandomResizedCrop | RandomErase, name: str) -> None:
    value = getattr(owner, name)
    if not check.is_sequence(value, 2) or not all(is_number(v) and v > 0 for v in value) or value[0] > value[1]:
        raise check.fault(owner, name, "must be two numbers above 0, the smaller first")
