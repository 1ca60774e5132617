"""Who keeps the others waiting: every process notes how far it came, the first one says who is behind.

A collective waits for its slowest process, in silence. So a thread of each process writes its position into the store of
the process group every few seconds, and the first process compares them. The step itself only sets a number.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from mezzo.errors import RunError
from mezzo.files import say

BEAT_S = 2.0
"""How often a process notes its position."""
LINE_S = 60.0
"""How long nothing may move before a line says who is behind, and how often the line is repeated."""
BEGUN, FORWARD_DONE, EVALUATED, SAVING = range(4)
_PHASES = 4
_NAMES = (
    "step {}",
    "the backward pass of step {}",
    "the end of the evaluation after step {}",
    "the checkpoint of step {}",
)
_HINT = "look at what it does, or allow more time with --dist-timeout"


class Watch:
    """The position of this process among all; in the first process also a look at the others.

    Args:
        store: Of the process group.
        rank: Of this process.
        size: Number of processes.
        limit_s: How long a collective waits.
        ends_process: End the process at the limit: NCCL raises nothing where Python could catch it.
    """

    def __init__(self, store: Any, rank: int, size: int, limit_s: float, *, ends_process: bool = False) -> None:
        self.position = 0
        """Step and phase as one number: the same in all processes that are equally far."""
        self.limit_s = limit_s
        self._store, self._rank, self._size, self._ends_process = store, rank, size, ends_process
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mezzo-watch", daemon=True)
        self._seen: list[int] = []
        self._since, self._lines = time.monotonic(), 0

    def start(self) -> None:
        """Begin to note and to compare."""
        self._thread.start()
        atexit.register(self.stop)  # a thread that talks to a store must not meet the end of the interpreter

    def stop(self) -> None:
        """End the thread; may be called again."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5)
        atexit.unregister(self.stop)

    def who_is_behind(self) -> str | None:
        """Return who has not reached what others have, as words; None if all are equally far or nobody knows."""
        try:
            return describe_ranks_behind(self._positions())
        except RuntimeError:  # the store ended with its process
            return None

    def _run(self) -> None:
        noted = -1
        while True:
            try:
                if self.position != noted:
                    noted = self.position
                    self._store.set(_key(self._rank), str(noted))
                if self._rank == 0:
                    self._compare()
            except RuntimeError:  # the store ended with its process
                return
            if self._stop.wait(BEAT_S):
                return

    def _positions(self) -> list[int]:
        others = [rank for rank in range(self._size) if rank != self._rank]
        values = {rank: self._store.get(_key(rank)) if self._store.check([_key(rank)]) else b"0" for rank in others}
        return [self.position if rank == self._rank else int(values[rank]) for rank in range(self._size)]

    def _compare(self) -> None:
        positions, now = self._positions(), time.monotonic()
        if positions != self._seen:
            self._seen, self._since, self._lines = positions, now, 0
            return
        waited_s, behind = now - self._since, describe_ranks_behind(positions)
        if behind is None:
            return
        if waited_s >= LINE_S * (self._lines + 1):
            self._lines = int(waited_s // LINE_S)
            say(f"waiting for the other processes for {LINE_S * self._lines:g} s: {behind}", err=True)
        if waited_s >= self.limit_s and self._ends_process:
            say(f"waited {self.limit_s:g} s for the other processes: {behind}; {_HINT}", err=True)
            os._exit(RunError.exit_code)


def _key(rank: int) -> str:
    return f"mezzo/position/{rank}"


def describe_ranks_behind(positions: list[int]) -> str | None:
    """Return which ranks have not reached what others have; None if all are equally far."""
    furthest = max(positions)
    ranks = [rank for rank, position in enumerate(positions) if position < furthest]
    if not ranks:
        return None
    step, phase = divmod(furthest, _PHASES)
    place = _NAMES[phase].format(step) if step else "the first step"
    shown = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown} {'have' if len(ranks) > 1 else 'has'} not reached {place}"


_watch: Watch | None = None


def start_watch(store: Any, rank: int, size: int, limit_s: float, *, ends_process: bool = False) -> None:
    """Watch the processes of a group that was just made."""
    global _watch
    # Through a connection of its own: the group's may be busy waiting for a key.
    _watch = Watch(store.clone(), rank, size, limit_s, ends_process=ends_process)
    _watch.start()


def stop_watch() -> None:
    """Stop watching, before the group is left."""
    global _watch
    if _watch is not None:
        _watch.stop()
        _watch = None


def begin_step(step: int | None = None) -> None:
    """Note that this process begins a step, counted from 0; None: the next one."""
    if _watch is not None:
        number = _watch.position // _PHASES if step is None else step
        _watch.position = (number + 1) * _PHASES


def enter(phase: int) -> None:
    """Note that this process is in a later phase of its step."""
    if _watch is not None:
        _watch.position = _watch.position // _PHASES * _PHASES + phase


@contextmanager
def explained_waiting() -> Iterator[None]:
    """Turn a collective that waited too long into one line that names the processes that did not come."""
    try:
        yield
    except RuntimeError as error:
        if _watch is None or not is_timeout(error):
            raise
        behind = _watch.who_is_behind() or "no process is behind the others, so they wait for each other"
        raise RunError(f"waited {_watch.limit_s:g} s for the other processes: {behind}; {_HINT}") from error


def is_timeout(error: RuntimeError) -> bool:
    """Whether torch says that it waited too long; it has no class for it."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


@contextmanager
def explained_start(size: int, limit_s: float, *, speaks: bool) -> Iterator[None]:
    """Say after a while that processes are missing when the group is made; turn the end of patience into one line.

    Args:
        size: Number of processes.
        limit_s: How long the group waits.
        speaks: Whether this is the first process.
    """
    done = threading.Event()

    def count() -> None:
        waited_s = LINE_S
        while not done.wait(LINE_S):
            say(f"waiting for the other processes for {waited_s:g} s: not all {size} have started", err=True)
            waited_s += LINE_S

    if speaks:
        threading.Thread(target=count, name="mezzo-start", daemon=True).start()
    try:
        yield
    except dist.DistError as error:
        if not is_timeout(error):
            raise
        raise RunError(
            f"not all {size} processes have started within {limit_s:g} s; start the missing ones, or allow more time with "
            "--dist-timeout"
        ) from error
    finally:
        done.set()
