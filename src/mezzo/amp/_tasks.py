"""Tasks of an asyncio loop share a thread; each task has its own regions.

A region that is open while its task waits must not decide for other tasks. So the open regions of a task are stored in
its context (`contextvars`), and the loop's callbacks run with the regions of their context. A task that is created
inside a region inherits it, like every context variable, for its whole life.

This does not work for loops that do not run their callbacks through `asyncio.Handle` (uvloop, trio), nor for eager tasks
(`asyncio.eager_task_factory`, Python 3.12), which begin inside the callback of another task. There, and with generators
that are suspended inside a region, a region may be left while a later one is open: that is an error.
"""

from __future__ import annotations

import functools
import sys
import warnings
from asyncio import events
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from mezzo.amp._state import AutocastState, read_state, thread_state, write_state


class _Regions(NamedTuple):
    """The open regions of a task, its own and those that it inherited."""

    state: AutocastState
    open: tuple[tuple[object, AutocastState], ...]


_of_task: ContextVar[_Regions | None] = ContextVar("mezzo.amp.regions", default=None)

_LEFT_LATE = (
    "auto_cast: a region was left while one that was entered later is still open; a generator or a coroutine was suspended "
    "inside it and ran on under the policy of the later one: leave the region before `yield`, and before `await` in loops "
    "other than asyncio's"
)
_LEFT_ELSEWHERE = "auto_cast: a region was left in another thread or task than the one that entered it"


running_loop: Callable[[], Any] = events._get_running_loop
"""Returns the asyncio loop that runs in this thread, or None. Every region calls it, so it is the C function itself."""


def keep_for_task() -> None:
    """Note the open regions in the context of the running task."""
    _of_task.set(_Regions(read_state(), tuple(thread_state.regions)) if thread_state.regions else None)


def _keep_state() -> None:
    _of_task.set(_Regions(read_state(), tuple(thread_state.regions)))


def follow_tasks() -> None:
    """Make callbacks of asyncio loops run with the regions of their context; called before a region is entered."""
    _wrap_handles()
    if (
        not thread_state.is_in_handle and thread_state.unsettled is None
    ):  # a callback that began before the loop was followed
        thread_state.unsettled = len(thread_state.regions)


@functools.cache
def _wrap_handles() -> None:
    # asyncio has no hook for a change of task, but every callback runs through this method. Once per process.
    run: Callable[[Any], None] = events.Handle._run

    @functools.wraps(run)
    def run_with_own_regions(handle: Any) -> None:
        if thread_state.unsettled is not None:
            depth, thread_state.unsettled = thread_state.unsettled, None
            _suspend(depth)
        regions: _Regions | None = handle._context.get(_of_task)
        was_in_handle, thread_state.is_in_handle = thread_state.is_in_handle, True
        outer, depth = thread_state.regions, len(thread_state.regions)
        around = None
        if regions is not None:
            around, thread_state.regions, depth = read_state(), list(regions.open), 0
            for _ in thread_state.regions:
                torch.autocast_increment_nesting()
            _activate(regions.state)
        try:
            run(handle)
        finally:
            thread_state.is_in_handle = was_in_handle
            # The task waits inside a region, or inside a `torch.autocast` that it entered after one.
            if len(thread_state.regions) > depth or (around is not None and around != read_state()):
                handle._context.run(_keep_state)
            if around is None:
                _suspend(depth)
            else:
                _count_out(len(thread_state.regions))
                thread_state.regions = outer
                _activate(around)

    events.Handle._run = run_with_own_regions  # type: ignore[method-assign, assignment]


def _suspend(depth: int) -> None:
    """Close the regions above a depth, because their task waits."""
    if len(thread_state.regions) > depth:
        around = thread_state.regions[depth][1]
        _count_out(len(thread_state.regions) - depth)
        del thread_state.regions[depth:]
        _activate(around)


def _count_out(regions: int) -> None:
    """Decrease torch's nesting: a waiting region must not keep cached casts alive."""
    for _ in range(regions):
        torch.autocast_decrement_nesting()


def _activate(state: AutocastState) -> None:
    torch.clear_autocast_cache()  # another task may use another dtype, or update the weights that were cast
    write_state(state)


def leave_out_of_order(region: object, *, is_failing: bool) -> None:
    """Leave a region that is not the innermost: later ones stay active, and then restore what was around this one.

    Raises:
        RuntimeError: Always, unless an exception is being raised already, as when a generator is closed.
    """
    regions = thread_state.regions
    index = next((i for i in reversed(range(len(regions))) if regions[i][0] is region), None)
    if index is not None:
        _, around = regions.pop(index)
        regions[index] = (regions[index][0], around)
        torch.autocast_decrement_nesting()
        if running_loop() is not None:
            keep_for_task()
    if not is_failing:
        raise RuntimeError(_LEFT_ELSEWHERE if index is None else _LEFT_LATE)
    if index is None and not sys.is_finalizing():
        warnings.warn(_LEFT_ELSEWHERE, UserWarning, stacklevel=3)
