"""Counts and scores of a segmentation, against scikit-learn."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import (
    accuracy_score,
    cohen_kappa_score,
    confusion_matrix,
    f1_score,
    jaccard_score,
    precision_score,
    recall_score,
)

from mezzo.model.metric import ConfusionMatrix, SegmentationScores
from no_waiting import no_waiting

EXACT = 1e-12  # ratios of counts in float64


@st.composite
def label_maps(draw):
    """Predictions, labels (255 ignored) and the number of classes; at least one pixel counts."""
    classes = draw(st.integers(2, 6))
    size = draw(st.integers(1, 60))
    class_ = st.integers(0, classes - 1)
    predictions = draw(st.lists(class_, min_size=size, max_size=size))
    labels = draw(st.lists(class_ | st.just(255), min_size=size, max_size=size))
    labels[0] = draw(class_)
    return np.array(predictions), np.array(labels), classes


def counted(predictions, labels, classes, dtype=torch.int64, **options):
    matrix = ConfusionMatrix(classes, "cpu", **options)
    matrix.update(*(torch.from_numpy(x).to(dtype).reshape(1, 1, -1) for x in (predictions, labels)))
    return matrix


@given(label_maps(), st.sampled_from([torch.uint8, torch.int64]))
def test_counts_are_those_of_scikit_learn(maps, dtype):
    predictions, labels, classes = maps
    keep = labels != 255
    expected = confusion_matrix(labels[keep], predictions[keep], labels=range(classes))
    np.testing.assert_array_equal(counted(*maps, dtype).counts.numpy(), expected)


@given(label_maps())
def test_scores_are_those_of_scikit_learn_where_an_absent_class_counts_one(maps):
    predictions, labels, classes = maps
    scores = counted(*maps).scores()
    true, guess = labels[labels != 255], predictions[labels != 255]
    each = {"labels": range(classes), "average": None}
    for ours, theirs, empty in (
        (scores.class_iou, jaccard_score, 1),
        (scores.class_dice, f1_score, 1),
        (scores.class_precision, precision_score, 0),
        (scores.class_recall, recall_score, 0),
    ):
        expected = theirs(true, guess, **each, zero_division=empty)
        present = np.isin(np.arange(classes), np.concatenate([true, guess]))
        if theirs is jaccard_score:  # its zero_division reaches only the mean
            expected = np.where(present, expected, empty)
        np.testing.assert_allclose(ours, expected, atol=EXACT)
    assert scores.mean_iou == pytest.approx(np.mean(scores.class_iou), abs=EXACT)
    assert scores.mean_dice == pytest.approx(np.mean(scores.class_dice), abs=EXACT)
    assert scores.accuracy == pytest.approx(accuracy_score(true, guess), abs=EXACT)
    if len({*true, *guess}) > 1:  # scikit-learn's kappa is undefined for one class
        assert scores.kappa == pytest.approx(cohen_kappa_score(true, guess), abs=1e-9)


@given(label_maps())
def test_skipped_classes_have_no_scores_and_do_not_count_in_the_means(maps):
    predictions, labels, classes = maps
    scores = counted(*maps).scores(absent="skip")
    true, guess = labels[labels != 255], predictions[labels != 255]
    present = sorted({*true, *guess})
    iou = jaccard_score(true, guess, labels=present, average=None)
    assert scores.mean_iou == pytest.approx(iou.mean(), abs=EXACT)
    assert scores.mean_dice == pytest.approx(f1_score(true, guess, labels=present, average="macro"), abs=EXACT)
    for values in (scores.class_iou, scores.class_dice, scores.class_precision, scores.class_recall):
        assert [k for k in range(classes) if not math.isnan(values[k])] == present


@given(label_maps(), st.integers(1, 5))
def test_batches_add_up_to_the_whole(maps, parts):
    predictions, labels, classes = maps
    whole, pieces = counted(*maps), ConfusionMatrix(classes, "cpu")
    for some in zip(np.array_split(predictions, parts), np.array_split(labels, parts), strict=True):
        pieces.update(*(torch.from_numpy(x).reshape(1, -1, 1) for x in some))
    assert torch.equal(whole.counts, pieces.counts)


def test_one_class_everywhere_is_perfect_agreement():
    scores = counted(np.zeros(4, int), np.zeros(4, int), 3).scores()
    assert (scores.kappa, scores.mean_iou, scores.accuracy) == (1.0, 1.0, 1.0)


def test_a_class_can_be_the_ignored_one():
    matrix = counted(np.array([0, 1, 1]), np.array([0, 0, 1]), 2, ignore_index=0)
    assert matrix.counts.tolist() == [[0, 0], [0, 1]]


def test_update_asks_the_device_for_nothing():
    matrix = ConfusionMatrix(19, "meta")  # whatever reads a value raises there
    matrix.update(torch.empty(2, 8, 8, dtype=torch.int64, device="meta"), torch.empty(2, 8, 8, device="meta").byte())
    assert matrix.counts.shape == (19, 19)


@pytest.mark.gpu
def test_update_does_not_wait_for_cuda():
    matrix = ConfusionMatrix(19, "cuda")
    predictions = torch.randint(0, 19, (2, 64, 64), device="cuda")
    with no_waiting():
        matrix.update(predictions, predictions.byte())
    assert matrix.scores().accuracy == 1


def test_reset_starts_again_from_zero():
    matrix = counted(np.array([0]), np.array([1]), 2)
    matrix.reduce()
    matrix.reset()
    matrix.update(torch.tensor([1]), torch.tensor([1]))
    assert matrix.counts.tolist() == [[0, 0], [0, 1]]


def test_classes_that_do_not_exist_are_an_error_when_the_scores_are_asked_for():
    for predictions, labels in (([0, 3], [0, 1]), ([0, 1], [0, 7]), ([0, 1], [0, -1])):
        matrix = counted(np.array(predictions), np.array(labels), 3)
        with pytest.raises(ValueError, match=r"1 pixels have a prediction or a label outside 0\.\.2 \(ignored: 255\)"):
            matrix.scores()


def test_no_pixel_at_all_is_an_error():
    with pytest.raises(ValueError, match="no pixel was counted: every label is the ignored one"):
        counted(np.array([0]), np.array([255]), 2).scores()


def test_wrong_arguments_are_named():
    matrix = ConfusionMatrix(2, "cpu")
    with pytest.raises(ValueError, match=r"predictions are \(1, 2, 2\), labels \(1, 4, 4\); resize the logits"):
        matrix.update(torch.zeros(1, 2, 2).long(), torch.zeros(1, 4, 4).long())
    with pytest.raises(ValueError, match=r"predictions are torch\.float32; give classes as integers"):
        matrix.update(torch.zeros(1, 2, 2), torch.zeros(1, 2, 2).long())
    with pytest.raises(ValueError, match=r"labels are torch\.bool; give classes as integers"):
        matrix.update(torch.zeros(1, 2, 2).long(), torch.zeros(1, 2, 2).bool())
    with pytest.raises(ValueError, match="num_classes=0: must be at least 1"):
        ConfusionMatrix(0, "cpu")
    with pytest.raises(ValueError, match="unknown absent 'skipp'; did you mean 'skip'"):
        SegmentationScores.from_counts(torch.ones(2, 2), absent="skipp")
