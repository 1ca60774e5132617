"""The area under a curve over all thresholds, from a histogram on the device."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mezzo._arguments import check_at_least
from mezzo.errors import unknown_choice
from mezzo.model.metric._binary import check_strays, probabilities_and_labels, strays
from mezzo.model.metric._metric import DeviceMetric
from mezzo.model.metric._sums import Counts

Curve = Literal["ROC", "PR"]


class Auc(DeviceMetric[Counts]):
    """The area under the ROC curve or the precision-recall curve, by the trapezoid rule.

    Samples whose probabilities fall into one bin count as equal. The error of the ROC area is at
    most half the share of pairs (one sample of each class) in a common bin. NaN falls into the
    lowest bin.

    Args:
        curve: `ROC` or `PR`.
        num_thresholds: Number of bins less one; each is 1 / num_thresholds wide, and the last one
            is only for 1.0.
        name: Name of the result.

    >>> metric = Auc()
    >>> metric.update(torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3], [0.2, 0.8]]), torch.tensor([0, 0, 1, 1]))
    >>> metric.accumulate()
    0.75
    """

    def __init__(self, curve: Curve = "ROC", num_thresholds: int = 4095, name: str = "auc") -> None:
        if curve not in get_args(Curve):
            raise ValueError(unknown_choice("curve", curve, get_args(Curve)))
        check_at_least("num_thresholds", num_thresholds)
        self.curve = curve
        self.num_thresholds = num_thresholds
        self._name = name

    def name(self) -> str:
        """Return the name."""
        return self._name

    def update(self, preds: Any, labels: Any) -> None:
        """Count a batch. The host does not wait for the device.

        Args:
            preds: Probabilities of both classes (N, 2), or of class 1, (N,) or (N, 1).
            labels: 0 or 1, (N,) or (N, 1).

        Raises:
            ValueError: The shapes do not fit.
        """
        probabilities, truth = probabilities_and_labels(preds, labels, allow_pairs=True)
        bins = self.num_thresholds + 1
        places = (probabilities.nan_to_num(0.0) * self.num_thresholds).long() + bins * (truth == 1)
        no_probability, no_label = strays(probabilities, truth)
        places = torch.where(no_label, 2 * bins + 1, torch.where(no_probability, 2 * bins, places))
        self._sums_on(places.device).add_ones(places)

    def accumulate(self) -> float:
        """Return the area over all batches; waits for the device. 0.0 where a class is missing.

        Raises:
            ValueError: Some predictions are not probabilities, or some labels are neither 0 nor 1.
        """
        if self._sums is None:
            return 0.0
        *counts, num_probabilities, num_labels = self._sums.read().split([self.num_thresholds + 1] * 2 + [1, 1])
        check_strays(int(num_probabilities), int(num_labels))
        # From the highest threshold down: how many of each class are above it; none above the
        # first.
        negatives, positives = (torch.cat([c.new_zeros(1), c.flip(0).cumsum(0)]).double() for c in counts)
        return _roc_area(negatives, positives) if self.curve == "ROC" else _pr_area(negatives, positives)

    def _new_sums(self, device: torch.device) -> Counts:
        return Counts(2 * (self.num_thresholds + 1) + 2, device)


def _roc_area(negatives: Tensor, positives: Tensor) -> float:
    pairs = float(negatives[-1] * positives[-1])
    return float(torch.trapezoid(positives, negatives)) / pairs if pairs else 0.0


def _pr_area(negatives: Tensor, positives: Tensor) -> float:
    found = negatives + positives
    precision = torch.where(found > 0, positives / found.clamp(min=1), 1.0)  # without predictions, precision is 1
    return float(torch.trapezoid(precision, positives)) / max(float(positives[-1]), 1.0)
