"""Losses and times since the last log line: summed on the device, read once per line."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Window:
    """Means over the steps of a window."""

    values: dict[str, float]
    reader_cost_s: float
    batch_cost_s: float
    samples: float
    first_bad_step: int | None
    """The first step of the run whose loss was not finite."""

    @property
    def images_per_s(self) -> float:
        """Samples per second of this process."""
        return self.samples / self.batch_cost_s if self.batch_cost_s > 0 else 0.0


class StepMeter:
    """Sums losses and other values of steps, and the time that the steps take."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._first_bad = torch.full((), -1, dtype=torch.int64, device=device)
        self._restart()

    def _restart(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._steps, self._samples, self._reading = 0, 0, 0.0
        self._start = self._clock()

    @property
    def is_empty(self) -> bool:
        """Whether no step was added since the last reading."""
        return self._steps == 0

    def pause(self) -> None:
        """Stop the clock until `go_on`: an evaluation does not count as time of a step."""
        self._paused_at = self._clock()

    def go_on(self) -> None:
        """Restart the clock after `pause`."""
        self._start += self._clock() - self._paused_at

    def add(self, step: int, loss: Tensor, watched: Mapping[str, Tensor], samples: int, reading_s: float) -> None:
        """Add a step, without host synchronisation."""
        for name, value in {"loss": loss, **watched}.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value.float()
        is_first_bad = (self._first_bad < 0) & ~torch.isfinite(loss)
        self._first_bad = torch.where(is_first_bad, step, self._first_bad)
        self._steps, self._samples, self._reading = self._steps + 1, self._samples + samples, self._reading + reading_s

    def read(self) -> Window:
        """Return the window since the last reading; start the next. Waits for the device once."""
        names = list(self._sums)
        numbers = torch.stack(
            [*(self._sums[name].double() / self._steps for name in names), self._first_bad.double()]
        ).tolist()
        elapsed, bad = self._clock() - self._start, int(numbers[-1])
        window = Window(
            values=dict(zip(names, numbers[:-1], strict=True)),
            reader_cost_s=self._reading / self._steps,
            batch_cost_s=elapsed / self._steps,
            samples=self._samples / self._steps,
            first_bad_step=None if bad < 0 else bad,
        )
        self._restart()
        return window
