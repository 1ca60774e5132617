"""The operator table that `GLOG_v=5` in the environment asks for, as in Paddle's documents.

It is printed once per process: of the first training step where mezzo runs the loop, otherwise of the first `auto_cast`
region. `mezzo.record` does the work, and is loaded if the table is asked for; this file decides when it runs, and keeps
its faults away from the training.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mezzo._torch.dynamo import DYNAMO, is_frame_of_compiled_call, load_dynamo
from mezzo._torch.script import tracing_state
from mezzo.files import say

if TYPE_CHECKING:
    from mezzo.record import OperatorStats

VARIABLE = "GLOG_v"
LEAST_LEVEL = 5

OF_REGION = (
    "GLOG_v=5: operators and dtypes in the forward pass of the first auto_cast region\n"
    "To record more, such as the backward pass: mezzo.amp.debugging.collect_operator_stats()"
)
OF_STEP = "GLOG_v=5: operators and dtypes of the first training step (forward pass, backward pass, optimizer)"

_STEP_DEPTH = -1
"""The depth of a training step; no region has it."""


def glog_asks_for_operators() -> bool:
    """Whether `GLOG_v` is 5 or more. A value that is not a number counts as unset."""
    level = os.environ.get(VARIABLE, "")
    return level.isdecimal() and int(level) >= LEAST_LEVEL


@dataclass(frozen=True, slots=True)
class _Recording:
    stats: OperatorStats
    installed: ExitStack
    heading: str
    depth: int
    """How many regions were open in its thread when it began."""
    thread: int


class _Paused(threading.local):
    depth = 0


class OperatorLog:
    """Decides which region or training step is recorded; nothing here raises, whatever the recorder does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paused = _Paused()
        self.reset()

    def reset(self) -> None:
        """Forget everything, the environment too; for tests."""
        self.is_pending = True
        """Whether a table may still be wanted: the only thing that a region looks at on entry."""
        self.recording: _Recording | None = None
        self._is_asked: bool | None = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, and in this thread, nothing is recorded: for regions of mezzo's own tools. Also a decorator."""
        self._paused.depth += 1
        try:
            yield
        finally:
            self._paused.depth -= 1

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """Record the step that runs inside, if it is the first and `GLOG_v` asks for it."""
        self.begin(_STEP_DEPTH, OF_STEP)
        try:
            yield
        except BaseException:
            self.end(_STEP_DEPTH, is_complete=False)
            raise
        self.end(_STEP_DEPTH, is_complete=True)

    def begin(self, depth: int, heading: str = OF_REGION) -> None:
        """Start a recording, unless none is wanted (any more) or it cannot start here.

        Args:
            depth: How many regions are open in this thread; `end` is called with the same number.
            heading: The line above the table.
        """
        with self._lock, _no_exceptions():
            if self._is_asked is None:
                self._is_asked = glog_asks_for_operators()
            if not self._is_asked:
                self.is_pending = False
            if not self.is_pending or self._paused.depth or _is_traced():
                return
            from mezzo.record import counts_operators

            self.is_pending = False
            if _is_first_process() and not counts_operators():  # the user's own statistics show the same operators
                self._start(depth, heading)

    def _start(self, depth: int, heading: str) -> None:
        from mezzo.record import OperatorStats, listening

        load_dynamo()  # the recorder tells Dynamo to stay out only if it is loaded
        stats, installed = OperatorStats(), ExitStack()
        installed.enter_context(listening(stats))
        self.recording = _Recording(stats, installed, heading, depth, threading.get_ident())

    def end(self, depth: int, *, is_complete: bool) -> None:
        """End the recording that began at this depth in this thread, and print its table.

        Nothing is printed where the region raised or ran no operator: the next one is recorded instead.

        Args:
            depth: As given to `begin`.
            is_complete: Whether the region ended without an exception.
        """
        recording = self.recording
        if recording is None or recording.depth != depth or recording.thread != threading.get_ident():
            return
        self.recording, stats = None, recording.stats
        with _no_exceptions():
            try:
                recording.installed.close()
            except RuntimeError:  # a mode was entered in the region and is still on
                from mezzo.record import abandon

                abandon(stats)
                self.is_pending = True
                raise
            if is_complete and stats.rows:
                say(f"{recording.heading}\n{stats.table()}", end="")
            else:
                self.is_pending = True


@contextmanager
def _no_exceptions() -> Iterator[None]:
    """Turn an exception into a warning: a table that cannot be printed must not end a training."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  whatever the recorder or the output raises
        with suppress(Exception):  # warnings may be errors
            warnings.warn(f"{VARIABLE}: no operator table: {error}", stacklevel=2)


def _is_traced() -> bool:
    """Whether this code is being captured or is part of compiled code: a recording would become part of the graph."""
    from mezzo.record import has_foreign_mode

    return (
        torch.compiler.is_compiling()
        or tracing_state() is not None
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
        or has_foreign_mode()
        or _is_called_by_compiled_code()
    )


def _is_called_by_compiled_code() -> bool:
    """Whether a compiled function is among the callers.

    The code of `auto_cast` breaks its graph. The rest of the function is compiled when the region has been entered, and
    Dynamo gives up a function that it meets under a dispatch mode. Inside of the break only the stack shows it.
    """
    frame = sys._getframe() if DYNAMO in sys.modules else None
    while frame is not None:
        if is_frame_of_compiled_call(frame):
            return True
        frame = frame.f_back
    return False


def _is_first_process() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized() and distributed.get_rank())


operator_log = OperatorLog()
"""The operator log of this process."""
