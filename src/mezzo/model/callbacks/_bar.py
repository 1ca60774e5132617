"""Progress of a run on the terminal: lines, or a bar."""

from __future__ import annotations

import time
from numbers import Real
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mezzo._arguments import check_at_least
from mezzo.files import say
from mezzo.model.callbacks._callback import Callback, Logs


def format_logs(logs: Logs) -> str:
    """Return numbers as a line.

    >>> format_logs({"loss": 0.25, "acc": 0.5, "step": 3})
    'loss: 0.2500 - acc: 0.5000'
    """
    return " - ".join(f"{name}: {value:.4f}" for name, value in logs.items() if is_shown(name, value))


def is_shown(name: str, value: Any) -> bool:
    """Return whether an entry of the logs is a result, not a count of samples or steps."""
    return isinstance(value, Real) and name not in ("step", "batch_size", "samples")


class ProgBarLogger(Callback):
    """Shows loss and metrics during training.

    Args:
        log_freq: Number of batches between two updates.
        verbose: 0: silent; 1: a bar, on a terminal; 2: a line every `log_freq` batches.
    """

    def __init__(self, log_freq: int = 10, verbose: int = 2) -> None:
        check_at_least("log_freq", log_freq)
        if verbose not in (0, 1, 2):
            raise ValueError(f"verbose={verbose!r}: must be 0 (nothing), 1 (a bar) or 2 (lines)")
        self._every, self._verbose = log_freq, verbose
        self._console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
        self._bar: Progress | None = None
        self._is_training = False

    @property
    def _is_on(self) -> bool:
        return self._verbose > 0 and self.model.world.is_first

    def on_train_begin(self, logs: Logs) -> None:
        """Record that training has started."""
        self._is_training = True

    def on_train_end(self, logs: Logs) -> None:
        """Record that training has ended."""
        self._is_training = False

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        """Print the number of the epoch."""
        if self._is_on:
            say(f"Epoch {epoch + 1}/{self.params['epochs']}")
        self._start_bar("training", self.params["steps"])

    def on_train_batch_end(self, step: int, logs: Logs) -> None:
        """Show loss and metrics every `log_freq` batches."""
        self._advance(step, self.params["steps"], logs)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Print the results of the epoch."""
        self._stop_bar()
        if self._is_on:
            took_ms = (time.perf_counter() - self._start) / max(1, logs["step"]) * 1e3
            say(f"{logs['step']} steps - {format_logs(logs)} - {took_ms:.0f} ms/step")

    def on_eval_begin(self, logs: Logs) -> None:
        """Announce the evaluation."""
        if self._is_on and not self._is_training:
            say("Evaluation")
        self._start_bar("evaluating", logs.get("steps"))

    def on_eval_batch_end(self, step: int, logs: Logs) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.advance(self._task)

    def on_eval_end(self, logs: Logs) -> None:
        """Print the result."""
        self._stop_bar()
        if self._is_on:
            say(" - ".join(filter(None, [f"Eval samples: {logs['samples']}", format_logs(logs)])))

    def on_predict_begin(self, logs: Logs) -> None:
        """Start a bar."""
        self._start_bar("predicting", logs.get("steps"))

    def on_predict_batch_end(self, step: int, logs: Logs) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.advance(self._task)

    def on_predict_end(self, logs: Logs) -> None:
        """Print the number of samples."""
        self._stop_bar()
        if self._is_on:
            say(f"Predicted samples: {logs['samples']}")

    def close(self) -> None:
        """Remove the bar from the terminal."""
        self._stop_bar()
        self._is_training = False

    def _start_bar(self, what: str, total: int | None) -> None:
        self._start = time.perf_counter()
        self._stop_bar()
        if self._is_on and self._verbose == 1 and self._console.is_terminal:
            columns = (
                TextColumn(what),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}", markup=False),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("", total=total)
            self._bar.start()

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _advance(self, step: int, steps: int | None, logs: Logs) -> None:
        is_due = self._is_on and (step + 1) % self._every == 0
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=format_logs(logs) if is_due else None)
        elif is_due and (self._verbose == 2 or not self._console.is_terminal):
            of = f"/{steps}" if steps is not None else ""
            say(f"step {step + 1}{of} - {format_logs(logs)}")
