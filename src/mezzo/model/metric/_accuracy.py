"""Accuracy of the high-level API: whether the true class is among the k best.

N batch, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mezzo.model.metric._metric import DeviceMetric, as_tensor
from mezzo.model.metric._sums import Counts


class Accuracy(DeviceMetric[Counts]):
    """The share of samples whose true class is among the k best.

    Args:
        topk: The values of k, or one. With fewer than k classes, k is their number.
        name: Name of the result, by default `acc`. If any k is above 1, each name ends in `_top`
            and its k.

    >>> metric = Accuracy(topk=(1, 2))
    >>> scores = torch.tensor([[0.1, 0.2, 0.7], [0.3, 0.6, 0.1]])
    >>> metric.update(metric.compute(scores, torch.tensor([2, 0])))
    [tensor(0.5000), tensor(1.)]
    >>> metric.name(), metric.accumulate()
    (['acc_top1', 'acc_top2'], [0.5, 1.0])
    """

    def __init__(self, topk: int | Sequence[int] = (1,), name: str | None = None) -> None:
        ks = (topk,) if isinstance(topk, int) else tuple(topk)
        if not ks or any(k < 1 for k in ks):
            raise ValueError(f"topk={topk!r}: give at least one number, each at least 1, such as (1, 5)")
        self.topk, self.maxk = ks, max(ks)
        stem = name or "acc"
        self._names = [stem] if self.maxk == 1 else [f"{stem}_top{k}" for k in ks]

    def name(self) -> list[str]:
        """Return a list with one name per k, also for a single k."""
        return list(self._names)

    def compute(self, pred: Any, label: Any, *rest: Any) -> Tensor:
        """Return whether each of the best classes, the best one first, is the true one: 1.0 or 0.0.

        Args:
            pred: Scores (N, K), or with more dimensions before the classes: (N, ..., K).
            label: True classes (N, ...) or (N, ..., 1), or one-hot (N, ..., K).
            rest: Not used.

        Returns:
            (N, ..., k), k the largest of `topk` or K if that is less; float32, on the device.

        Raises:
            ValueError: The shapes do not fit.
        """
        scores, truth = as_tensor(pred), as_tensor(label)
        best = scores.float().topk(min(self.maxk, _num_classes(scores)), dim=-1).indices
        return (best == _classes(truth, scores.shape)).float()

    def update(self, correct: Any, *rest: Any) -> Tensor | list[Tensor]:
        """Count a batch and return its accuracy, without host synchronisation.

        Args:
            correct: What `compute` returned.
            rest: Not used.

        Returns:
            One number, or a list with one for each k.
        """
        is_right = as_tensor(correct)
        if is_right.dim() < 2 or not 1 <= is_right.shape[-1] <= self.maxk:
            raise ValueError(
                f"correct is {tuple(is_right.shape)}; it must be (batch, ..., k) with k up to {self.maxk}: give what "
                "compute(pred, label) returns"
            )
        samples = is_right.numel() // is_right.shape[-1]
        hits = torch.stack([is_right[..., :k].sum(dtype=torch.int64) for k in self.topk])
        self._sums_on(hits.device).add(torch.cat([hits, hits.new_full((1,), samples)]))
        shares = list((hits.double() / max(samples, 1)).float().unbind())
        return shares[0] if len(shares) == 1 else shares

    def accumulate(self) -> float | list[float]:
        """Return the share, or a list with one for each k; waits for the device. 0.0 if nothing was counted."""
        *hits, samples = [0] * (len(self.topk) + 1) if self._sums is None else self._sums.read().tolist()
        shares = [count / max(samples, 1) for count in hits]
        return shares[0] if len(shares) == 1 else shares

    def _new_sums(self, device: torch.device) -> Counts:
        return Counts(len(self.topk) + 1, device)  # the last one counts samples


def _num_classes(scores: Tensor) -> int:
    if scores.dim() < 2 or not scores.shape[-1]:
        raise ValueError(f"pred is {tuple(scores.shape)}; it must be (batch, classes), or (batch, ..., classes)")
    return scores.shape[-1]


def _classes(labels: Tensor, shape: torch.Size) -> Tensor:
    """Return labels as classes (N, ..., 1)."""
    if labels.shape == shape[:-1]:
        return labels.long().unsqueeze(-1)
    if labels.shape == (*shape[:-1], 1):
        return labels.long()
    if labels.shape == shape:
        return labels.argmax(-1, keepdim=True)
    indices = ", ".join(map(str, shape[:-1]))
    raise ValueError(
        f"label is {tuple(labels.shape)}, pred {tuple(shape)} with the classes last; label must be ({indices},) or "
        f"({indices}, 1) with classes, or {tuple(shape)} one-hot; if the classes are second, give pred.movedim(1, -1)"
    )
