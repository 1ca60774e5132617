"""Ends a run early: after a signal, or when its time is over."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Says whether a run has to end, and why."""

    def __init__(self, limit: float | None) -> None:
        self.deadline = None if limit is None else time.monotonic() + limit
        self.limit = limit
        self.signal: int | None = None

    def __call__(self) -> str:
        """Return the reason; empty if the run can go on."""
        if self.signal is not None:
            return f"interrupted by {signal.Signals(self.signal).name}"
        if self.deadline is not None and time.monotonic() > self.deadline:
            return f"the run's {self.limit:g} s are over"
        return ""

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Note Ctrl-C, SIGTERM and SIGHUP instead of ending the process."""

        def note(number: int, frame: FrameType | None) -> None:
            self.signal = number

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
