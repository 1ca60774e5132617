"""Losses of the segmentation networks, in float32 whatever the region around them decides."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = 255


def _in_float32(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


class SegmentationLoss(nn.Module, abc.ABC):
    """A loss of logits (n, classes, h, w) and labels (n, h, w); pixels labelled `ignore_index` do not count."""

    def __init__(self, ignore_index: int = IGNORED) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss; autocast is off inside, so that no part of it is rounded to half."""
        with torch.autocast(logits.device.type, enabled=False):
            return self.compute(_in_float32(logits), labels.long())  # as images have them: uint8

    @abc.abstractmethod
    def compute(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of wide logits."""


class CrossEntropyLoss(SegmentationLoss):
    """Mean cross entropy over the pixels that count; 0 if there is none.

    Args:
        weight: One number a class; the mean is then weighted by the class of each pixel.
        ignore_index: Label that does not count.
    """

    def __init__(self, weight: Sequence[float] | None = None, ignore_index: int = IGNORED) -> None:
        super().__init__(ignore_index)
        self.weight: Tensor | None
        self.register_buffer("weight", None if weight is None else torch.tensor(weight, dtype=torch.float32))

    def compute(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of wide logits."""
        counts = labels != self.ignore_index
        weight = None if self.weight is None else self.weight.to(logits.dtype)
        loss = F.cross_entropy(logits, labels, weight=weight, ignore_index=self.ignore_index, reduction="none")
        share = counts.to(logits.dtype)
        if weight is not None:
            share = share * weight[torch.where(counts, labels, 0)]
        return loss.mean() / (share.mean() + 1e-8)


class OhemCrossEntropyLoss(SegmentationLoss):
    """Cross entropy over the pixels that the network finds hard.

    Args:
        threshold: Pixels whose true class has a smaller probability count.
        min_kept: At least so many pixels count, the hardest ones; all of them if there are no more.
        ignore_index: Label that does not count.
    """

    def __init__(self, threshold: float = 0.7, min_kept: int = 10000, ignore_index: int = IGNORED) -> None:
        super().__init__(ignore_index)
        self.threshold, self.min_kept = threshold, min_kept

    def compute(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of wide logits."""
        counts = labels != self.ignore_index
        labels = torch.where(counts, labels, 0)
        counts = counts & self._is_hard(logits.detach(), labels, counts)
        mask = counts.to(logits.dtype)
        loss = F.cross_entropy(logits, labels, reduction="none") * mask
        return loss.mean() / (mask.mean() + 1e-5)

    def _is_hard(self, logits: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
        """Return which pixels stay: decided on the device, with the same shapes whatever the labels are."""
        true_class = logits.softmax(dim=1).gather(1, labels.unsqueeze(1)).squeeze(1)
        # Pixels that do not count sort behind all others.
        sorted_ = torch.where(counts, true_class, true_class + 1).flatten().sort().values
        at_least = sorted_[min(sorted_.numel(), self.min_kept) - 1] if self.min_kept else sorted_.new_tensor(0.0)
        limit = at_least.clamp(min=self.threshold)
        keeps_all = counts.sum() <= self.min_kept
        return (true_class < limit) | keeps_all


class LovaszSoftmaxLoss(SegmentationLoss):
    """The Lovasz extension of 1 - IoU on soft-max probabilities, mean over the classes that occur in the labels."""

    def compute(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of wide logits."""
        classes = logits.shape[1]
        counts = (labels != self.ignore_index).flatten()
        probabilities = logits.softmax(dim=1).movedim(1, -1).reshape(-1, classes)
        is_class = F.one_hot(torch.where(counts, labels.flatten(), 0), classes).to(logits.dtype)
        # Pixels that do not count have no error and belong to no class, so they sort last and weigh nothing.
        mask = counts.to(logits.dtype).unsqueeze(1)
        truth = is_class * mask
        errors = (truth - probabilities * mask).abs()
        order = errors.argsort(dim=0, descending=True)
        hits = truth.gather(0, order)
        total = hits.sum(0)
        intersection = total - hits.cumsum(0)
        union = total + (mask - is_class * mask).gather(0, order).cumsum(0)
        jaccard = 1 - intersection / union.clamp(min=1)
        steps = torch.cat([jaccard[:1], jaccard[1:] - jaccard[:-1]])
        per_class = (errors.gather(0, order) * steps).sum(0)
        present = (total > 0).to(logits.dtype)
        return (per_class * present).sum() / present.sum().clamp(min=1)


class MixedLoss(nn.Module):
    """Several losses of the same logits, each with its coefficient."""

    def __init__(self, losses: Sequence[nn.Module], coefs: Sequence[float]) -> None:
        super().__init__()
        if len(losses) != len(coefs) or not losses:
            raise ValueError(
                f"MixedLoss: {len(losses)} losses and {len(coefs)} coefficients; must be as many, at least one"
            )
        self.losses, self.coefs = nn.ModuleList(losses), tuple(coefs)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the weighted sum."""
        terms = [coef * loss(logits, labels) for coef, loss in zip(self.coefs, self.losses, strict=True)]
        return torch.stack(terms).sum()


class HeadLosses(nn.Module):
    """One loss a head, each with its coefficient: what a segmentation network is trained with.

    Args:
        losses: One a head, or one for all.
        coefs: One a head.
    """

    def __init__(self, losses: nn.Module | Sequence[nn.Module], coefs: Sequence[float]) -> None:
        super().__init__()
        each = [losses] * len(coefs) if isinstance(losses, nn.Module) else list(losses)
        if len(each) != len(coefs) or not each:
            raise ValueError(
                f"HeadLosses: {len(each)} losses and {len(coefs)} coefficients; must be as many, at least one"
            )
        self.losses, self.coefs = nn.ModuleList(each), tuple(coefs)

    def terms(self, outputs: Sequence[Tensor], labels: Tensor) -> list[Tensor]:
        """Return the loss of each head times its coefficient."""
        if len(outputs) != len(self.coefs):
            raise ValueError(f"{len(outputs)} outputs for {len(self.coefs)} losses: give one coefficient a head")
        return [coef * loss(out, labels) for coef, loss, out in zip(self.coefs, self.losses, outputs, strict=True)]

    def forward(self, outputs: Sequence[Tensor], labels: Tensor) -> Tensor:
        """Return the sum over all heads."""
        return torch.stack(self.terms(outputs, labels)).sum()
