"""Resizing to a width and height, or by the long or the short side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import cv2
import numpy as np

from mezzo.errors import unknown_choice
from mezzo.vision.data._sample import Sample
from mezzo.vision.data.transforms import _checks as check
from mezzo.vision.data.transforms._both import resize_both
from mezzo.vision.data.transforms._undo import Undo

INTERPOLATIONS = {
    "NEAREST": cv2.INTER_NEAREST,
    "LINEAR": cv2.INTER_LINEAR,
    "CUBIC": cv2.INTER_CUBIC,
    "AREA": cv2.INTER_AREA,
    "LANCZOS4": cv2.INTER_LANCZOS4,
}


@dataclass(slots=True)
class Resize:
    """Resizes to [width, height]; with `keep_ratio` to the largest size whose sides fit, long to long, short to short.

    Args:
        target_size: Width and height.
        interp: NEAREST, LINEAR, CUBIC, AREA, LANCZOS4, or RANDOM for another one each time.
        keep_ratio: Keep the shape of the image; the result may be smaller than asked.
        size_divisor: Both sides are then made larger, to a multiple of this; None leaves them.
    """

    undone_by: ClassVar[Undo] = "resize"

    target_size: Sequence[int] = (512, 512)
    interp: str = "LINEAR"
    keep_ratio: bool = False
    size_divisor: int | None = None

    def __post_init__(self) -> None:
        self.target_size = check.width_height(self, "target_size")
        if self.interp not in (*INTERPOLATIONS, "RANDOM"):
            raise ValueError("Resize: " + unknown_choice("interp", self.interp, (*INTERPOLATIONS, "RANDOM")))
        if self.size_divisor is not None:
            check.integer(self, "size_divisor")

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample at the size."""
        width, height = self._size(sample.image.shape[1], sample.image.shape[0])
        name = self.interp if self.interp != "RANDOM" else list(INTERPOLATIONS)[rng.integers(len(INTERPOLATIONS))]
        return resize_both(sample, width, height, INTERPOLATIONS[name])

    def _size(self, now_width: int, now_height: int) -> tuple[int, int]:
        """Return width and height of the result for an image of a size."""
        width, height = self.target_size
        if self.keep_ratio:
            now = now_width, now_height
            scale = min(max(width, height) / max(now), min(width, height) / min(now))
            width, height = max(1, round(now_width * scale)), max(1, round(now_height * scale))
        step = self.size_divisor or 1
        return -(-width // step) * step, -(-height // step) * step


@dataclass(slots=True)
class ResizeByLong:
    """Resizes so that the long side has length `long_size`."""

    undone_by: ClassVar[Undo] = "resize"

    long_size: int

    def __post_init__(self) -> None:
        check.integer(self, "long_size")

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample at the size."""
        return scale_both(sample, self.long_size / max(sample.image.shape[:2]))


@dataclass(slots=True)
class ResizeByShort:
    """Resizes so that the short side has length `short_size`."""

    undone_by: ClassVar[Undo] = "resize"

    short_size: int

    def __post_init__(self) -> None:
        check.integer(self, "short_size")

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample at the size."""
        return scale_both(sample, self.short_size / min(sample.image.shape[:2]))


@dataclass(slots=True)
class LimitLong:
    """Resizes only images whose long side is above `max_long` or below `min_long`, to that limit."""

    undone_by: ClassVar[Undo] = "resize"

    max_long: int | None = None
    min_long: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_long", "min_long"):
            if getattr(self, name) is not None:
                check.integer(self, name)
        if self.max_long is not None and self.min_long is not None:
            check.ordered(self, "min_long", "max_long")

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample inside the limits."""
        long = max(sample.image.shape[:2])
        wanted = long if self.max_long is None else min(long, self.max_long)
        wanted = wanted if self.min_long is None else max(wanted, self.min_long)
        return scale_both(sample, wanted / long)


def scale_both(sample: Sample, factor: float) -> Sample:
    """Return the sample with both sides multiplied and rounded."""
    height, width = sample.image.shape[:2]
    return resize_both(sample, round(width * factor), round(height * factor))
