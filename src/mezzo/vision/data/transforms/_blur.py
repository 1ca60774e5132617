"""Blur and noise; labels do not change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import cv2
import numpy as np

from mezzo.errors import unknown_choice
from mezzo.vision.data._sample import Sample
from mezzo.vision.data.transforms import _checks as check

BLURS = ("gaussian", "median", "blur", "random")


@dataclass(slots=True)
class RandomBlur:
    """Blurs with a probability, with a kernel 3 to 9 pixels wide.

    Args:
        prob: The probability, taken exactly (PaddleSeg rounds it to one over an integer).
        blur_type: gaussian, median, blur (the mean), or random for one of them.
    """

    needs_uint8: ClassVar[bool] = True

    prob: float = 0.1
    blur_type: str = "gaussian"

    def __post_init__(self) -> None:
        check.probability(self, "prob")
        if self.blur_type not in BLURS:
            raise ValueError("RandomBlur: " + unknown_choice("blur_type", self.blur_type, BLURS))

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample, its image perhaps blurred."""
        if rng.random() >= self.prob:
            return sample
        width = int(rng.integers(3, 10)) | 1  # kernels are odd: 4 becomes 5
        kind = self.blur_type if self.blur_type != "random" else BLURS[rng.integers(len(BLURS) - 1)]
        if kind == "median":
            return replace(sample, image=cv2.medianBlur(sample.image, width))
        if kind == "blur":
            return replace(sample, image=cv2.blur(sample.image, (width, width)))
        return replace(sample, image=cv2.GaussianBlur(sample.image, (width, width), 0))


@dataclass(slots=True)
class RandomNoise:
    """Adds Gaussian noise with a probability.

    Args:
        prob: The probability.
        max_sigma: The deviation is drawn from 0 to this, in grey levels.
    """

    needs_uint8: ClassVar[bool] = True

    prob: float = 0.5
    max_sigma: float = 10.0

    def __post_init__(self) -> None:
        check.probability(self, "prob")
        check.at_least(self, "max_sigma", 0)

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample, its image perhaps with noise."""
        if rng.random() >= self.prob:
            return sample
        sigma = np.float32(rng.uniform(0, self.max_sigma))
        noise = rng.standard_normal(sample.image.shape, dtype=np.float32) * sigma
        return replace(sample, image=np.clip(np.rint(sample.image + noise), 0, 255).astype(np.uint8))
