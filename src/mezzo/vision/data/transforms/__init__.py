"""Transforms of images and labels, under the names that PaddleSeg's files give them."""

from collections.abc import Callable

from mezzo.vision.data._sample import Transform
from mezzo.vision.data.transforms._blur import RandomBlur, RandomNoise
from mezzo.vision.data.transforms._colour import RandomDistort
from mezzo.vision.data.transforms._compose import Compose
from mezzo.vision.data.transforms._crop import Padding, PaddingByAspectRatio, RandomCenterCrop, RandomPaddingCrop
from mezzo.vision.data.transforms._normalize import Normalize
from mezzo.vision.data.transforms._resize import LimitLong, Resize, ResizeByLong, ResizeByShort
from mezzo.vision.data.transforms._scale import RandomScaleAspect, ResizeRangeScaling, ResizeStepScaling
from mezzo.vision.data.transforms._warp import RandomAffine, RandomHorizontalFlip, RandomRotation, RandomVerticalFlip

TRANSFORMS: dict[str, Callable[..., Transform]] = {
    kind.__name__: kind
    for kind in (
        Resize,
        ResizeByLong,
        ResizeByShort,
        LimitLong,
        ResizeRangeScaling,
        ResizeStepScaling,
        RandomScaleAspect,
        Padding,
        PaddingByAspectRatio,
        RandomPaddingCrop,
        RandomCenterCrop,
        RandomHorizontalFlip,
        RandomVerticalFlip,
        RandomRotation,
        RandomAffine,
        RandomDistort,
        RandomBlur,
        RandomNoise,
        Normalize,
    )
}
"""Type names of PaddleSeg's files; arguments, their defaults and [width, height] are PaddleSeg's."""

__all__ = [
    "TRANSFORMS",
    "Compose",
    "Resize",
    "ResizeByLong",
    "ResizeByShort",
    "LimitLong",
    "ResizeRangeScaling",
    "ResizeStepScaling",
    "RandomScaleAspect",
    "Padding",
    "PaddingByAspectRatio",
    "RandomPaddingCrop",
    "RandomCenterCrop",
    "RandomHorizontalFlip",
    "RandomVerticalFlip",
    "RandomRotation",
    "RandomAffine",
    "RandomDistort",
    "RandomBlur",
    "RandomNoise",
    "Normalize",
]
