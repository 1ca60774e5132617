"""Scores of a segmentation from its confusion matrix.

K classes; rows of a matrix are true classes, columns predicted ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from mezzo.errors import unknown_choice

Absent = Literal["one", "skip"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentationScores:
    """Scores of a segmentation, all between 0 and 1 except kappa, which can be negative."""

    mean_iou: float
    """Mean of the intersection over union of the classes."""
    accuracy: float
    """Share of the pixels that have the right class."""
    kappa: float
    """Cohen's kappa: 0 is chance, 1 is perfect."""
    mean_dice: float
    """Mean of the Dice coefficients of the classes."""
    class_iou: tuple[float, ...]
    class_precision: tuple[float, ...]
    """Share of the pixels predicted as a class that are of it; 0 for a class that was never predicted."""
    class_recall: tuple[float, ...]
    """Share of the pixels of a class that were found; 0 for a class that no label has."""
    class_dice: tuple[float, ...]

    @classmethod
    def from_counts(cls, counts_KK: Tensor, absent: Absent = "one") -> SegmentationScores:
        """Return the scores of a confusion matrix.

        Args:
            counts_KK: Counts of pixels.
            absent: How to treat a class that neither labels nor predictions contain. `one`, as in
                PaddleSeg: its IoU and Dice are 1. `skip`: its scores are NaN, and the means leave
                it out.

        Raises:
            ValueError: No pixel was counted.

        >>> SegmentationScores.from_counts(torch.tensor([[3, 1], [0, 4]])).mean_iou
        0.775
        """
        if absent not in get_args(Absent):
            raise ValueError(unknown_choice("absent", absent, get_args(Absent)))
        counts = counts_KK.detach().cpu().double()
        if not counts.sum() > 0:
            raise ValueError("no pixel was counted: every label is the ignored one, or there was no image")
        return cls._of(counts, math.nan if absent == "skip" else None)

    @classmethod
    def _of(cls, counts: Tensor, missing: float | None) -> SegmentationScores:
        hits, labelled, predicted = counts.diagonal(), counts.sum(1), counts.sum(0)
        both = labelled + predicted
        iou = _ratio(hits, both - hits, 1.0 if missing is None else missing)
        dice = _ratio(2 * hits, both, 1.0 if missing is None else missing)
        precision, recall = _ratio(hits, predicted, 0.0), _ratio(hits, labelled, 0.0)
        if missing is not None:
            precision, recall = (torch.where(both > 0, x, missing) for x in (precision, recall))
        return cls(
            mean_iou=float(iou.nanmean()),
            accuracy=float(hits.sum() / counts.sum()),
            kappa=_kappa(counts),
            mean_dice=float(dice.nanmean()),
            class_iou=_floats(iou),
            class_precision=_floats(precision),
            class_recall=_floats(recall),
            class_dice=_floats(dice),
        )


def _ratio(part: Tensor, whole: Tensor, where_empty: float) -> Tensor:
    return torch.where(whole > 0, part / whole.clamp(min=1), where_empty)


def _kappa(counts: Tensor) -> float:
    total = counts.sum()
    agreement = float(counts.diagonal().sum() / total)
    by_chance = float((counts.sum(0) / total) @ (counts.sum(1) / total))
    if by_chance >= 1:  # labels and predictions have a single class
        return 1.0
    return (agreement - by_chance) / (1 - by_chance)


def _floats(values: Tensor) -> tuple[float, ...]:
    numbers: Sequence[float] = values.tolist()
    return tuple(numbers)
