"""Areas under curves, against scikit-learn."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from sklearn.metrics import auc, precision_recall_curve, roc_auc_score

from mezzo.model.metric import Auc

EXACT = 1e-12  # sums of ratios of counts in float64


def area(preds, labels, **options):
    metric = Auc(**options)
    metric.update(preds, labels)
    return metric.accumulate()


@st.composite
def samples(draw):
    """Probabilities and labels; at least one of each class."""
    labels = draw(st.lists(st.integers(0, 1), min_size=2, max_size=60))
    assume(0 < sum(labels) < len(labels))
    preds = draw(st.lists(st.floats(0, 1, width=32), min_size=len(labels), max_size=len(labels)))
    return np.array(preds, np.float32), np.array(labels)


@given(samples(), st.integers(1, 50))
def test_area_is_off_by_no_more_than_the_pairs_that_share_a_bin(both, thresholds):
    preds, labels = both
    bins = np.floor(preds.astype(np.float64) * thresholds).astype(int)
    counts = [np.bincount(bins[labels == label], minlength=thresholds + 1) for label in (0, 1)]
    # Of a pair in one bin a half counts, whichever of 0, a half and 1 is right.
    tolerance = 0.5 * (counts[0] * counts[1]).sum() / (counts[0].sum() * counts[1].sum())
    ours = area(torch.from_numpy(preds), torch.from_numpy(labels), num_thresholds=thresholds)
    assert abs(ours - roc_auc_score(labels, preds)) <= tolerance + EXACT


@given(samples(), st.integers(1, 50))
def test_areas_are_exact_where_equal_bins_are_equal_probabilities(both, thresholds):
    preds, labels = both
    preds = (
        np.floor(preds.astype(np.float64) * (thresholds - 1) + 0.5) / thresholds + 0.5 / thresholds
    )  # middles of bins
    tensors = torch.from_numpy(preds), torch.from_numpy(labels)
    assert area(*tensors, num_thresholds=thresholds) == pytest.approx(roc_auc_score(labels, preds), abs=EXACT)
    precision, recall, _ = precision_recall_curve(labels, preds)
    ours = area(*tensors, num_thresholds=thresholds, curve="PR")
    assert ours == pytest.approx(auc(recall, precision), abs=EXACT)


@pytest.mark.parametrize("thresholds", [15, 255, 4095])
def test_more_bins_bring_the_area_nearer(thresholds):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 4000)
    preds = (rng.random(4000) + labels) / 2  # class 0 below 1/2 and class 1 above 1/2, each with a density of 2 ...
    preds = np.where(rng.random(4000) < 0.3, rng.random(4000), preds)  # ... but 0.3 of them anywhere
    expected = roc_auc_score(labels, preds)
    # Where both classes are, one has a density of 1.7 and the other of 0.3: of the pairs 0.51 / bins share one.
    assert area(preds, labels, num_thresholds=thresholds) == pytest.approx(expected, abs=0.5 * 0.6 / thresholds)


@pytest.mark.parametrize("curve", ["ROC", "PR"])
def test_probabilities_may_be_a_row_a_column_or_those_of_both_classes(curve):
    row, labels = torch.tensor([0.1, 0.5, 0.6, 0.7, 0.2]), torch.tensor([0, 1, 0, 1, 1])
    values = {
        area(preds, form, curve=curve)
        for preds in (row, row.view(-1, 1), torch.stack([1 - row, row], 1))
        for form in (labels, labels.view(-1, 1), labels.bool(), labels.float())
    }
    assert len(values) == 1


def test_values_are_those_of_paddle():
    # paddle.metric.Auc of version 3.3.1, default arguments, for the samples below; it takes (N, 2) alone.
    generator = np.random.default_rng(7)
    preds = generator.random(50).astype(np.float32)
    labels = generator.integers(0, 2, 50)
    assert area(np.stack([1 - preds, preds], 1), labels) == pytest.approx(0.5616883116883117, abs=EXACT)
    assert (Auc().name(), Auc(name="area").name()) == ("auc", "area")


def test_the_ends_are_in_bins_of_their_own_side():
    assert area(torch.tensor([0.0, 1.0]), torch.tensor([0, 1]), num_thresholds=1) == 1.0
    assert area(torch.tensor([0.0, 0.9]), torch.tensor([0, 1]), num_thresholds=1) == 0.5


def test_without_one_of_the_classes_there_is_no_roc_area():
    for label in (0, 1):
        assert area(torch.tensor([0.2, 0.7]), torch.tensor([label, label])) == 0.0
    assert area(torch.tensor([0.2, 0.7]), torch.tensor([0, 0]), curve="PR") == 0.0
    assert area(torch.tensor([0.2, 0.7]), torch.tensor([1, 1]), curve="PR") == 1.0


def test_what_is_not_a_number_is_below_every_threshold():
    assert area(torch.tensor([math.nan, 0.3]), torch.tensor([0, 1])) == 1.0


def test_wrong_arguments_are_named():
    with pytest.raises(
        ValueError, match=r"preds are \(4, 3\), labels \(4,\); preds must be \(batch,\), \(batch, 1\) or \(b"
    ):
        area(torch.zeros(4, 3), torch.zeros(4))
    with pytest.raises(ValueError, match=r"preds are \(4, 2\), labels \(5,\)"):
        area(torch.zeros(4, 2), torch.zeros(5))
    with pytest.raises(ValueError, match=r"1 predictions are outside of 0 to 1; give probabilities"):
        area(torch.tensor([2.0, 0.5]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="2 labels are neither 0 nor 1"):
        area(torch.tensor([2.0, 0.5]), torch.tensor([-1, 2]))
    with pytest.raises(ValueError, match="unknown curve 'roc'; allowed: ROC, PR"):
        Auc("roc")
    with pytest.raises(ValueError, match="num_thresholds=0: must be at least 1"):
        Auc(num_thresholds=0)
