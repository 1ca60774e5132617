"""Brightness, contrast, saturation, hue and sharpness, by Pillow's enhancers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import numpy as np
from PIL import Image, ImageEnhance

from mezzo.vision.data._sample import Sample
from mezzo.vision.data.transforms import _checks as check

HUES = 256  # Pillow's circle of hues

Enhancer = TypeVar("Enhancer", bound=ImageEnhance._Enhance)


@dataclass(slots=True)
class RandomDistort:
    """Changes five properties of colour, each with its probability, in random order.

    A range r means a factor drawn from 1 - r to 1 + r; for the hue a shift of up to r of Pillow's 256 hues.
    """

    needs_uint8: ClassVar[bool] = True

    brightness_range: float = 0.5
    brightness_prob: float = 0.5
    contrast_range: float = 0.5
    contrast_prob: float = 0.5
    saturation_range: float = 0.5
    saturation_prob: float = 0.5
    hue_range: float = 18
    hue_prob: float = 0.5
    sharpness_range: float = 0.5
    sharpness_prob: float = 0

    def __post_init__(self) -> None:
        for name in CHANGES:
            check.at_least(self, f"{name}_range", 0)
            check.probability(self, f"{name}_prob")
            if name != "hue" and getattr(self, f"{name}_range") > 1:
                raise check.fault(self, f"{name}_range", "must be at most 1: the factor is drawn from 1 - range on")

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample with other colours."""
        image = Image.fromarray(sample.image)
        for name in rng.permutation(list(CHANGES)):
            amount = rng.uniform(-1, 1) * getattr(self, f"{name}_range")
            if rng.random() < getattr(self, f"{name}_prob"):
                image = CHANGES[name](image, amount)
        return replace(sample, image=np.array(image))


def shift_hue(image: Image.Image, shift: float) -> Image.Image:
    """Return the image with its hues moved around Pillow's circle of 256."""
    hue, saturation, value = image.convert("HSV").split()
    turned = hue.point([int(h + shift) % HUES for h in range(HUES)])
    return Image.merge("HSV", (turned, saturation, value)).convert("RGB")


def _by(enhancer: Callable[[Image.Image], Enhancer]) -> Callable[[Image.Image, float], Image.Image]:
    """Return a change by 1 + amount of one of Pillow's enhancers."""
    return lambda image, amount: enhancer(image).enhance(1 + amount)


CHANGES: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "brightness": _by(ImageEnhance.Brightness),
    "contrast": _by(ImageEnhance.Contrast),
    "saturation": _by(ImageEnhance.Color),
    "hue": shift_hue,
    "sharpness": _by(ImageEnhance.Sharpness),
}
