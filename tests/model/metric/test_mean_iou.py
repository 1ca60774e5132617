"""Mean IoU, against scikit-learn."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import jaccard_score

from mezzo.model.metric import MeanIoU

EXACT = 1e-12  # ratios of counts in float64


def miou(pred, label, **options):
    metric = MeanIoU(4, **options)
    metric.update(*metric.compute(pred, label))
    return metric.accumulate()


@given(st.integers(0, 2**31), st.integers(1, 3), st.sampled_from([torch.uint8, torch.int64]))
def test_value_is_the_mean_of_scikit_learns_scores(seed, images, dtype):
    rng = np.random.default_rng(seed)
    logits = rng.random((images, 4, 5, 3), np.float32)
    labels = rng.choice([0, 1, 2, 3, 255], (images, 5, 3))
    labels[0, 0, 0] = 1
    true, guess = labels[labels != 255], logits.argmax(1)[labels != 255]
    present = sorted({*true, *guess})
    scores = jaccard_score(true, guess, labels=present, average=None)
    tensors = torch.from_numpy(logits), torch.from_numpy(labels).to(dtype)
    absent_as_one = (scores.sum() + 4 - len(present)) / 4
    assert miou(*tensors) == pytest.approx(absent_as_one, abs=EXACT)
    assert miou(*tensors, absent="skip") == pytest.approx(scores.mean(), abs=EXACT)
    for pred in (tensors[0].argmax(1), tensors[0].argmax(1).to(dtype)):
        assert miou(pred, tensors[1]) == miou(*tensors)
    assert miou(tensors[0], tensors[1].unsqueeze(1)) == miou(*tensors)


def test_update_takes_logits_too():
    logits, labels = torch.rand(2, 4, 5, 3), torch.randint(4, (2, 5, 3))
    metric = MeanIoU(4)
    metric.update(logits, labels)
    assert metric.accumulate() == miou(logits, labels)


def test_a_class_can_be_the_ignored_one_and_only_ignored_pixels_are_zero():
    pred, label = torch.tensor([[[0, 1, 1]]]), torch.tensor([[[0, 0, 1]]])
    assert miou(pred, label, ignore_index=0, absent="skip") == 1.0
    assert miou(pred, torch.full_like(label, 255)) == 0.0


def test_name_is_miou_unless_given():
    assert (MeanIoU(2).name(), MeanIoU(2, name="iou").name()) == ("miou", "iou")


def test_wrong_arguments_are_named():
    labels = torch.zeros(2, 4, 4).long()
    for shape in ((2, 3, 4, 4), (2, 4, 4)):
        with pytest.raises(
            ValueError, match=r"pred is .*, torch\.float32; it must be logits \(batch, 4, height, width\)"
        ):
            miou(torch.zeros(shape), labels)
    with pytest.raises(ValueError, match=r"predictions are \(2, 2, 2\), labels \(2, 4, 4\); resize the logits"):
        miou(torch.zeros(2, 4, 2, 2), labels)
    with pytest.raises(ValueError, match=r"labels are torch\.float32; give classes as integers"):
        miou(torch.zeros(2, 4, 4, 4), labels.float())
    with pytest.raises(ValueError, match=r"32 pixels have a prediction or a label outside 0\.\.3"):
        miou(torch.zeros(2, 4, 4, 4), labels + 7)
    with pytest.raises(ValueError, match="num_classes=0: must be at least 1"):
        MeanIoU(0)
    with pytest.raises(ValueError, match="unknown absent 'skipp'; did you mean 'skip'"):
        MeanIoU(4, absent="skipp")
