"""Precision and recall, against scikit-learn and values that Paddle gives."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import precision_score, recall_score

from mezzo.model.metric import Precision, Recall

KINDS = {Precision: precision_score, Recall: recall_score}
SAMPLES = st.lists(st.tuples(st.floats(0, 1, width=32), st.integers(0, 1)), min_size=1, max_size=40)


def value(kind, preds, labels):
    metric = kind()
    metric.update(preds, labels)
    return metric.accumulate()


@pytest.mark.parametrize("kind", KINDS)
@given(samples=SAMPLES, pred_is_column=st.booleans(), label_is_column=st.booleans())
def test_share_is_that_of_scikit_learn(kind, samples, pred_is_column, label_is_column):
    preds, labels = (torch.tensor(column) for column in zip(*samples, strict=True))
    expected = KINDS[kind](labels.numpy(), preds.numpy() > 0.5, zero_division=0)
    shaped = (t.view(-1, 1) if column else t for t, column in ((preds, pred_is_column), (labels, label_is_column)))
    assert value(kind, *shaped) == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float16, torch.float64])
def test_labels_may_have_any_dtype(dtype):
    preds, labels = torch.tensor([0.1, 0.6, 0.7, 0.9]), torch.tensor([1, 0, 1, 1])
    assert [value(kind, preds, labels.to(dtype)) for kind in KINDS] == pytest.approx([2 / 3, 2 / 3])


def test_values_are_those_of_paddles_documentation():
    preds = np.array([0.1, 0.5, 0.6, 0.7])
    assert value(Precision, preds, np.array([0, 1, 1, 1])) == 1.0
    assert value(Recall, preds, np.array([1, 0, 1, 1])) == 2 / 3
    assert (Precision().name(), Recall().name(), Recall(name="found").name()) == ("precision", "recall", "found")


def test_one_half_is_class_0_for_both_and_the_next_number_is_class_1():
    for preds, found in ((0.5, 0.0), (math.nextafter(0.5, 1), 1.0)):
        for kind in KINDS:
            assert value(kind, torch.tensor([preds], dtype=torch.float64), torch.tensor([1])) == found


def test_what_is_not_a_number_is_never_predicted():
    preds, labels = torch.tensor([math.nan, 0.9]), torch.tensor([1, 1])
    assert (value(Precision, preds, labels), value(Recall, preds, labels)) == (1.0, 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_arguments_are_named(kind):
    metric = kind()
    for preds, labels in (((4,), (3,)), ((4, 2), (4,)), ((4,), (1, 4)), ((), ())):
        with pytest.raises(
            ValueError, match=r"preds are .*, labels .*; preds must be \(batch,\) or \(batch, 1\), labels"
        ):
            metric.update(torch.zeros(preds), torch.zeros(labels))
    with pytest.raises(ValueError, match=r"of two columns, give that of class 1: preds\[:, 1\]"):
        metric.update(torch.zeros(4, 2), torch.zeros(4))
    with pytest.raises(
        ValueError, match=r"2 predictions are outside of 0 to 1; give probabilities, such as torch\.sigmoid"
    ):
        value(kind, torch.tensor([-0.5, 0.5, math.inf]), torch.tensor([0, 1, 1]))
    with pytest.raises(ValueError, match="1 labels are neither 0 nor 1; this metric is for two classes"):
        value(kind, torch.tensor([0.5, 0.5]), torch.tensor([0, 2]))
