"""A chain of transforms, divided into a host part and a device part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mezzo.vision.data._sample import Sample, Transform
from mezzo.vision.data.transforms._normalize import Normalize
from mezzo.vision.data.transforms._undo import apply_noted, check_undo


class Compose:
    """Applies transforms in sequence.

    Args:
        transforms: In order. After a Normalize, only transforms that accept floats may follow.
        image_only: Do not change label maps: evaluation compares with the labels of the files. The sample's `undo` then
            records how the size of its image changed.

    Raises:
        ValueError: A transform needs uint8 images but would get floats; or, with `image_only`, it cannot be undone.

    Attributes:
        on_host: The transforms that a call applies.
        normalize: A final Normalize, which runs on the device, so that images are copied as uint8.
    """

    def __init__(self, transforms: Sequence[Transform], *, image_only: bool = False) -> None:
        chain = tuple(transforms)
        last = chain[-1] if chain else None
        self.normalize = last if isinstance(last, Normalize) else None
        self.on_host: tuple[Transform, ...] = chain if self.normalize is None else chain[:-1]
        self.image_only = image_only
        _check_order(chain)
        if image_only:
            check_undo(chain)

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample after all transforms except a final Normalize."""
        if self.image_only:
            return self._apply_to_image(sample, rng)
        for transform in self.on_host:
            sample = transform(sample, rng)
        return sample

    def _apply_to_image(self, sample: Sample, rng: np.random.Generator) -> Sample:
        label = sample.label
        sample = replace(sample, label=None)
        for transform in self.on_host:
            sample = apply_noted(transform, sample, rng)
        return replace(sample, label=label)


def _check_order(chain: tuple[Transform, ...]) -> None:
    """Raise a ValueError if a transform that needs uint8 images would get floats."""
    normalized = False
    for transform in chain:
        if normalized and getattr(transform, "needs_uint8", False):
            name = type(transform).__name__
            raise ValueError(f"{name} stands after Normalize but works on uint8 images; move Normalize to the end")
        normalized = normalized or isinstance(transform, Normalize)
