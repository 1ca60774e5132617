"""Why a run has to end before its last step."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Why a run has to end: a signal, or its time is over."""

    def __init__(self, limit: float | None) -> None:
        self.deadline = None if limit is None else time.monotonic() + limit
        self.limit = limit
        self.signal: int | None = None

    def __call__(self) -> str:
        """Return the reason, empty if there is none."""
        if self.signal is not None:
            return f"interrupted by {signal.Signals(self.signal).name}"
        if self.deadline is not None and time.monotonic() > self.deadline:
            return f"the run's {self.limit:g} s are over"
        return ""

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Take note of Ctrl-C, SIGTERM and a closed terminal instead of dying of them."""

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
