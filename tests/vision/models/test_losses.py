"""Losses against numpy formulas, and under AMP."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mezzo.amp import auto_cast
from mezzo.vision.models.losses import (
    CrossEntropyLoss,
    HeadLosses,
    LovaszHingeLoss,
    LovaszSoftmaxLoss,
    MixedLoss,
    OhemCrossEntropyLoss,
    RMILoss,
)


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


def test_nothing_to_learn_from_is_zero_for_the_hinge_too() -> None:
    logits, labels = data(0, classes=2)
    value = LovaszHingeLoss()(logits.requires_grad_(), torch.full_like(labels, 255))
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
    losses = [extension(np.abs((y == c) - p[:, c]), y == c) for c in np.unique(y)]
    return float(np.mean(losses)) if losses else 0.0


def extension(errors: np.ndarray, truth: np.ndarray) -> float:
    """Return the sum of errors, from the largest on, each times what it adds to 1 - IoU; none counts less than 0."""
    order = np.argsort(-errors, kind="stable")
    previous, total = 0.0, 0.0
    for i in range(len(order)):
        wrong = set(order[: i + 1])
        missed = sum(truth[j] for j in wrong)
        union = truth.sum() + sum(not truth[j] for j in wrong)
        jaccard = 1 - (truth.sum() - missed) / union
        total += max(errors[order[i]], 0.0) * (jaccard - previous)
        previous = jaccard
    return float(total)


@pytest.mark.parametrize("ignored", [0.0, 0.4, 0.97])
@pytest.mark.parametrize("seed", range(3))
def test_lovasz_is_its_definition(seed: int, ignored: float) -> None:
    logits, labels = data(seed, size=5, ignored=ignored)
    labels[labels == 2] = 1  # a class that does not occur
    assert LovaszSoftmaxLoss()(logits, labels).item() == pytest.approx(naive_lovasz(logits, labels), rel=1e-9)


def test_lovasz_has_the_gradient_of_its_value() -> None:
    logits, labels = data(1, classes=3, size=3)
    assert torch.autograd.gradcheck(lambda x: LovaszSoftmaxLoss()(x, labels), logits.requires_grad_(), atol=1e-6)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("ignored", [0.0, 0.4, 0.97])
@pytest.mark.parametrize("seed", range(3))
def test_lovasz_hinge_is_its_definition(seed: int, ignored: float, channels: int) -> None:
    logits, labels = data(seed, classes=2, size=5, ignored=ignored)
    logits, y = logits[:, :channels], labels.numpy().ravel()
    scores = logits.numpy().ravel()
    if channels == 2:
        p = probabilities(logits)[:, 1]
        scores = np.log(p + 1e-9 / (1 - p + 1e-9))
    truth, scores = y[y != 255] == 1, scores[y != 255]
    expected = extension(1 - scores * np.where(truth, 1, -1), truth)
    assert LovaszHingeLoss()(logits, labels).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("channels", [1, 2])
def test_lovasz_hinge_has_the_gradient_of_its_value(channels: int) -> None:
    logits, labels = data(1, classes=2, size=3)
    inputs = logits[:, :channels].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: LovaszHingeLoss()(x, labels), inputs, atol=1e-6)


def test_lovasz_hinge_stays_finite_where_the_network_is_certain() -> None:
    _, labels = data(2, classes=2)
    logits = torch.full((2, 2, 6, 6), 80.0)
    logits[:, 0, :3], logits[:, 1, 3:] = -80.0, -80.0
    LovaszHingeLoss()(logits.requires_grad_(), labels).backward()
    assert logits.grad.isfinite().all()


def test_lovasz_hinge_is_for_two_classes() -> None:
    logits, labels = data(0, classes=3)
    with pytest.raises(ValueError, match=r"LovaszHingeLoss: 3 classes.*LovaszSoftmaxLoss"):
        LovaszHingeLoss()(logits, labels)


def naive_rmi(logits: torch.Tensor, labels: torch.Tensor, radius: int, pool: int) -> float:
    """By the definition: regions as vectors, their covariances, and the determinant of what one leaves of the other."""
    x, y = logits.numpy(), labels.numpy()
    value = 0.0
    for image in range(len(x)):
        valid = y[image] != 255
        for c in range(x.shape[1]):
            maps = ((y[image] == c) * 1.0, valid / (1 + np.exp(-x[image, c])) + 1e-6)
            truth, guess = (vectors(pooled(m, pool), radius) for m in maps)
            ridge = 5e-4 * np.eye(radius**2)
            cross = truth @ guess.T
            left = truth @ truth.T - cross @ np.linalg.inv(guess @ guess.T + ridge) @ cross.T
            value += 0.5 * np.linalg.slogdet(left + ridge)[1] / radius**2
    return value / len(x)


def pooled(image: np.ndarray, side: int) -> np.ndarray:
    """Maxima of squares of a side that lie side by side, from half a side in front of the image on."""
    before = side // 2
    padded = np.pad(image, ((before, before), (before, before)), constant_values=-np.inf)
    rows, columns = ((size - side) // side + 1 for size in padded.shape)
    squares = [
        [padded[r * side : (r + 1) * side, c * side : (c + 1) * side] for c in range(columns)] for r in range(rows)
    ]
    return np.array([[square.max() for square in line] for line in squares])


def vectors(image: np.ndarray, side: int) -> np.ndarray:
    """All squares of a side, as columns of mean 0."""
    windows = np.lib.stride_tricks.sliding_window_view(image, (side, side)).reshape(-1, side**2).T
    return windows - windows.mean(1, keepdims=True)


# The logarithm of a pivot has 1e-8 added to it; the smallest pivot is sqrt(5e-4), so the value moves by 5e-7 at most.
ATOL_PIVOT = 1e-6


@pytest.mark.parametrize(("radius", "pool"), [(3, 3), (2, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize("ignored", [0.0, 0.5, 1.1])
def test_region_mutual_information_is_its_definition(radius: int, pool: int, ignored: float) -> None:
    logits, labels = data(3, classes=3, size=14, ignored=ignored)
    expected = naive_rmi(logits, labels, radius, pool)
    assert RMILoss(radius, pool)(logits, labels).item() == pytest.approx(expected, rel=1e-7, abs=3 * ATOL_PIVOT)


def test_region_mutual_information_has_the_gradient_of_its_value() -> None:
    logits, labels = data(1, classes=2, size=7)
    assert torch.autograd.gradcheck(lambda x: RMILoss(2, 2)(x, labels), logits.requires_grad_(), atol=1e-5)


def test_pixels_that_do_not_count_have_no_gradient_of_region_mutual_information() -> None:
    logits, labels = data(1, size=12, ignored=0.5)
    RMILoss()(logits.requires_grad_(), labels).backward()
    assert (logits.grad.movedim(1, -1)[labels == 255] == 0).all()
    assert (logits.grad.movedim(1, -1)[labels != 255] != 0).any()


def test_the_better_guess_has_the_smaller_region_mutual_information_loss() -> None:
    _, labels = data(4, size=16, ignored=0.0)
    right = nn.functional.one_hot(labels, 4).movedim(-1, 1).double()
    values = [RMILoss()(scale * (2 * right - 1), labels).item() for scale in (0.1, 1.0, 4.0)]
    assert values == sorted(values, reverse=True)


def test_images_smaller_than_a_region_are_refused() -> None:
    logits, labels = data(0, size=5)
    with pytest.raises(ValueError, match="RMILoss: images of 5 x 5 pixels are too small for radius 3, pool 3"):
        RMILoss()(logits, labels)


@pytest.mark.parametrize("level", ["OD", "O1", "O2"])
@pytest.mark.parametrize(
    "loss", [CrossEntropyLoss([1.0, 2, 3, 4]), OhemCrossEntropyLoss(0.7, 20), LovaszSoftmaxLoss(), RMILoss(2, 2)]
)
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
    with pytest.raises(ValueError, match="1 outputs for 2 losses"):
        heads([logits], labels)
    with pytest.raises(ValueError, match="MixedLoss: 1 losses and 2 coefficients"):
        MixedLoss([ce], [1, 2])
    with pytest.raises(ValueError, match="HeadLosses: 2 losses and 1 coefficients"):
        HeadLosses([ce, ce], [1])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
@pytest.mark.parametrize(
    "loss", [CrossEntropyLoss(), OhemCrossEntropyLoss(0.7, 20), LovaszSoftmaxLoss(), RMILoss(2, 2)]
)
def test_labels_may_be_as_images_have_them(loss: nn.Module, dtype: torch.dtype) -> None:
    logits, labels = data(4)
    assert torch.equal(loss(logits, labels.to(dtype)), loss(logits, labels))


def test_losses_compile_without_a_break() -> None:
    logits, labels = data(5)
    mixed = MixedLoss([CrossEntropyLoss(), LovaszSoftmaxLoss(), RMILoss(2, 2)], [0.8, 0.2, 0.1])
    heads = HeadLosses([OhemCrossEntropyLoss(0.7, 20), mixed], [1, 0.4])
    torch._dynamo.reset()
    compiled = torch.compile(heads, backend="aot_eager", fullgraph=True)
    assert compiled([logits, logits], labels).item() == pytest.approx(heads([logits, logits], labels).item(), rel=1e-9)
