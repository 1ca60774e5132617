"""Automatic augmentation: Pillow operations with a strength, and three published policies.

AutoAugment (Cubuk 2018, the policy found on ImageNet), RandAugment (Cubuk 2019) and TrivialAugment
(Mueller 2021, wide).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from mezzo.errors import unknown_choice
from mezzo.vision.data._sample import Sample
from mezzo.vision.data.transforms import _checks as check

Operation = Callable[[Image.Image, float], Image.Image]
LEVELS = 10
"""Strengths of AutoAugment: 0 to 9."""
FINE_LEVELS = 31
"""Strengths of RandAugment and TrivialAugment: 0 to 30."""


def _move(image: Image.Image, a: float, b: float, c: float, d: float, e: float, f: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, (a, b, c, d, e, f), Image.Resampling.NEAREST)


OPERATIONS: dict[str, Operation] = {
    "Identity": lambda image, _: image,
    "ShearX": lambda image, v: _move(image, 1, v, 0, 0, 1, 0),
    "ShearY": lambda image, v: _move(image, 1, 0, 0, v, 1, 0),
    "TranslateX": lambda image, v: _move(image, 1, 0, -v, 0, 1, 0),
    "TranslateY": lambda image, v: _move(image, 1, 0, 0, 0, 1, -v),
    "Rotate": lambda image, v: image.rotate(v),
    "Brightness": lambda image, v: ImageEnhance.Brightness(image).enhance(1 + v),
    "Color": lambda image, v: ImageEnhance.Color(image).enhance(1 + v),
    "Contrast": lambda image, v: ImageEnhance.Contrast(image).enhance(1 + v),
    "Sharpness": lambda image, v: ImageEnhance.Sharpness(image).enhance(1 + v),
    "Posterize": lambda image, v: ImageOps.posterize(image, 8 - round(v)),
    "Solarize": lambda image, v: ImageOps.solarize(image, 256 - round(v)),
    "AutoContrast": lambda image, _: ImageOps.autocontrast(image),
    "Equalize": lambda image, _: ImageOps.equalize(image),
    "Invert": lambda image, _: ImageOps.invert(image),
}
"""Operations by name.

Units of the strength: shears a factor, translations pixels, `Rotate` degrees.

