"""Outcomes of steps: the host reads them late, in order, without waiting for the device."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.errors import RunError
from mezzo.optim import Verdict, describe_parameter

_Stepped = Sequence[tuple["weakref.ref[Optimizer]", Verdict]]


class LossScaleFloorError(RunError, RuntimeError):
    """Gradients overflowed in many steps in a row with the loss scale at its minimum."""


class OutcomeHandle:
    """Removes an outcome hook."""

    def __init__(self, hooks: dict[int, Callable[[bool], object]], key: int) -> None:
        self._hooks = hooks
        self._key = key

    def remove(self) -> None:
        """Remove the hook; a second call does nothing."""
        self._hooks.pop(self._key, None)


@dataclass(slots=True)
class _Outcome:
    """The outcome of one update, being copied to the host."""

    numbers: Tensor
    """float32 on the host: bad, scale, skips at the floor, first bad parameter per optimizer."""
    arrived: Any
    """CUDA event of the copy; None if the numbers are on the host."""
    optimizers: list[weakref.ref[Optimizer]]

    def has_arrived(self) -> bool:
        return self.arrived is None or bool(self.arrived.query())


class OutcomeLog:
    """Outcomes that are being copied, the totals of those that arrived, and the hooks."""

    def __init__(self) -> None:
        self.skipped = 0
        self.last_scale: float | None = None
        """The scale after the last update that the host knows of."""
        self._pending: deque[_Outcome] = deque()
        self._hooks: dict[int, Callable[[bool], object]] = {}
        self._next_key = 0
        self._floor: tuple[int, float, str] | None = None
        self._captured: tuple[Tensor, _Stepped] | None = None

    def add_hook(self, hook: Callable[[bool], object]) -> OutcomeHandle:
        """Call `hook(taken)` for each outcome."""
        self._next_key += 1
        self._hooks[self._next_key] = hook
        return OutcomeHandle(self._hooks, self._next_key)

    def restart(self, skipped: int) -> None:
        """Drop outcomes that are being copied: another state was loaded."""
        self._pending.clear()
        self._floor = None
        self.last_scale = None
        self.skipped = skipped

    def record(self, report: Tensor, stepped: _Stepped) -> None:
        """Start to copy the outcome of an update to the host.

        During a CUDA graph capture, note where it will be.

        Args:
            report: From `mezzo.optim.rescale`.
            stepped: The optimizers and their verdicts.
        """
        device = report.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._captured = report, stepped
            return
        numbers = report
        if len(stepped) > 1:  # float32: counts and indices are far below 2**24
            first_bad = [verdict.first_bad.to(device, torch.float32, non_blocking=True) for _, verdict in stepped]
            numbers = torch.cat([report[:3], torch.stack(first_bad)])
        arrived = None
        if device.type == "cuda":
            on_host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            numbers = on_host.copy_(numbers, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(device))
        elif device.type != "cpu":
            numbers = numbers.cpu()
        self._pending.append(_Outcome(numbers, arrived, [optimizer for optimizer, _ in stepped]))

    def take_captured(self) -> tuple[Tensor, _Stepped] | None:
        """Return where the last captured update leaves its outcome.

        Arguments of `record` after each replay.
        """
        captured, self._captured = self._captured, None
        return captured

    def poll(self) -> None:
        """Process outcomes that have arrived, in order.

        Not during a CUDA graph capture, which forbids event queries.
        """
        if self._pending and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return
        while self._pending and self._pending[0].has_arrived():
            self._take(self._pending.popleft())

    def wait(self) -> None:
        """Wait for all outcomes and process them."""
        while self._pending:
            outcome = self._pending.popleft()
            if outcome.arrived is not None:
                outcome.arrived.synchronize()
            self._take(outcome)

    def process(self, limit: int | None) -> None:
        """Process outcomes that have arrived.

        Raise LossScaleFloorError at `limit` bad steps with the smallest scale.
        """
        self.poll()
        floor, self._floor = self._floor, None
        if limit is None or floor is None or floor[0] < limit:
            return
        count, scale, culprit = floor
        raise LossScaleFloorError(
            f"{count} steps in a row had non-finite gradients with the loss scale at its floor ({scale:g}); first in "
            f"{culprit}. Smaller scales cannot help: look for inf or NaN in the data, the loss and that layer, lower "
            "the learning rate, use bfloat16, or set min_loss_scaling or max_skips_at_floor"
        )

    def _take(self, outcome: _Outcome) -> None:
        bad, scale, floor_skips, *first_bad = outcome.numbers.tolist()
        self.skipped += int(bad)
        self.last_scale = scale
        self._floor = None
        if floor_skips:
            self._floor = int(floor_skips), scale, _culprit(outcome.optimizers, first_bad)
        for hook in list(self._hooks.values()):
            hook(not bad)


def _culprit(optimizers: Sequence[weakref.ref[Optimizer]], first_bad: Sequence[float]) -> str:
    for reference, index in zip(optimizers, first_bad, strict=True):
        optimizer = reference()
        if index >= 0 and optimizer is not None:
            return describe_parameter(optimizer, int(index))
    return "an unknown parameter"
