"""Epochs of training, and evaluations, over a whole data set."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor

from mezzo.model._data import count_samples, length_of, with_last
from mezzo.model._prepared import Prepared
from mezzo.model.callbacks import CallbackList, LateLogs
from mezzo.model.meter import StepMeter
from mezzo.model.metric import RunningMean
from mezzo.model.parallel import share_buffers
from mezzo.model.steps import NonFiniteLoss, StepResult, run_steps
from mezzo.model.watchdog import EVALUATED, begin_step, enter

LOSS_IS_LOOKED_AT_EVERY = 10  # batches between two checks that the loss is finite


class Epoch:
    """One pass over the training data.

    Args:
        prepared: The network with all that a batch needs.
        told: The callbacks.
        accumulate: Batches per update.
        most: Maximum number of batches; None: all.
    """

    def __init__(self, prepared: Prepared, told: CallbackList, accumulate: int, most: int | None) -> None:
        self._prepared, self._told, self._accumulate, self._most = prepared, told, accumulate, most
        self._meter, self._mean = StepMeter(prepared.world.device), RunningMean(prepared.world.device)
        self._loss: Tensor | None = None

    def run(self, loader: Iterable[Any], epoch: int) -> dict[str, Any]:
        """Train; return the mean loss, the metrics, and the number of steps."""
        self._epoch = epoch
        self._prepared.reset_metrics()
        self._told.begin_epoch(epoch)
        taken = run_steps(
            itertools.count(),
            with_last(itertools.islice(loader, self._most)),
            self._train,
            lambda item: 1,
            self._meter,
            before=lambda step: self._told.begin_batch("train", step),
            after=self._after,
        )
        if not taken:
            raise ValueError(
                "the training data gave no batch: it is empty, or smaller than a batch with drop_last=True"
            )
        self._refuse_non_finite()
        if self._prepared.precision.scaler is not None:
            self._prepared.precision.scaler.flush()
        self._mean.reduce()
        logs = {"loss": self._mean.value(), **self._prepared.metric_values(of_all=True), "step": taken}
        self._told.end_epoch(epoch, logs)
        return logs

    def _train(self, step: int, item: tuple[Any, bool]) -> StepResult:
        begin_step()
        batch, is_last = item
        parts = self._prepared.split(batch)
        result = self._prepared.train(parts, update=is_last or (step + 1) % self._accumulate == 0)
        self._samples = count_samples(parts[0])
        self._mean.update(result.loss, self._samples)
        self._loss = result.loss
        return result

    def _after(self, step: int) -> bool:
        loss, samples = self._loss, self._samples
        assert loss is not None

        def read() -> dict[str, Any]:
            return {**_read(loss, self._prepared), "step": step + 1, "batch_size": samples}

        with LateLogs(read) as logs:
            self._told.end_batch("train", step, logs)
        if (step + 1) % LOSS_IS_LOOKED_AT_EVERY == 0:
            self._refuse_non_finite()
        return False

    def _refuse_non_finite(self) -> None:
        scaler = self._prepared.precision.scaler
        if self._meter.is_empty or (scaler is not None and scaler.is_use_dynamic_loss_scaling()):
            return  # a dynamic loss scale skips non-finite steps
        bad = self._meter.read().first_bad_step
        if bad is not None:
            raise NonFiniteLoss(
                f"the loss is not finite in batch {bad + 1} of epoch {self._epoch + 1}; lower the learning rate, or look at "
                "the batch"
            )


def run_evaluation(
    prepared: Prepared, loader: Iterable[Any], told: CallbackList, most: int | None = None
) -> dict[str, Any]:
    """Return the mean loss, the metrics and the number of samples over all processes."""
    share_buffers(prepared.network, prepared.world)
    prepared.reset_metrics()
    device = prepared.world.device
    mean, samples = RunningMean(device), RunningMean(device)
    told.begin("eval", {"steps": length_of(loader, most)})
    with prepared.evaluation():
        for step, batch in enumerate(itertools.islice(loader, most)):
            told.begin_batch("eval", step)
            parts = prepared.split(batch)
            loss = prepared.measure(parts)
            if loss is not None:
                mean.update(loss, count_samples(parts[0]))
            samples.update(float(count_samples(parts[0])), 1)
            with LateLogs(partial(_read, loss, prepared)) as logs:
                told.end_batch("eval", step, logs)
    enter(EVALUATED)
    mean.reduce()
    samples.reduce()
    count = round(samples.sum())
    if not count:
        raise ValueError("the evaluation data gave no batch: it is empty")
    result: dict[str, Any] = {} if prepared.loss is None else {"loss": mean.value()}
    result |= {**prepared.metric_values(of_all=True), "samples": count}
    told.end("eval", result)
    return result


def _read(loss: Tensor | None, prepared: Prepared) -> dict[str, Any]:
    return {**({} if loss is None else {"loss": loss.item()}), **prepared.metric_values()}
