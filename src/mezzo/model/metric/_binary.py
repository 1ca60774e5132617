"""Precision and recall of two classes, from the probability of the second one."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from mezzo.model.metric._metric import DeviceMetric, as_tensor
from mezzo.model.metric._sums import Counts


def probabilities_and_labels(preds: Any, labels: Any, allow_pairs: bool = False) -> tuple[Tensor, Tensor]:
    """Return both as 1-D tensors: probabilities in float64, which autocast does not cast, labels unchanged.

    Args:
        preds: (N,) or (N, 1).
        labels: (N,) or (N, 1).
        allow_pairs: Also accept (N, 2): the probabilities of both classes; the second is used.
    """
    probabilities, truth = as_tensor(preds), as_tensor(labels)
    came = tuple(probabilities.shape)
    if allow_pairs and probabilities.dim() == 2 and probabilities.shape[1] == 2:
        probabilities = probabilities[:, 1]
    is_row = all(t.dim() == 1 or (t.dim() == 2 and t.shape[1] == 1) for t in (probabilities, truth))
    if not is_row or probabilities.shape[0] != truth.shape[0]:
        shapes = "(batch,), (batch, 1) or (batch, 2)" if allow_pairs else "(batch,) or (batch, 1)"
        advice = "" if allow_pairs else "; of two columns, give that of class 1: preds[:, 1]"
        raise ValueError(
            f"preds are {came}, labels {tuple(truth.shape)}; preds must be {shapes}, labels "
            f"(batch,) or (batch, 1){advice}"
        )
    return probabilities.reshape(-1).double(), truth.reshape(-1)


def strays(probabilities: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return masks of the probabilities outside 0 to 1 (NaN is not), and of the labels that are neither 0 nor 1."""
    return (probabilities < 0) | (probabilities > 1), (labels != 0) & (labels != 1)


def check_strays(num_probabilities: int, num_labels: int) -> None:
    """Raise ValueError if there are any invalid values."""
    if num_probabilities:
        raise ValueError(
            f"{num_probabilities} predictions are outside of 0 to 1; give probabilities, such as torch.sigmoid(logits)"
        )
    if num_labels:
        raise ValueError(f"{num_labels} labels are neither 0 nor 1; this metric is for two classes")


class _Share(DeviceMetric[Counts]):
    """The share of hits among the samples that a subclass selects."""

    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        """Return the name."""
        return self._name

    def update(self, preds: Any, labels: Any) -> None:
        """Count a batch. The host does not wait for the device.

        Args:
            preds: Probabilities of class 1, (N,) or (N, 1); above 0.5 is class 1.
            labels: 0 or 1, (N,) or (N, 1).

        Raises:
            ValueError: The shapes do not fit.
        """
        probabilities, truth = probabilities_and_labels(preds, labels)
        is_found, is_true = probabilities > 0.5, truth == 1
        kinds = (is_found & is_true, self._considered(is_found, is_true), *strays(probabilities, truth))
        self._sums_on(probabilities.device).add(torch.stack(kinds).sum(1))

    def accumulate(self) -> float:
        """Return the share over all batches; waits for the device. 0.0 if there are no samples.

        Raises:
            ValueError: Some predictions are not probabilities, or some labels are neither 0 nor 1.
        """
        if self._sums is None:
            return 0.0
        hits, considered, *rest = self._sums.read().tolist()
        check_strays(*rest)
        share: float = hits / max(considered, 1)
        return share

    def _new_sums(self, device: torch.device) -> Counts:
        return Counts(4, device)

    @staticmethod
    @abstractmethod
    def _considered(is_found: Tensor, is_true: Tensor) -> Tensor:
        """Return a mask of the samples in the denominator."""


class Precision(_Share):
    """The share of samples predicted as class 1 that are of class 1.

    A probability of exactly 0.5 is class 0, here and in `Recall`; in Paddle it is class 1 for
    precision and class 0 for recall. NaN is never class 1.

    Args:
        name: Name of the result.

    >>> metric = Precision()
    >>> metric.update(torch.tensor([0.1, 0.6, 0.7, 0.9]), torch.tensor([1, 0, 1, 1]))
    >>> round(metric.accumulate(), 4)
    0.6667
    """

    def __init__(self, name: str = "precision") -> None:
        super().__init__(name)

    @staticmethod
    def _considered(is_found: Tensor, is_true: Tensor) -> Tensor:
        return is_found


class Recall(_Share):
    """The share of samples of class 1 that are predicted as class 1.

    Args:
        name: Name of the result.

    >>> metric = Recall()
    >>> metric.update(torch.tensor([0.1, 0.6, 0.7, 0.9]), torch.tensor([1, 0, 1, 1]))
    >>> round(metric.accumulate(), 4)
    0.6667
    """

    def __init__(self, name: str = "recall") -> None:
        super().__init__(name)

    @staticmethod
    def _considered(is_found: Tensor, is_true: Tensor) -> Tensor:
        return is_true
