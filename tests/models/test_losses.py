"""Losses against numpy formulas, and under AMP."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mezzo.amp import auto_cast
from mezzo.models.losses import CrossEntropyLoss, HeadLosses, LovaszSoftmaxLoss, MixedLoss, OhemCrossEntropyLoss


def data(seed: int, classes: int = 4, size: int = 6, ignored: float = 0.2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, classes, size, size, generator=generator, dtype=torch.float64) * 2
    labels = torch.randint(classes, (2, size, size), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < ignored] = 255
    return logits, labels


def probabilities(logits: torch.Tensor) -> np.ndarray:
    """Soft-max in numpy, pixels first."""
    array = np.moveaxis(logits.numpy(), 1, -1).reshape(-1, logits.shape[1])
    exp = np.exp(array - array.max(1, keepdims=True))
    return exp / exp.sum(1, keepdims=True)


@pytest.mark.parametrize("weight", [None, [0.5, 2.0, 1.0, 0.1]])
@pytest.mark.parametrize("seed", range(3))
def test_cross_entropy_is_the_weighted_mean_over_pixels_that_count(weight: list[float] | None, seed: int) -> None:
    logits, labels = data(seed)
    p, y = probabilities(logits), labels.numpy().ravel()
    valid = y != 255
    w = np.ones(4) if weight is None else np.float32(weight).astype(float)
    losses = -np.log(p[valid, y[valid]]) * w[y[valid]]
    expected = losses.sum() / (w[y[valid]].sum() + 1e-8 * y.size)
    assert CrossEntropyLoss(weight)(logits, labels).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("loss", [CrossEntropyLoss(), OhemCrossEntropyLoss(min_kept=3), LovaszSoftmaxLoss()])
def test_nothing_to_learn_from_is_zero_and_finite(loss: nn.Module) -> None:
    logits, labels = data(0)
    logits.requires_grad_()
    value = loss(logits, torch.full_like(labels, 255))
    value.backward()
    assert value.item() == 0
    assert (logits.grad == 0).all()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000), st.integers(0, 90), st.sampled_from([0.1, 0.3, 0.7, 0.99]), st.sampled_from([0.0, 0.3, 0.9])
)
def test_ohem_keeps_the_hard_pixels(seed: int, min_kept: int, threshold: float, ignored: float) -> None:
    logits, labels = data(seed, ignored=ignored)
    p, y = probabilities(logits), labels.numpy().ravel()
    valid = y != 255
    losses = np.where(valid, -np.log(p[np.arange(y.size), np.where(valid, y, 0)]), 0)
    true_class = p[np.arange(y.size), np.where(valid, y, 0)]
    kept = valid
    if min_kept < valid.sum():
        limit = threshold
        if min_kept > 0:
            ordered = np.sort(np.where(valid, true_class, true_class + 1))
            limit = max(ordered[min(y.size, min_kept) - 1], threshold)
        kept = valid & (true_class < limit)
    expected = (losses * kept).mean() / (kept.mean() + 1e-5)
    value = OhemCrossEntropyLoss(threshold, min_kept)(logits, labels)
    assert value.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def naive_lovasz(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """By the definition: errors sorted, each weighed by how much the Jaccard loss grows with it."""
    p, y = probabilities(logits), labels.numpy().ravel()
    p, y = p[y != 255], y[y != 255]
    losses = []
    for c in np.unique(y):
        truth = y == c
        errors = np.abs(truth - p[:, c])
        order = np.argsort(-errors, kind="stable")
        previous, total = 0.0, 0.0
        for i in range(len(order)):
            wrong = set(order[: i + 1])
            missed = sum(truth[j] for j in wrong)
            union = truth.sum() + sum(not truth[j] for j in wrong)
            jaccard = 1 - (truth.sum() - missed) / union
            total += errors[order[i]] * (jaccard - previous)
            previous = jaccard
        losses.append(total)
    return float(np.mean(losses)) if losses else 0.0


@pytest.mark.parametrize("ignored", [0.0, 0.4, 0.97])
@pytest.mark.parametrize("seed", range(3))
def test_lovasz_is_its_definition(seed: int, ignored: float) -> None:
    logits, labels = data(seed, size=5, ignored=ignored)
    labels[labels == 2] = 1  # a class that does not occur
    assert LovaszSoftmaxLoss()(logits, labels).item() == pytest.approx(naive_lovasz(logits, labels), rel=1e-9)


def test_lovasz_has_the_gradient_of_its_value() -> None:
    logits, labels = data(1, classes=3, size=3)
    assert torch.autograd.gradcheck(lambda x: LovaszSoftmaxLoss()(x, labels), logits.requires_grad_(), atol=1e-6)


@pytest.mark.parametrize("level", ["OD", "O1", "O2"])
@pytest.mark.parametrize("loss", [CrossEntropyLoss([1.0, 2, 3, 4]), OhemCrossEntropyLoss(0.7, 20), LovaszSoftmaxLoss()])
def test_losses_are_float32_in_every_region(loss: nn.Module, level: str) -> None:
    logits, labels = data(2)
    half = logits.half()
    expected = loss(half.float(), labels)
    with auto_cast(level=level):
        value = loss(half, labels)
        wide = loss(half.float(), labels)
    assert value.dtype == torch.float32
    assert torch.equal(value, expected)
    assert torch.equal(wide, expected)


def test_heads_and_mixtures_add_up() -> None:
    logits, labels = data(3)
    ce, lovasz = CrossEntropyLoss(), LovaszSoftmaxLoss()
    mixed = MixedLoss([ce, lovasz], [0.8, 0.2])
    assert mixed(logits, labels).item() == pytest.approx(
        0.8 * ce(logits, labels).item() + 0.2 * lovasz(logits, labels).item()
    )
    heads = HeadLosses(ce, [1.0, 0.4])
    terms = heads.terms([logits, 2 * logits], labels)
    assert [t.item() for t in terms] == [ce(logits, labels).item(), pytest.approx(0.4 * ce(2 * logits, labels).item())]
    assert heads([logits, 2 * logits], labels).item() == pytest.approx(sum(t.item() for t in terms))
    with pytest.raises(ValueError, match="1 outputs for 2 losses: give one coefficient a head"):
        heads([logits], labels)
    with pytest.raises(ValueError, match="MixedLoss: 1 losses and 2 coefficients"):
        MixedLoss([ce], [1, 2])
    with pytest.raises(ValueError, match="HeadLosses: 2 losses and 1 coefficients"):
        HeadLosses([ce, ce], [1])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
@pytest.mark.parametrize("loss", [CrossEntropyLoss(), OhemCrossEntropyLoss(0.7, 20), LovaszSoftmaxLoss()])
def test_labels_may_be_as_images_have_them(loss: nn.Module, dtype: torch.dtype) -> None:
    logits, labels = data(4)
    assert torch.equal(loss(logits, labels.to(dtype)), loss(logits, labels))


def test_losses_compile_without_a_break() -> None:
    logits, labels = data(5)
    heads = HeadLosses(
        [OhemCrossEntropyLoss(0.7, 20), MixedLoss([CrossEntropyLoss(), LovaszSoftmaxLoss()], [0.8, 0.2])], [1, 0.4]
    )
    torch._dynamo.reset()
    compiled = torch.compile(heads, backend="aot_eager", fullgraph=True)
    assert compiled([logits, logits], labels).item() == pytest.approx(heads([logits, logits], labels).item(), rel=1e-9)
