"""The lines that a run prints, exactly as the documents show them: format and parse."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mezzo.model.metric import SegmentationScores


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainLine:
    """The numbers of a line of classification training.

    Means are over the steps since the previous line.
    """

    epoch: int
    """Counted from 1."""
    step: int
    """In this epoch, from 0."""
    top1: float
    top5: float
    lr: float
    loss: float
    reader_cost_s: float
    """Mean time that a step waits for its batch."""
    batch_cost_s: float
    """Mean time of a step, including the wait."""
    samples: float
    """Mean size of a batch."""
    images_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentationTrainLine:
    """The numbers of a line of segmentation training.

    Means are over the steps since the previous line.
    """

    epoch: int
    """Counted from 1."""
    step: int
    """Of the whole run, from 1."""
    steps: int
    """Number of steps of the whole run."""
    loss: float
    lr: float
    batch_cost_s: float
    reader_cost_s: float
    samples_per_s: float
    eta_s: int
    """Whole seconds until the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalLine:
    """The numbers of the line of a classification's evaluation."""

    top1: float
    top5: float
    loss: float


def format_train_line(line: TrainLine) -> str:
    """Return a line of classification training."""
    return (
        f"[Epoch {line.epoch}, iter: {line.step}] top1: {line.top1:.5f}, top5: {line.top5:.5f}, lr: {line.lr:.5f}, "
        f"loss: {line.loss:.5f}, avg_reader_cost: {line.reader_cost_s:.5f} sec, "
        f"avg_batch_cost: {line.batch_cost_s:.5f} sec, avg_samples: {line.samples:.1f}, "
        f"avg_ips: {line.images_per_s:.5f} images/sec."
    )


def format_segmentation_train_line(line: SegmentationTrainLine) -> str:
    """Return a line of segmentation training, without the time in front of it; see `stamped`."""
    return (
        f"[TRAIN] epoch: {line.epoch}, iter: {line.step}/{line.steps}, loss: {line.loss:.4f}, lr: {line.lr:.6f}, "
        f"batch_cost: {line.batch_cost_s:.4f}, reader_cost: {line.reader_cost_s:.5f}, "
        f"ips: {line.samples_per_s:.4f} samples/sec | ETA {format_duration(line.eta_s)}"
    )


def format_eval_line(line: EvalLine) -> str:
    """Return the line of a classification's evaluation.

    >>> format_eval_line(EvalLine(top1=0.5, top5=0.75, loss=1.25))
    '[Eval] top1: 0.50000, top5: 0.75000, loss: 1.25000'
    """
    return f"[Eval] top1: {line.top1:.5f}, top5: {line.top5:.5f}, loss: {line.loss:.5f}"


def format_segmentation_eval_lines(images: int, scores: SegmentationScores) -> tuple[str, ...]:
    """Return the four lines of a segmentation's evaluation, without the time in front of them."""
    return (
        f"[EVAL] #Images: {images} mIoU: {scores.mean_iou:.4f} Acc: {scores.accuracy:.4f} "
        f"Kappa: {scores.kappa:.4f} Dice: {scores.mean_dice:.4f}",
        f"[EVAL] Class IoU: {_row(scores.class_iou)}",
        f"[EVAL] Class Precision: {_row(scores.class_precision)}",
        f"[EVAL] Class Recall: {_row(scores.class_recall)}",
    )


def format_memory_line(reserved: int, allocated: int) -> str:
    """Return the line about peak GPU memory, as PaddleClas prints it; arguments are bytes."""
    return f"max_mem_reserved: {reserved >> 20} MB, max_mem_allocated: {allocated >> 20} MB"


def format_duration(seconds: int) -> str:
    """Return a time as hours, minutes and seconds; a day is 24 hours.

    >>> format_duration(125), format_duration(90 * 3600)
    ('00:02:05', '90:00:00')
    """
    minutes, second = divmod(seconds, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{second:02}"


def _row(values: Sequence[float]) -> str:
    return f"[{' '.join(f'{value:.4f}' for value in values)}]"


def parse_train_line(text: str) -> TrainLine | SegmentationTrainLine | None:
    """Return the numbers of a line of training, with or without a time in front of it.

    Return None for any other line.
    """
    if match := _CLASSIFICATION.search(text):
        names = ("top1", "top5", "lr", "loss", "reader_cost_s", "batch_cost_s", "samples", "images_per_s")
        return TrainLine(
            epoch=int(match["epoch"]), step=int(match["step"]), **{name: float(match[name]) for name in names}
        )
    if match := _SEGMENTATION.search(text):
        numbers = ("loss", "lr", "batch_cost_s", "reader_cost_s", "samples_per_s")
        hours, minutes, seconds = (int(match[name]) for name in ("hours", "minutes", "seconds"))
        return SegmentationTrainLine(
            epoch=int(match["epoch"]),
            step=int(match["step"]),
            steps=int(match["steps"]),
            eta_s=(hours * 60 + minutes) * 60 + seconds,
            **{name: float(match[name]) for name in numbers},
        )
    return None


def _number(name: str) -> str:
    return rf"(?P<{name}>-?(?:[0-9]{{1,400}}\.[0-9]{{1,20}}|nan|inf))"  # a loss may be infinite or not a number


def _whole(name: str) -> str:
    return rf"(?P<{name}>[0-9]{{1,18}})"


_CLASSIFICATION = re.compile(
    rf"\[Epoch {_whole('epoch')}, iter: {_whole('step')}\] top1: {_number('top1')}, top5: {_number('top5')}, "
    rf"lr: {_number('lr')}, loss: {_number('loss')}, avg_reader_cost: {_number('reader_cost_s')} sec, "
    rf"avg_batch_cost: {_number('batch_cost_s')} sec, avg_samples: {_number('samples')}, "
    rf"avg_ips: {_number('images_per_s')} images/sec\.\s*$"
)
_SEGMENTATION = re.compile(
    rf"\[TRAIN\] epoch: {_whole('epoch')}, iter: {_whole('step')}/{_whole('steps')}, loss: {_number('loss')}, "
    rf"lr: {_number('lr')}, batch_cost: {_number('batch_cost_s')}, reader_cost: {_number('reader_cost_s')}, "
    rf"ips: {_number('samples_per_s')} samples/sec \| ETA {_whole('hours')}:{_whole('minutes')}:{_whole('seconds')}\s*$"
)
