"""The loop around training steps, for the training command and for `mezzo.Model`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from mezzo.errors import RunError
from mezzo.model.meter import StepMeter

B = TypeVar("B")


class NonFiniteLoss(RunError):
    """The loss of a step was inf or nan, and no dynamic loss scale can correct it."""


@dataclass(slots=True)
class StepResult:
    """Loss and watched values of a step, on the device; the host reads them for a log line."""

    loss: Tensor
    watched: Mapping[str, Tensor]


def run_steps(
    steps: Iterable[int],
    batches: Iterator[B],
    train: Callable[[int, B], StepResult],
    samples_of: Callable[[B], int],
    meter: StepMeter,
    *,
    before: Callable[[int], None],
    after: Callable[[int], bool],
) -> int:
    """Train on one batch per step until steps or batches end; return the number of steps taken.

    Args:
        steps: Step numbers.
        batches: One batch per step.
        train: Runs one step.
        samples_of: Returns the number of samples of a batch.
        meter: Receives losses and times.
        before: Called with the step number before each step.
        after: Called with the step number after each step; True ends the loop.
    """
    done = 0
    for step in steps:
        start = time.perf_counter()
        batch: Any = next(batches, _END)
        reading_s = time.perf_counter() - start
        if batch is _END:
            break
        before(step)
        result = train(step, batch)
        meter.add(step, result.loss, result.watched, samples_of(batch), reading_s)
        done += 1
        if after(step):
            break
    return done


_END = object()
