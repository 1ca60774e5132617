"""Whether the true class is among the k best, counted on the device.

N batch, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mezzo.model.metric._sums import DeviceSums

DEFAULT_KS = (1, 5)


def _check_ks(ks: Sequence[int]) -> tuple[int, ...]:
    if not ks or any(k < 1 for k in ks):
        raise ValueError(f"ks={tuple(ks)}: give at least one number, each at least 1, such as (1, 5)")
    return tuple(ks)


def _hits(logits_NK: Tensor, labels_N: Tensor, ks: Sequence[int]) -> Tensor:
    """Return how many labels are among the k best, int64, one number for each of `ks`."""
    if logits_NK.dim() != 2 or labels_N.shape != logits_NK.shape[:1]:
        raise ValueError(
            f"logits are {tuple(logits_NK.shape)}, labels {tuple(labels_N.shape)}; they must be (batch, classes) and "
            "(batch,)"
        )
    best = logits_NK.topk(min(max(ks), logits_NK.shape[1]), dim=1).indices
    is_hit = best == labels_N.long().unsqueeze(1)
    return torch.stack([is_hit[:, :k].sum() for k in ks])


def batch_topk(logits_NK: Tensor, labels_N: Tensor, ks: Sequence[int] = DEFAULT_KS) -> Tensor:
    """Return the share of labels among the k best classes, one number for each of `ks`, on the device.

    With fewer than k classes, k is their number.

    >>> batch_topk(torch.eye(3), torch.tensor([0, 1, 0]), ks=(1, 3))
    tensor([0.6667, 1.0000])
    """
    return _hits(logits_NK, labels_N, _check_ks(ks)).float() / labels_N.numel()


class TopK(DeviceSums):
    """The share of samples whose true class is among the k best, over many batches.

    Args:
        ks: The values of k. With fewer than k classes, k is their number.
        device: Where logits and labels are.
    """

    def __init__(self, ks: Sequence[int] = DEFAULT_KS, device: torch.device | str = "cpu") -> None:
        self.ks = _check_ks(ks)
        super().__init__(len(self.ks) + 1, torch.int64, device)  # the last one counts samples

    def update(self, logits_NK: Tensor, labels_N: Tensor) -> None:
        """Count a batch. The host does not wait for the device."""
        sums = self._open_sums()
        sums[:-1] += _hits(logits_NK, labels_N, self.ks)
        sums[-1] += labels_N.numel()

    def scores(self) -> dict[int, float]:
        """Return the share for each k; waits for the device.

        Raises:
            ValueError: No sample was counted.
        """
        *hits, samples = self._sums.tolist()
        if not samples:
            raise ValueError("no sample was counted: the data set is empty, or update() was never called")
        return {k: count / samples for k, count in zip(self.ks, hits, strict=True)}
