"""Lines as the documents show them, and back."""

import dataclasses
import math
from datetime import datetime

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mezzo.model.metric import SegmentationScores
from mezzo.report import stamped
from mezzo.vision.train.log_lines import (
    EvalLine,
    SegmentationTrainLine,
    TrainLine,
    format_duration,
    format_eval_line,
    format_memory_line,
    format_segmentation_eval_lines,
    format_segmentation_train_line,
    format_train_line,
    parse_train_line,
)

DOCUMENTED = (
    "[Epoch 1, iter: 0] top1: 0.06250, top5: 0.12500, lr: 0.10000, loss: 6.64041, avg_reader_cost: 0.73829 sec, "
    "avg_batch_cost: 0.86344 sec, avg_samples: 16.0, avg_ips: 18.53046 images/sec."
)
DOCUMENTED_SEGMENTATION = (
    "2022-04-13 11:43:09 [INFO]\t[TRAIN] epoch: 1, iter: 10/1000, loss: 0.7345, lr: 0.009910, batch_cost: 0.1234, "
    "reader_cost: 0.01234, ips: 16.2075 samples/sec | ETA 00:02:05"
)


def test_classification_line_is_the_documented_one():
    line = TrainLine(
        epoch=1,
        step=0,
        top1=1 / 16,
        top5=2 / 16,
        lr=0.1,
        loss=6.640412,
        reader_cost_s=0.738294,
        batch_cost_s=0.863443,
        samples=16,
        images_per_s=18.530463,
    )
    assert format_train_line(line) == DOCUMENTED


def test_segmentation_line_is_the_documented_one():
    line = SegmentationTrainLine(
        epoch=1,
        step=10,
        steps=1000,
        loss=0.73451,
        lr=0.00991,
        batch_cost_s=0.12339,
        reader_cost_s=0.012341,
        samples_per_s=16.20751,
        eta_s=125,
    )
    assert stamped(format_segmentation_train_line(line), datetime(2022, 4, 13, 11, 43, 9)) == DOCUMENTED_SEGMENTATION


def test_documented_lines_are_read_back():
    line = parse_train_line(DOCUMENTED)
    assert isinstance(line, TrainLine)
    assert (line.epoch, line.step, line.top5, line.loss, line.images_per_s) == (1, 0, 0.125, 6.64041, 18.53046)
    line = parse_train_line(DOCUMENTED_SEGMENTATION + "\n")
    assert isinstance(line, SegmentationTrainLine)
    assert (line.steps, line.lr, line.eta_s) == (1000, 0.00991, 125)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[Epoch 1, iter: 0] top1: x",
        DOCUMENTED[:-1],
        DOCUMENTED_SEGMENTATION[:-3],
        "[EVAL] #Images: 5",
    ],
)
def test_other_lines_are_none(text):
    assert parse_train_line(text) is None


@given(st.text(max_size=200) | st.text(max_size=5).map(lambda x: DOCUMENTED[:60] + x + DOCUMENTED[60:]))
def test_no_text_breaks_the_parser(text):
    parse_train_line(text)


counts = st.integers(0, 10**9)
numbers = st.floats(-1e6, 1e6) | st.sampled_from([math.inf, -math.inf, math.nan])
train_lines = st.builds(
    TrainLine, **{f.name: counts if f.name in ("epoch", "step") else numbers for f in dataclasses.fields(TrainLine)}
)
segmentation_lines = st.builds(
    SegmentationTrainLine,
    **{
        f.name: counts if f.name in ("epoch", "step", "steps", "eta_s") else numbers
        for f in dataclasses.fields(SegmentationTrainLine)
    },
)
DIGITS = {"samples": 1}
SEGMENTATION_DIGITS = {"lr": 6, "reader_cost_s": 5}


def agrees(read: float, written: float, digits: int) -> bool:
    if not math.isfinite(written):
        return repr(read) == repr(written)
    return abs(read - written) <= 0.5 * 10**-digits * (1 + 1e-9) + 1e-9  # half a unit of the last digit, and rounding


@given(train_lines)
def test_a_classification_line_is_read_back_to_its_printed_digits(line):
    back = parse_train_line(format_train_line(line))
    for field in dataclasses.fields(line):
        assert agrees(getattr(back, field.name), getattr(line, field.name), DIGITS.get(field.name, 5)), field.name


@given(segmentation_lines)
def test_a_segmentation_line_is_read_back_to_its_printed_digits(line):
    back = parse_train_line(stamped(format_segmentation_train_line(line), datetime(2024, 1, 2)))
    for field in dataclasses.fields(line):
        digits = SEGMENTATION_DIGITS.get(field.name, 4)
        assert agrees(getattr(back, field.name), getattr(line, field.name), digits), field.name


def test_evaluation_of_a_segmentation_is_four_lines():
    scores = SegmentationScores.from_counts(torch.tensor([[3, 1], [0, 4]]))
    kappa = (7 / 8 - 0.5) / 0.5  # half of it by chance: (3 * 4 + 5 * 4) / 64
    assert format_segmentation_eval_lines(50, scores) == (
        f"[EVAL] #Images: 50 mIoU: 0.7750 Acc: 0.8750 Kappa: {kappa:.4f} Dice: 0.8730",
        "[EVAL] Class IoU: [0.7500 0.8000]",
        "[EVAL] Class Precision: [1.0000 0.8000]",
        "[EVAL] Class Recall: [0.7500 1.0000]",
    )


def test_evaluation_of_a_classification_is_one_line():
    line = EvalLine(top1=0.676251, top5=0.876, loss=1.4)
    assert format_eval_line(line) == "[Eval] top1: 0.67625, top5: 0.87600, loss: 1.40000"


@given(st.integers(0, 10**7))
def test_a_duration_has_all_its_seconds(seconds):
    hours, minutes, rest = map(int, format_duration(seconds).split(":"))
    assert hours * 3600 + minutes * 60 + rest == seconds
    assert max(minutes, rest) < 60


def test_memory_is_said_in_paddleclas_s_words() -> None:
    assert format_memory_line(7 << 20, (5 << 20) + 1) == "max_mem_reserved: 7 MB, max_mem_allocated: 5 MB"
