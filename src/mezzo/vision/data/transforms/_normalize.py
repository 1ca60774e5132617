"""Normalisation of pixel values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from mezzo._arguments import is_number
from mezzo.vision.data._sample import Sample
from mezzo.vision.data.transforms import _checks as check


@dataclass(slots=True)
class Normalize:
    """Computes (x / 255 - mean) / std per channel.

    At the end of a `Compose` it runs on the device, and images are copied as uint8.

    Args:
        mean: One number, or three for RGB.
        std: One number, or three for RGB; none may be 0.
    """

    needs_uint8: ClassVar[bool] = True

    mean: Sequence[float] = (0.5,)
    std: Sequence[float] = (0.5,)

    def __post_init__(self) -> None:
        self.mean = _three(self, "mean")
        self.std = _three(self, "std")
        if min(self.std) <= 0:
            raise check.fault(self, "std", "must be above 0")

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample with a float32 image."""
        scale = (1 / (255 * np.array(self.std))).astype(np.float32)
        shift = (np.array(self.mean) / np.array(self.std)).astype(np.float32)
        return replace(sample, image=sample.image.astype(np.float32) * scale - shift)


def _three(owner: Normalize, name: str) -> tuple[float, float, float]:
    """Return an attribute as three numbers."""
    value = getattr(owner, name)
    values = [value] if is_number(value) else value
    if check.is_sequence(values, 1):
        values = [values[0]] * 3
    if not check.is_sequence(values, 3) or not all(is_number(v) for v in values):
        raise check.fault(owner, name, "must be one number, or three for RGB")
    red, green, blue = (float(v) for v in values)
    return red, green, blue
