"""Calls of functions in processes of their own, with a limit on the time until the first report."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from mezzo.errors import RunError, one_line

T = TypeVar("T")
START_S = 300.0
"""Longest start of a process: it imports torch, and many may start at the same time."""
END_S = 30.0
"""Longest end of a process that has sent its result."""


class OverBudget(RunError):
    """A process was killed because its first step took longer than the budget."""


def call_isolated(
    function: Callable[..., T],
    *args: Any,
    budget_s: float | None = None,
    progress: Callable[..., object] | None = None,
) -> T:
    """Return `function(*args, progress=...)` of a fresh process, which is killed afterwards with all that it started.

    Args:
        function: A function of a module. It may call the `progress` that it gets.
        args: Its arguments; they and the result must be picklable.
        budget_s: Longest time until the first call of `progress`, or until the result. The start of the process does
            not count. None: no limit.
        progress: Is called with what the process reports.

    Raises:
        OverBudget: The budget is used up.
        RunError: The function raised, or the process ended. The traceback is on stderr.
    """
    with IsolatedCall(function, *args, budget_s=budget_s) as call:
        return call.result(progress)


class IsolatedCall(Generic[T]):
    """A call in a process of its own; the arguments are those of `call_isolated`. Leaving the context kills it.

    Args:
        function: A function of a module.
        args: Its arguments.
        budget_s: Longest time until the first report.
        is_held: The function waits in its first call of `progress` until `result` is called.
    """

    def __init__(
        self, function: Callable[..., T], *args: Any, budget_s: float | None = None, is_held: bool = False
    ) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would share CUDA and the state of the compilers
        self._receiver, sender = context.Pipe(duplex=False)
        gate, self._release = context.Pipe(duplex=False)
        self._child = context.Process(target=_work, args=(sender, gate if is_held else None, function, args))
        self._child.start()
        sender.close()  # otherwise a child that dies leaves an open pipe
        gate.close()
        self._budget_s, self._is_held = budget_s, is_held
        self._deadline: float | None = time.monotonic() + START_S
        self._first_report: tuple[Any, ...] | None = None

    def __enter__(self) -> IsolatedCall[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Kill the process with all that it started, if it still runs."""
        self._receiver.close()
        self._release.close()
        _kill(self._child)

    def wait_for_report(self) -> None:
        """Wait until the function has called `progress`, where a held one stays.

        Raises:
            OverBudget: The budget is used up.
            RunError: The function raised, returned without a report, or the process ended.
        """
        kind, value = self._receive()
        while kind == "started":
            kind, value = self._receive()
        if kind != "progress":
            raise RunError("the function returned without a report")
        self._first_report = value

    def result(self, progress: Callable[..., object] | None = None) -> T:
        """Let a held function go on; return its result. Raises what `call_isolated` raises."""
        report = progress or (lambda *_: None)
        if self._first_report is not None:
            report(*self._first_report)
        if self._is_held:
            self._release.send(None)
        while True:
            kind, value = self._receive()
            if kind == "result":
                result: T = value
                self._child.join(END_S)
                return result
            if kind == "progress":
                report(*value)

    def _receive(self) -> tuple[str, Any]:
        """Return the next message of the process, and set the deadline of the one after it."""
        wait_s = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        if not self._receiver.poll(wait_s):
            raise OverBudget(f"over the budget of {START_S if self._budget_s is None else self._budget_s:g} s")
        try:
            kind, value = self._receiver.recv()
        except EOFError as error:
            self._child.join(END_S)
            raise RunError(f"the process ended with exit code {self._child.exitcode}") from error
        if kind == "failed":
            self._child.join(END_S)  # it still writes its traceback
            raise RunError(value)
        # The process sends when it started: this may be read much later, after other processes.
        is_limited = kind == "started" and self._budget_s is not None
        self._deadline = value + self._budget_s if is_limited else None
        return kind, value


def _work(sender: Connection, gate: Connection | None, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Run in the child: call the function, and send what it reports and returns.

    With a gate, the first report waits for a message.
    """
    if hasattr(os, "setsid"):
        os.setsid()  # compilers start processes of their own; one signal ends the whole group
    os.dup2(2, 1)  # stdout belongs to the table or the JSON of the parent
    sender.send(("started", time.monotonic()))

    def report(*values: Any) -> None:
        nonlocal gate
        sender.send(("progress", values))
        if gate is not None:
            gate.recv()
            gate = None

    try:
        result = function(*args, progress=report)
    except BaseException as error:
        sender.send(("failed", one_line(f"{type(error).__name__}: {error}")[:300]))
        raise
    sender.send(("result", result))


def _kill(child: BaseProcess) -> None:
    """Kill a process and its group, if it still runs."""
    if child.is_alive():
        assert child.pid is not None
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except (AttributeError, ProcessLookupError):  # no groups on this system, or not yet a group of its own
            child.kill()
    child.join()
