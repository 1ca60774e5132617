"""Top-k and running means, against scikit-learn and NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import top_k_accuracy_score

from mezzo.model.metric import RunningMean, TopK, batch_topk


@given(st.integers(0, 2**31), st.integers(3, 12), st.integers(1, 30))
def test_share_is_that_of_scikit_learn(seed, classes, samples):
    rng = np.random.default_rng(seed)
    logits, labels = rng.permuted(np.tile(np.arange(classes), (samples, 1)), axis=1), rng.integers(0, classes, samples)
    metric = TopK((1, 2), "cpu")
    for rows in np.array_split(np.arange(samples), 3):
        metric.update(torch.from_numpy(logits[rows]).float(), torch.from_numpy(labels[rows]))
    expected = [top_k_accuracy_score(labels, logits, k=k, labels=range(classes)) for k in (1, 2)]
    assert [metric.scores()[k] for k in (1, 2)] == pytest.approx(expected)
    batch = batch_topk(torch.from_numpy(logits).float(), torch.from_numpy(labels), (1, 2))
    assert batch.tolist() == pytest.approx(expected)


def test_fewer_classes_than_k_makes_k_their_number():
    logits, labels = torch.tensor([[3.0, 1.0], [3.0, 1.0]]), torch.tensor([0, 1])
    metric = TopK(device="cpu")
    metric.update(logits, labels)
    assert metric.scores() == {1: 0.5, 5: 1.0}
    assert batch_topk(logits, labels).tolist() == [0.5, 1.0]


def test_half_logits_and_small_labels_are_counted_too():
    metric = TopK((1,), "cpu")
    metric.update(torch.eye(4, dtype=torch.float16), torch.arange(4, dtype=torch.uint8))
    assert metric.scores() == {1: 1.0}


def test_updates_ask_the_device_for_nothing():
    metric, mean = TopK((1, 5), "meta"), RunningMean("meta")  # whatever reads a value raises there
    metric.update(torch.empty(4, 10, device="meta"), torch.empty(4, device="meta", dtype=torch.int64))
    mean.update(torch.empty((), device="meta"), weight=4)


def test_wrong_shapes_and_ks_are_named():
    with pytest.raises(ValueError, match=r"logits are \(2, 3\), labels \(3,\); they must be \(batch, classes\)"):
        batch_topk(torch.zeros(2, 3), torch.zeros(3).long())
    with pytest.raises(ValueError, match=r"ks=\(\): give at least one number"):
        TopK((), "cpu")
    with pytest.raises(ValueError, match=r"ks=\(1, 0\): give at least one number, each at least 1"):
        batch_topk(torch.zeros(2, 3), torch.zeros(2).long(), (1, 0))
    with pytest.raises(ValueError, match="no sample was counted: the data set is empty"):
        TopK(device="cpu").scores()


@given(st.lists(st.tuples(st.floats(-1e3, 1e3, width=32), st.integers(1, 64)), min_size=1, max_size=50))
def test_running_mean_is_the_weighted_mean(pairs):
    mean = RunningMean("cpu")
    for value, weight in pairs:
        mean.update(torch.tensor(value), weight)
    values, weights = zip(*pairs, strict=True)
    assert mean.value() == pytest.approx(np.average(np.array(values, np.float64), weights=weights), abs=1e-9)


def test_running_mean_takes_host_numbers_and_one_number_tensors_with_a_gradient():
    mean = RunningMean("cpu")
    mean.update(2)
    mean.update(torch.tensor([4.0], requires_grad=True) * 1)
    assert mean.value() == 3
    with pytest.raises(ValueError, match=r"one number is added at a time; this tensor is \(2,\)"):
        mean.update(torch.zeros(2))
    with pytest.raises(ValueError, match="nothing was added"):
        RunningMean("cpu").value()
