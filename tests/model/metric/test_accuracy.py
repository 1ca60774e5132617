"""Accuracy, against scikit-learn and values that Paddle gives."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, top_k_accuracy_score

from mezzo.model.metric import Accuracy

# The scores and labels of Paddle's documentation of this class; it gives 0.75.
SCORES = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.1, 0.4, 0.3, 0.2], [0.1, 0.2, 0.4, 0.3], [0.1, 0.2, 0.3, 0.4]])
LABELS = torch.arange(4)


def accuracy(pred, label, **options):
    metric = Accuracy(**options)
    metric.update(metric.compute(pred, label))
    return metric.accumulate()


@given(st.integers(0, 2**31), st.integers(3, 12), st.integers(1, 30))
def test_share_is_that_of_scikit_learn(seed, classes, samples):
    rng = np.random.default_rng(seed)
    scores = rng.permuted(np.tile(np.arange(classes, dtype=np.float32), (samples, 1)), axis=1)
    labels = rng.integers(0, classes, samples)
    expected = [top_k_accuracy_score(labels, scores, k=k, labels=range(classes)) for k in (1, 2)]
    ours = accuracy(torch.from_numpy(scores), torch.from_numpy(labels), topk=(1, 2))
    assert ours == pytest.approx(expected)
    assert accuracy(scores, labels) == pytest.approx(accuracy_score(labels, scores.argmax(1)))


@pytest.mark.parametrize("more", [(), (5,), (2, 3)])
def test_labels_may_be_classes_columns_or_one_hot_with_any_dimensions_before_the_classes(more):
    scores = torch.rand(6, *more, 4)
    labels = torch.randint(4, (6, *more))
    expected = [
        np.mean((scores.argsort(-1, descending=True)[..., :k] == labels[..., None]).any(-1).numpy()) for k in (1, 3)
    ]
    one_hot = torch.nn.functional.one_hot(labels, 4)
    for form in (labels, labels.unsqueeze(-1), labels.int(), labels.float(), one_hot, one_hot.half()):
        assert accuracy(scores, form, topk=(1, 3)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["acc"]),
        ({"topk": (1, 5)}, ["acc_top1", "acc_top5"]),
        ({"topk": [5]}, ["acc_top5"]),
        ({"topk": 5}, ["acc_top5"]),
        ({"name": "top"}, ["top"]),
        ({"topk": (1, 2), "name": "top"}, ["top_top1", "top_top2"]),
    ],
)
def test_names_are_those_of_paddle(options, names):
    assert Accuracy(**options).name() == names


def test_values_are_those_of_paddle():
    metric = Accuracy()
    correct = metric.compute(SCORES, LABELS.view(-1, 1))
    assert (correct.shape, correct.dtype) == ((4, 1), torch.float32)
    assert metric.update(correct) == 0.75
    assert metric.accumulate() == 0.75
    assert accuracy(SCORES, LABELS, topk=(1, 5)) == [0.75, 1.0]  # four classes: the fifth is the fourth


def test_update_returns_the_accuracy_of_its_batch_on_the_device():
    one, two = Accuracy(), Accuracy((1, 2))
    one.update(one.compute(SCORES[:1], LABELS[:1]))
    two.update(two.compute(SCORES[:1], LABELS[:1]))
    batch = one.update(one.compute(SCORES[1:3], LABELS[1:3]))
    assert isinstance(batch, torch.Tensor)
    assert (batch.shape, batch.item()) == ((), 1.0)
    batches = two.update(two.compute(SCORES[1:3], LABELS[1:3]))
    assert [value.item() for value in batches] == [1.0, 1.0]
    assert one.accumulate() == 2 / 3
    empty = one.update(one.compute(SCORES[:0], LABELS[:0]))
    assert empty.item() == 0.0


def test_many_samples_are_counted_exactly():
    metric = Accuracy()
    metric.update(torch.ones(2**24 + 1, 1))  # float32 cannot count so far
    metric.update(torch.zeros(1, 1))
    assert metric.accumulate() == (2**24 + 1) / (2**24 + 2)


def test_wrong_arguments_are_named():
    metric = Accuracy((1, 2))
    with pytest.raises(ValueError, match=r"pred is \(4,\); it must be \(batch, classes\)"):
        metric.compute(torch.zeros(4), LABELS)
    with pytest.raises(
        ValueError, match=r"label is \(3,\), pred \(4, 4\).*must be \(4,\) or \(4, 1\).*or \(4, 4\) one-hot"
    ):
        metric.compute(SCORES, LABELS[:3])
    with pytest.raises(ValueError, match=r"label is \(2, 8, 8\).*give pred\.movedim\(1, -1\)"):
        metric.compute(torch.zeros(2, 5, 8, 8), torch.zeros(2, 8, 8))
    with pytest.raises(ValueError, match=r"correct is \(4, 4\); it must be .* k up to 2: give what compute"):
        metric.update(SCORES)
    with pytest.raises(ValueError, match=r"correct is \(4,\)"):
        metric.update(torch.ones(4))
    for topk in ((), (1, 0), 0):
        with pytest.raises(ValueError, match="give at least one number, each at least 1, such as"):
            Accuracy(topk)
