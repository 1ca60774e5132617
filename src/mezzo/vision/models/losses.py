"""Losses of the segmentation networks; they compute in float32 under any precision policy."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mezzo.kernels import pixel_cross_entropy

IGNORED = 255


def _in_float32(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


class SegmentationLoss(nn.Module, abc.ABC):
    """Base class of losses of logits (n, classes, h, w) and labels (n, h, w); label `ignore_index` is ignored."""

    takes_half = False
    """Whether `compute` gets half logits as they are, and widens them itself."""

    def __init__(self, ignore_index: int = IGNORED) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss; autocast is off inside, so nothing is rounded to half precision."""
        with torch.autocast(logits.device.type, enabled=False):
            return self.compute(logits if self.takes_half else _in_float32(logits), labels.long())  # images are uint8

    @abc.abstractmethod
    def compute(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss, in float32, of logits and int64 labels."""


class CrossEntropyLoss(SegmentationLoss):
    """Mean cross entropy over the pixels that are not ignored; 0 if there are none.

    Args:
        weight: One number per class; the mean is weighted by the class of each pixel.
        ignore_index: Label to ignore.
    """

    takes_half = True

    def __init__(self, weight: Sequence[float] | None = None, ignore_index: int = IGNORED) -> None:
        super().__init__(ignore_index)
        self.weight: Tensor | None
        self.register_buffer("weight", None if weight is None else torch.tensor(weight, dtype=torch.float32))

    def compute(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of logits and int64 labels."""
        counts = labels != self.ignore_index
        loss = pixel_cross_entropy(logits, labels, self.ignore_index)
        share = counts.to(loss.dtype)
        if self.weight is not None:
            share = share * self.weight.to(loss.dtype)[torch.where(counts, labels, 0)]
            loss = loss * share
        return loss.mean() / (share.mean() + 1e-8)


class OhemCrossEntropyLoss(SegmentationLoss):
    """Cross entropy over the hard pixels (online hard example mining).

    Args:
        threshold: A pixel is hard if the probability of its true class is below this.
        min_kept: Minimum number of pixels that count, the hardest first; all pixels if there are fewer.
        ignore_index: Label to ignore.
    """

    takes_half = True

    def __init__(self, threshold: float = 0.7, min_kept: int = 10000, ignore_index: int = IGNORED) -> None:
        super().__init__(ignore_index)
        self.threshold, self.min_kept = threshold, min_kept

    def compute(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of logits and int64 labels."""
        counts = labels != self.ignore_index
        loss = pixel_cross_entropy(logits, labels, self.ignore_index)
        mask = (counts & self._is_hard(torch.exp(-loss.detach()), counts)).to(loss.dtype)
        return (loss * mask).mean() / (mask.mean() + 1e-5)

    def _is_hard(self, true_class: Tensor, counts: Tensor) -> Tensor:
        """Return which pixels count, from the probability of the true class.

        All shapes are independent of the labels, so there is no host synchronisation.
        """
        at_least = true_class.new_zeros(())
        if self.min_kept:
            # Ignored pixels sort last.
            hardest = torch.where(counts, true_class, true_class + 1).flatten()
            at_least = hardest.topk(min(hardest.numel(), self.min_kept), largest=False, sorted=False).values.amax()
        limit = at_least.clamp(min=self.threshold)
        keeps_all = counts.sum() <= self.min_kept
        return (true_class < limit) | keeps_all


class LovaszSoftmaxLoss(SegmentationLoss):
    """The Lovasz extension of 1 - IoU on soft-max probabilities, mean over the classes that occur in the labels."""

    def compute(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of float32 logits and int64 labels."""
        classes = logits.shape[1]
        counts = (labels != self.ignore_index).flatten()
        probabilities = logits.softmax(dim=1).movedim(1, -1).reshape(-1, classes)
        is_class = F.one_hot(torch.where(counts, labels.flatten(), 0), classes).to(logits.dtype)
        # Ignored pixels have no error and no class, so they sort last and have weight 0.
        mask = counts.to(logits.dtype).unsqueeze(1)
        truth = is_class * mask
        errors = (truth - probabilities * mask).abs()
        order = errors.argsort(dim=0, descending=True)
        steps = _jaccard_steps(truth.gather(0, order), (mask - truth).gather(0, order))
        per_class = (errors.gather(0, order) * steps).sum(0)
        present = (truth.sum(0) > 0).to(logits.dtype)
        return (per_class * present).sum() / present.sum().clamp(min=1)


class LovaszHingeLoss(SegmentationLoss):
    """The Lovasz extension of 1 - IoU of class 1 on hinge errors, for two classes.

    A single channel of logits is the score of class 1. With two channels, the score is log(p + e / (1 - p + e)) with the
    soft-max probability p of class 1 and e = 1e-9, nearly log p, as in PaddleSeg.
    """

    def compute(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of float32 logits and int64 labels."""
        counts = (labels != self.ignore_index).flatten()
        truth = (labels.flatten() == 1) & counts
        hinge = 1 - self._scores(logits).flatten() * torch.where(truth, 1, -1)
        errors = hinge.masked_fill(~counts, -torch.inf)  # ignored pixels sort last and have weight 0
        order = errors.argsort(descending=True)
        hits, misses = truth[order].to(logits.dtype), (counts & ~truth)[order].to(logits.dtype)
        return (errors[order].relu() * _jaccard_steps(hits, misses)).sum()

    @staticmethod
    def _scores(logits: Tensor) -> Tensor:
        channels = logits.shape[1]
        if channels == 1:
            return logits
        if channels != 2:
            raise ValueError(f"LovaszHingeLoss: {channels} classes; it takes two, use LovaszSoftmaxLoss for more")
        probability, small = logits.softmax(dim=1)[:, 1], 1e-9
        return (probability + small / (1 - probability + small)).log()


def _jaccard_steps(hits: Tensor, misses: Tensor) -> Tensor:
    """Return by how much 1 - IoU grows with each further wrong pixel, along the first dimension.

    Args:
        hits: 1 where the pixel belongs to the class, else 0; the largest error comes first.
        misses: 1 where it belongs to another class; ignored pixels are 0 in both.
    """
    total = hits.sum(0)
    union = total + misses.cumsum(0)
    jaccard = 1 - (total - hits.cumsum(0)) / union.clamp(min=1)
    return torch.cat([jaccard[:1], jaccard[1:] - jaccard[:-1]])


class RMILoss(SegmentationLoss):
    """Region mutual information loss, arXiv:1910.12037.

    For each class: half the log determinant of the conditional covariance of label regions given regions of sigmoid
    probabilities, divided by the number of pixels in a region; summed over the classes. It can be negative. The cross
    entropy term of the paper is a separate loss, see `MixedLoss`. Matrices are float64; there is no host
    synchronisation.

    Args:
        radius: Side of a region in pixels.
        pool: Side of the max pooling before that; 1 is none.
        ignore_index: Label to ignore: labels and probabilities are set to 0 there.
    """

    _SMALLEST = 1e-6  # lower bound of a probability
    _RIDGE = 5e-4  # added to the diagonals, so that the matrices of an absent class are positive definite

    def __init__(self, radius: int = 3, pool: int = 3, ignore_index: int = IGNORED) -> None:
        super().__init__(ignore_index)
        self.radius, self.pool = radius, pool

    def compute(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of float32 logits and int64 labels."""
        counts = labels != self.ignore_index
        mask = counts.unsqueeze(1).to(logits.dtype)
        is_class = F.one_hot(torch.where(counts, labels, 0), logits.shape[1]).movedim(-1, 1)
        truth = self._regions(is_class.to(logits.dtype) * mask)
        guess = self._regions(logits.sigmoid() * mask + self._SMALLEST)
        # Conditional covariance truth truth' - truth guess' (guess guess')^-1 guess truth', by a Cholesky factor.
        known = torch.linalg.solve_triangular(self._factor(guess @ guess.mT), guess @ truth.mT, upper=False)
        factor = self._factor(truth @ truth.mT - known.mT @ known)
        per_class = (factor.diagonal(dim1=-2, dim2=-1) + 1e-8).log().sum(-1).mean(0)
        return (per_class.sum() / self.radius**2).to(logits.dtype)

    def _regions(self, maps: Tensor) -> Tensor:
        """Return the regions of maps (n, classes, h, w) as (n, classes, pixels of a region, regions), of mean 0."""
        pooled = F.max_pool2d(maps, self.pool, padding=self.pool // 2) if self.pool > 1 else maps
        height, width = (side - self.radius + 1 for side in pooled.shape[-2:])
        if min(height, width) < 1:
            size = f"{maps.shape[-1]} x {maps.shape[-2]}"
            raise ValueError(
                f"RMILoss: images of {size} pixels are too small for radius {self.radius}, pool {self.pool}"
            )
        places = [(y, x) for y in range(self.radius) for x in range(self.radius)]
        shifted = [pooled[..., y : y + height, x : x + width] for y, x in places]
        regions = torch.stack(shifted, dim=2).flatten(3).double()
        return regions - regions.mean(3, keepdim=True)

    def _factor(self, covariance: Tensor) -> Tensor:
        ridge = self._RIDGE * torch.eye(self.radius**2, dtype=covariance.dtype, device=covariance.device)
        factor: Tensor = torch.linalg.cholesky_ex(covariance + ridge).L
        return factor


class MixedLoss(nn.Module):
    """Weighted sum of several losses of the same logits."""

    def __init__(self, losses: Sequence[nn.Module], coefs: Sequence[float]) -> None:
        super().__init__()
        if len(losses) != len(coefs) or not losses:
            raise ValueError(
                f"MixedLoss: {len(losses)} losses and {len(coefs)} coefficients; give one coefficient per loss, at least one"
            )
        self.losses, self.coefs = nn.ModuleList(losses), tuple(coefs)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the weighted sum."""
        terms = [coef * loss(logits, labels) for coef, loss in zip(self.coefs, self.losses, strict=True)]
        return torch.stack(terms).sum()


class HeadLosses(nn.Module):
    """The training loss of a segmentation network: a weighted sum of one loss per head.

    Args:
        losses: One per head, or one for all.
        coefs: One per head.
    """

    def __init__(self, losses: nn.Module | Sequence[nn.Module], coefs: Sequence[float]) -> None:
        super().__init__()
        each = [losses] * len(coefs) if isinstance(losses, nn.Module) else list(losses)
        if len(each) != len(coefs) or not each:
            raise ValueError(
                f"HeadLosses: {len(each)} losses and {len(coefs)} coefficients; give one coefficient per loss, at least one"
            )
        self.losses, self.coefs = nn.ModuleList(each), tuple(coefs)

    def terms(self, outputs: Sequence[Tensor], labels: Tensor) -> list[Tensor]:
        """Return the loss of each head times its coefficient."""
        if len(outputs) != len(self.coefs):
            raise ValueError(f"{len(outputs)} outputs for {len(self.coefs)} losses: give one coefficient per head")
        return [coef * loss(out, labels) for coef, loss, out in zip(self.coefs, self.losses, outputs, strict=True)]

    def forward(self, outputs: Sequence[Tensor], labels: Tensor) -> Tensor:
        """Return the sum over all heads."""
        return torch.stack(self.terms(outputs, labels)).sum()