`Brightness`, `Color`, `Contrast` and `Sharpness`: a factor minus 1. `Posterize`: bits removed.
`Solarize`: number of grey levels that are inverted, from the brightest.
"""

SIGNED = frozenset("ShearX ShearY TranslateX TranslateY Rotate Brightness Color Contrast Sharpness".split())
"""Operations whose strength gets a random sign."""

STRONGEST = {
    "ShearX": 0.3,
    "ShearY": 0.3,
    "TranslateX": 150 / 331,
    "TranslateY": 150 / 331,
    "Rotate": 30,
    "Brightness": 0.9,
    "Color": 0.9,
    "Contrast": 0.9,
    "Sharpness": 0.9,
    "Posterize": 4,
    "Solarize": 256,
}
"""Strength at the highest level; a translation is a fraction of the side."""

STRONGEST_WIDE = {**dict.fromkeys(STRONGEST, 0.99), "TranslateX": 32, "TranslateY": 32, "Rotate": 135}
STRONGEST_WIDE |= {"Posterize": 6, "Solarize": 256}
"""Strength at the highest level of TrivialAugment; a translation is in pixels."""

CHOICES = tuple(name for name in OPERATIONS if name != "Invert")
"""Operations of RandAugment and TrivialAugment."""

IMAGENET_POLICY = """
Posterize 0.4 8, Rotate 0.6 9        Solarize 0.6 5, AutoContrast 0.6 0   Equalize 0.8 0, Equalize 0.6 0
Posterize 0.6 7, Posterize 0.6 6     Equalize 0.4 0, Solarize 0.2 4       Equalize 0.4 0, Rotate 0.8 8
Solarize 0.6 3, Equalize 0.6 0       Posterize 0.8 5, Equalize 1.0 0      Rotate 0.2 3, Solarize 0.6 8
Equalize 0.6 0, Posterize 0.4 6      Rotate 0.8 8, Color 0.4 0            Rotate 0.4 9, Equalize 0.6 0
Equalize 0.0 0, Equalize 0.8 0       Invert 0.6 0, Equalize 1.0 0         Color 0.6 4, Contrast 1.0 8
Rotate 0.8 8, Color 1.0 2            Color 0.8 8, Solarize 0.8 7          Sharpness 0.4 7, Invert 0.6 0
ShearX 0.6 5, Equalize 1.0 0         Color 0.4 0, Equalize 0.6 0          Equalize 0.4 0, Solarize 0.2 4
Solarize 0.6 5, AutoContrast 0.6 0   Invert 0.6 0, Equalize 1.0 0         Color 0.6 4, Contrast 1.0 8
Equalize 0.8 0, Equalize 0.6 0
"""
"""The 25 pairs of AutoAugment: operation, probability, level from 0 to 9."""

Step = tuple[str, float, int]


def read_policy(text: str) -> tuple[tuple[Step, Step], ...]:
    """Return the pairs of a policy table.

    >>> read_policy("Rotate 0.8 8, Color 0.4 0")
    ((('Rotate', 0.8, 8), ('Color', 0.4, 0)),)
    """
    words = text.replace(",", " ").split()
    steps = [(words[i], float(words[i + 1]), int(words[i + 2])) for i in range(0, len(words), 3)]
    return tuple(zip(steps[::2], steps[1::2], strict=True))


@dataclass(slots=True)
class AutoAugment:
    """Changes an image with operations that a published policy chooses at random.

    Args:
        policy: `imagenet` (AutoAugment), `ra` (RandAugment) or `ta_wide` (TrivialAugment).
        num_ops: For `ra`: number of operations per image.
        magnitude: For `ra`: their level, 0 to 30.
    """

    needs_uint8: ClassVar[bool] = True

    policy: str = "imagenet"
    num_ops: int = 2
    magnitude: int = 9

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError("AutoAugment: " + unknown_choice("policy", self.policy, POLICIES))
        check.integer(self, "num_ops")
        check.integer(self, "magnitude", 0, FINE_LEVELS - 1)

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample with a changed image."""
        image = Image.fromarray(sample.image)
        for name, strength in POLICIES[self.policy](self, image.size, rng):
            sign = -1 if name in SIGNED and rng.random() < 0.5 else 1
            image = OPERATIONS[name](image, sign * strength)
        return replace(sample, image=np.array(image))


Drawn = list[tuple[str, float]]


def _draw_imagenet(own: AutoAugment, size: tuple[int, int], rng: np.random.Generator) -> Drawn:
    """Choose one of the 25 pairs; return each of its operations with its probability."""
    pair = PAIRS[rng.integers(len(PAIRS))]
    return [(name, _strength(name, level / (LEVELS - 1), size)) for name, prob, level in pair if rng.random() < prob]


def _draw_rand(own: AutoAugment, size: tuple[int, int], rng: np.random.Generator) -> Drawn:
    names = [CHOICES[rng.integers(len(CHOICES))] for _ in range(own.num_ops)]
    return [(name, _strength(name, own.magnitude / (FINE_LEVELS - 1), size)) for name in names]


def _draw_trivial(own: AutoAugment, size: tuple[int, int], rng: np.random.Generator) -> Drawn:
    name = CHOICES[rng.integers(len(CHOICES))]
    return [(name, STRONGEST_WIDE.get(name, 0) * rng.integers(FINE_LEVELS) / (FINE_LEVELS - 1))]


def _strength(name: str, part: float, size: tuple[int, int]) -> float:
    """Return a fraction of an operation's highest strength; a translation is in pixels."""
    side = {"TranslateX": size[0], "TranslateY": size[1]}.get(name, 1)
    return STRONGEST.get(name, 0) * part * side


PAIRS = read_policy(IMAGENET_POLICY)
POLICIES: dict[str, Callable[[AutoAugment, tuple[int, int], np.random.Generator], Drawn]] = {
    "imagenet": _draw_imagenet,
    "ra": _draw_rand,
    "ta_wide": _draw_trivial,
}
