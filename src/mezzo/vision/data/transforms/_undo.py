"""Records changes of the image size, so that evaluation can undo them and compare with the labels of the files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import numpy as np

from mezzo.vision.data._sample import Sample, Transform

Undo = Literal["resize", "pad", "never"]
"""Value of the attribute `undone_by` of a transform: how to undo it, by a resize, by cropping the padding at the right
and the bottom, or never. A transform without the attribute does not move pixels."""


def check_undo(transforms: Iterable[Transform]) -> None:
    """Raise a ValueError that names the first transform that cannot be undone."""
    for transform in transforms:
        if _undone_by(transform) == "never":
            raise ValueError(
                f"val_dataset: {type(transform).__name__} changes an image in a way that evaluation cannot undo; "
                "leave it out"
            )


def apply_noted(transform: Transform, sample: Sample, rng: np.random.Generator) -> Sample:
    """Return the changed sample; if the size of its image changed, `undo` gets an entry.

    Raises:
        ValueError: The size changed, and the transform has no `undone_by`.
    """
    after = transform(sample, rng)
    height, width = sample.image.shape[:2]
    if after.image.shape[:2] == (height, width):
        return after
    kind = _undone_by(transform)
    if kind not in ("resize", "pad"):
        name = type(transform).__name__
        raise ValueError(
            f"{sample.path}: {name} changed the size of the image, and its attribute undone_by={kind!r} does not say "
            "how evaluation undoes that; must be 'resize' or 'pad'"
        )
    return replace(after, undo=(*sample.undo, (kind, height, width)))


def _undone_by(transform: Transform) -> object:
    return getattr(transform, "undone_by", None)
