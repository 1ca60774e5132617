"""Random sizes: by a factor, by the long side, or by a part of the image."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mezzo.vision.data._sample import Sample
from mezzo.vision.data.transforms import _checks as check
from mezzo.vision.data.transforms._both import crop_both, resize_both
from mezzo.vision.data.transforms._resize import scale_both
from mezzo.vision.data.transforms._undo import Undo

TRIES = 10


@dataclass(slots=True)
class ResizeRangeScaling:
    """Resizes so that the long side has a length drawn from `min_value` to `max_value`."""

    undone_by: ClassVar[Undo] = "never"

    min_value: int = 400
    max_value: int = 600

    def __post_init__(self) -> None:
        check.at_least(self, "min_value", 1)
        check.at_least(self, "max_value", 1)
        check.ordered(self, "min_value", "max_value")

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample at the drawn size."""
        long = math.floor(rng.uniform(self.min_value, self.max_value) + 0.5)
        return scale_both(sample, long / max(sample.image.shape[:2]))


@dataclass(slots=True)
class ResizeStepScaling:
    """Resizes by a factor drawn from `min_scale_factor`, one step more, ... up to `max_scale_factor`.

    Args:
        min_scale_factor: The smallest factor.
        max_scale_factor: The largest factor.
        scale_step_size: Step between the factors; 0 draws from the whole range.
    """

    undone_by: ClassVar[Undo] = "never"

    min_scale_factor: float = 0.75
    max_scale_factor: float = 1.25
    scale_step_size: float = 0.25

    def __post_init__(self) -> None:
        check.above_zero(self, "min_scale_factor")
        check.above_zero(self, "max_scale_factor")
        check.ordered(self, "min_scale_factor", "max_scale_factor")
        check.at_least(self, "scale_step_size", 0)

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample at the drawn size."""
        return scale_both(sample, self._factor(rng))

    def _factor(self, rng: np.random.Generator) -> float:
        low, high = self.min_scale_factor, self.max_scale_factor
        if not self.scale_step_size:
            return float(rng.uniform(low, high))
        # slightly more, so that 0.4 to 0.7 in steps of 0.1 gives four factors
        factors = np.linspace(low, high, int((high - low) / self.scale_step_size + 1 + 1e-9))
        return float(factors[rng.integers(len(factors))])


@dataclass(slots=True)
class RandomScaleAspect:
    """Crops a part of random area and aspect ratio, and resizes it to the size of the image.

    Args:
        min_scale: Smallest part of the area, 0 to 1; 0 switches the transform off.
        aspect_ratio: Width over height is drawn from this to its inverse; 0 switches the transform off.
    """

    undone_by: ClassVar[Undo] = "never"

    min_scale: float = 0.5
    aspect_ratio: float = 0.33

    def __post_init__(self) -> None:
        check.probability(self, "min_scale")
        check.probability(self, "aspect_ratio")

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the enlarged part, or the unchanged sample if none of ten parts fits."""
        height, width = sample.image.shape[:2]
        if not self.min_scale or not self.aspect_ratio:
            return sample
        for _ in range(TRIES):
            part_width, part_height = self._part(width * height, rng)
            if 0 < part_width < width and 0 < part_height < height:
                left, top = rng.integers(width - part_width), rng.integers(height - part_height)
                return resize_both(crop_both(sample, left, top, part_width, part_height), width, height)
        return sample

    def _part(self, area: int, rng: np.random.Generator) -> tuple[int, int]:
        """Return width and height of a drawn part."""
        part = area * rng.uniform(self.min_scale, 1)
        ratio = rng.uniform(self.aspect_ratio, 1 / self.aspect_ratio)
        sides = int(math.sqrt(part * ratio)), int(math.sqrt(part / ratio))
        return sides if rng.random() < 0.5 else sides[::-1]
