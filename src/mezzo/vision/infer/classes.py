"""The classes of an image with the best scores, and the lines that print them.

N batch, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mezzo._arguments import check_at_least
from mezzo.export import DeployError
from mezzo.files import one_line


@dataclass(frozen=True, slots=True)
class ClassScore:
    """A class, its name if known, and its score."""

    index: int
    name: str | None
    score: float


def top_classes(scores_NK: NDArray[Any], k: int, names: Sequence[str] | None = None) -> list[list[ClassScore]]:
    """Return the best classes of each image, best first; equal scores are ordered by index.

    Args:
        scores_NK: As the network gives them: probabilities or logits.
        k: How many; all where there are fewer.
        names: Of all classes; None or empty where they are not known.

    Raises:
        ValueError: `k` is less than 1.
        DeployError: The scores have another shape, or there are names for another number of classes.

    >>> top_classes(np.array([[0.1, 0.7, 0.2]]), 1, ["ant", "bee", "cow"])
    [[ClassScore(index=1, name='bee', score=0.7)]]
    """
    check_at_least("k", k)
    if scores_NK.ndim != 2:
        raise DeployError(f"the network gives an array {scores_NK.shape}; a classifier gives (images, classes)")
    if names and len(names) != scores_NK.shape[1]:
        raise DeployError(f"{len(names)} class names, but the network gives {scores_NK.shape[1]} scores an image")
    best = np.argsort(-scores_NK, axis=1, kind="stable")[:, :k]
    return [
        [ClassScore(int(index), names[index] if names else None, float(row[index])) for index in order]
        for row, order in zip(scores_NK, best, strict=True)
    ]


def format_classes(path: Path | str, scores: Sequence[ClassScore]) -> str:
    """Return a line for the best class of an image and an indented line for each further class.

    >>> print(format_classes("a.jpg", [ClassScore(7, "cat", 0.93121), ClassScore(2, None, 0.05)]))
    image_name: a.jpg, class_id: 7, class_name: cat, score: 0.9312
      class_id: 2, score: 0.0500
    """
    return f"image_name: {one_line(path)}, " + "\n  ".join(_fields(score) for score in scores)


def _fields(score: ClassScore) -> str:
    name = "" if score.name is None else f"class_name: {one_line(score.name)}, "
    return f"class_id: {score.index}, {name}score: {score.score:.4f}"
