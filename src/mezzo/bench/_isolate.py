"""Calls of functions in processes of their own, with a limit on the time until the first report."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

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
    context = multiprocessing.get_context("spawn")  # a fork would share CUDA and the state of the compilers
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(sender, function, args))
    child.start()
    sender.close()  # otherwise a child that dies leaves an open pipe
    deadline: float | None = time.monotonic() + START_S
    try:
        while receiver.poll(None if deadline is None else max(0.0, deadline - time.monotonic())):
            kind, value = receiver.recv()
            if kind == "result":
                result: T = value
                child.join(END_S)
                return result
            if kind == "failed":
                child.join(END_S)  # it still writes its traceback
                raise RunError(value)
            if kind == "started":
                deadline = None if budget_s is None else time.monotonic() + budget_s
            else:
                deadline = None
                if progress is not None:
                    progress(*value)
    except EOFError as error:
        child.join(END_S)
        raise RunError(f"the process ended with exit code {child.exitcode}") from error
    finally:
        receiver.close()
        _kill(child)
    raise OverBudget(f"over the budget of {START_S if budget_s is None else budget_s:g} s")


def _work(sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Run in the child: call the function, and send what it reports and returns."""
    if hasattr(os, "setsid"):
        os.setsid()  # compilers start processes of their own; one signal ends the whole group
    os.dup2(2, 1)  # stdout belongs to the table or the JSON of the parent
    sender.send(("started", None))
    try:
        result = function(*args, progress=lambda *report: sender.send(("progress", report)))
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
