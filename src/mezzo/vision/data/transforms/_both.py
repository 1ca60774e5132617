"""Changes image and label together: images smoothly, label maps by nearest values, class indices not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from mezzo.vision.data._sample import Sample

Change = Callable[[NDArray[Any]], NDArray[Any]]
Colour = tuple[int, int, int]


def change_both(sample: Sample, image: Change, label: Change | None = None) -> Sample:
    """Return the sample with one function on its image and one (or the same) on its label map."""
    maps = label or image
    new_label = maps(sample.label) if isinstance(sample.label, np.ndarray) else sample.label
    return replace(sample, image=image(sample.image), label=new_label)


def resize_both(sample: Sample, width: int, height: int, interpolation: int = cv2.INTER_LINEAR) -> Sample:
    """Return the sample at a size; the label always takes the nearest value."""
    size = (max(1, width), max(1, height))
    if sample.image.shape[1::-1] == size:
        return sample
    return change_both(
        sample,
        lambda image: cv2.resize(image, size, interpolation=interpolation),
        lambda label: cv2.resize(label, size, interpolation=cv2.INTER_NEAREST),
    )


def crop_both(sample: Sample, left: int, top: int, width: int, height: int) -> Sample:
    """Return a part of the sample, in arrays of its own."""
    return change_both(sample, lambda array: array[top : top + height, left : left + width].copy())


def pad_both(sample: Sample, width: int, height: int, colour: Colour, label_value: int) -> Sample:
    """Return the sample grown to at least a size, at the right and the bottom."""
    now_height, now_width = sample.image.shape[:2]
    bottom, right = max(0, height - now_height), max(0, width - now_width)
    if not bottom and not right:
        return sample

    def pad(value: Colour | int) -> Change:
        return lambda array: cv2.copyMakeBorder(array, 0, bottom, 0, right, cv2.BORDER_CONSTANT, value=value)

    return change_both(sample, pad(colour), pad(label_value))


def warp_both(
    sample: Sample, matrix: NDArray[Any], width: int, height: int, colour: Colour, label_value: int
) -> Sample:
    """Return the sample moved by a 2 x 3 matrix (old to new coordinates) onto a canvas of a size."""

    def warp(interpolation: int, value: Colour | int) -> Change:
        return lambda array: cv2.warpAffine(
            array, matrix, (width, height), flags=interpolation, borderMode=cv2.BORDER_CONSTANT, borderValue=value
        )

    return change_both(sample, warp(cv2.INTER_LINEAR, colour), warp(cv2.INTER_NEAREST, label_value))
