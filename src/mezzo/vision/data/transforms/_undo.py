"""Evaluation compares with labels as they are in the files: what happened to an image is noted, to be undone later."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import numpy as np

from mezzo.vision.data._sample import Sample, Transform

Undo = Literal["resize", "pad", "never"]
"""How a class says, as `undone_by`, what takes its change back: another resize, cutting off what was padded at the
right and the bottom, or nothing. A class that does not say leaves every pixel where it is."""


def check_undo(transforms: Iterable[Transform]) -> None:
    """Raise a ValueError that names the first transform that moves pixels in a way that cannot be taken back."""
    for transform in transforms:
        if _undone_by(transform) == "never":
            raise ValueError(
                f"val_dataset: {type(transform).__name__} changes an image in a way that evaluation cannot undo; "
                "leave it out"
            )


def apply_noted(transform: Transform, sample: Sample, rng: np.random.Generator) -> Sample:
    """Return the changed sample; if its image has another size now, `undo` has one entry more.

    Raises:
        ValueError: The size is another one, and the transform does not say what takes that back.
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
