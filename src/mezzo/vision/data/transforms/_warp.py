"""Flips, rotations and affine transforms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import cv2
import numpy as np

from mezzo.vision.data._sample import IGNORE, Sample
from mezzo.vision.data.transforms import _checks as check
from mezzo.vision.data.transforms._both import change_both, warp_both
from mezzo.vision.data.transforms._undo import Undo


@dataclass(slots=True)
class RandomHorizontalFlip:
    """Mirrors left and right with a probability."""

    undone_by: ClassVar[Undo] = "never"

    prob: float = 0.5

    def __post_init__(self) -> None:
        check.probability(self, "prob")

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample or its mirror image."""
        return change_both(sample, lambda array: cv2.flip(array, 1)) if rng.random() < self.prob else sample


@dataclass(slots=True)
class RandomVerticalFlip:
    """Mirrors top and bottom with a probability."""

    undone_by: ClassVar[Undo] = "never"

    prob: float = 0.1

    def __post_init__(self) -> None:
        check.probability(self, "prob")

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample or its mirror image."""
        return change_both(sample, lambda array: cv2.flip(array, 0)) if rng.random() < self.prob else sample


@dataclass(slots=True)
class RandomRotation:
    """Rotates by a random angle from -`max_rotation` to `max_rotation` degrees; the canvas grows to fit.

    Args:
        max_rotation: Degrees, 0 to 180.
        im_padding_value: A grey or RGB value for the corners.
        label_padding_value: Label of the padding.
    """

    undone_by: ClassVar[Undo] = "never"

    max_rotation: float = 15
    im_padding_value: float | Sequence[float] = 127.5
    label_padding_value: int = IGNORE

    def __post_init__(self) -> None:
        _check_degrees(self)
        self.im_padding_value = check.colour(self, "im_padding_value")
        check.integer(self, "label_padding_value", 0, 255)

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the rotated sample."""
        angle = rng.uniform(-self.max_rotation, self.max_rotation)
        height, width = sample.image.shape[:2]
        matrix = cv2.getRotationMatrix2D((width / 2, height / 2), angle, 1.0)
        cos, sin = abs(matrix[0, 0]), abs(matrix[0, 1])
        new_width, new_height = int(height * sin + width * cos), int(height * cos + width * sin)
        matrix[:, 2] += (new_width - width) / 2, (new_height - height) / 2
        colour = check.colour(self, "im_padding_value")
        return warp_both(sample, matrix, max(1, new_width), max(1, new_height), colour, self.label_padding_value)


@dataclass(slots=True)
class RandomAffine:
    """Resizes the image, with random rotation, scaling and translation.

    Args:
        size: Width and height of the result.
        translation_offset: Largest distance of the centre, in pixels.
        max_rotation: Degrees, 0 to 180.
        min_scale_factor: Smallest factor, beside the one that brings the image to the size.
        max_scale_factor: Largest factor.
        im_padding_value: A grey or RGB value for what lies outside.
        label_padding_value: Label of the padding.
    """

    undone_by: ClassVar[Undo] = "never"

    size: Sequence[int] = (224, 224)
    translation_offset: float = 0
    max_rotation: float = 15
    min_scale_factor: float = 0.75
    max_scale_factor: float = 1.25
    im_padding_value: float | Sequence[float] = 128
    label_padding_value: int = IGNORE

    def __post_init__(self) -> None:
        self.size = check.width_height(self, "size")
        check.at_least(self, "translation_offset", 0)
        _check_degrees(self)
        check.above_zero(self, "min_scale_factor")
        check.above_zero(self, "max_scale_factor")
        check.ordered(self, "min_scale_factor", "max_scale_factor")
        self.im_padding_value = check.colour(self, "im_padding_value")
        check.integer(self, "label_padding_value", 0, 255)

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample at the size."""
        width, height = self.size
        now_height, now_width = sample.image.shape[:2]
        fit = (width / now_width + height / now_height) / 2
        factor = fit * rng.uniform(self.min_scale_factor, self.max_scale_factor)
        angle = rng.uniform(-self.max_rotation, self.max_rotation)
        shift = rng.uniform(-self.translation_offset, self.translation_offset, size=2)
        centre = ((now_width - 1) / 2, (now_height - 1) / 2)
        matrix = cv2.getRotationMatrix2D(centre, angle, factor)
        matrix[:, 2] += np.array([(width - 1) / 2, (height - 1) / 2]) - centre + shift
        colour = check.colour(self, "im_padding_value")
        return warp_both(sample, matrix, width, height, colour, self.label_padding_value)


def _check_degrees(owner: RandomRotation | RandomAffine) -> None:
    check.at_least(owner, "max_rotation", 0)
    if owner.max_rotation > 180:
        raise check.fault(owner, "max_rotation", "must be at most 180 degrees")
