"""Watchdog of distributed runs: the first process reports which processes keep the others waiting.

A collective waits silently for the slowest process. Therefore a thread in each process writes its
position into the store of the process group every few seconds, and the first process compares the
positions. A training step itself only sets a number.
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
"""Seconds between two writes of a process's position."""
LINE_S = 60.0
"""Seconds without progress before a line reports the ranks behind, and between two lines."""
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
    """Publishes the position of this process; the first process also compares all positions.

    Args:
        store: Store of the process group.
        rank: Rank of this process.
        size: Number of processes.
        limit_s: Seconds that a collective waits.
        ends_process: End the process at the limit, because Python cannot catch a timeout of NCCL.
    """

    def __init__(self, store: Any, rank: int, size: int, limit_s: float, *, ends_process: bool = False) -> None:
        self.position = 0
        """Step and phase as one number; equal in all processes that have reached the same point."""
        self.limit_s = limit_s
        self._store, self._rank, self._size, self._ends_process = store, rank, size, ends_process
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mezzo-watch", daemon=True)
        self._seen: list[int] = []
        self._since, self._lines = time.monotonic(), 0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()
        atexit.register(self.stop)  # the thread uses the store and must end before the interpreter does

    def stop(self) -> None:
        """End the thread; may be called again."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5)
        atexit.unregister(self.stop)

    def who_is_behind(self) -> str | None:
        """Describe the ranks that are behind; None if no rank is behind or the store is gone."""
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
    """Describe the ranks that are behind the furthest one; None if all positions are equal."""
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
    """Start to watch the processes of a new process group."""
    global _watch
    # A separate connection: the connection of the group may be blocked while it waits for a key.
    _watch = Watch(store.clone(), rank, size, limit_s, ends_process=ends_process)
    _watch.start()


def stop_watch() -> None:
    """Stop watching; call it before leaving the process group."""
    global _watch
    if _watch is not None:
        _watch.stop()
        _watch = None


def begin_step(step: int | None = None) -> None:
    """Record that this process begins a step, counted from 0; None: the next step."""
    if _watch is not None:
        number = _watch.position // _PHASES if step is None else step
        _watch.position = (number + 1) * _PHASES


def enter(phase: int) -> None:
    """Record that this process has entered a later phase of its step."""
    if _watch is not None:
        _watch.position = _watch.position // _PHASES * _PHASES + phase


@contextmanager
def explained_waiting() -> Iterator[None]:
    """Turn the timeout of a collective into a RunError that names the missing ranks."""
    try:
        yield
    except RuntimeError as error:
        if _watch is None or not is_timeout(error):
            raise
        behind = _watch.who_is_behind() or "no process is behind the others, so they wait for each other"
        raise RunError(f"waited {_watch.limit_s:g} s for the other processes: {behind}; {_HINT}") from error


def is_timeout(error: RuntimeError) -> bool:
    """Return whether an error is a timeout, from its text: torch has no class for timeouts."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


@contextmanager
def explained_start(size: int, limit_s: float, *, speaks: bool) -> Iterator[None]:
    """While the group is created, print that processes are missing; turn a timeout into a RunError.

    Args:
        size: Number of processes.
        limit_s: Seconds that the group waits.
        speaks: Whether this process prints; True only in the first process.
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
