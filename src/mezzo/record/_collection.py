"""Operator statistics of what runs in a block, or between two calls."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from mezzo.files import say
from mezzo.record._kernel_runs import KernelListener
from mezzo.record._kernel_times import KernelTimes
from mezzo.record._leaks import LeakTracker
from mezzo.record._listening import listening, start_listening, stop_listening
from mezzo.record._operator_stats import OperatorStats


class _Active(threading.local):
    """What `enable_operator_stats_collection` started in a thread."""

    enabled: OperatorStats | None = None


_active = _Active()


@contextmanager
def collect_operator_stats(
    print_table: bool = True, *, include_views: bool = False, kernels: bool = False, leaks: bool = False
) -> Iterator[OperatorStats]:
    """Record the kernels that run inside: which operator, in which dtype, where, and why; print the table at the end.

    It counts what the dispatcher really runs, including casts (`_to_copy`), in the forward, the backward and the
    optimizer step. The dtype of a call is that of its first floating input (in a list: its first floating element),
    otherwise of its output. It records the calling thread and the autograd threads of its backward. Recordings nest, and
    each sees everything. After an exception nothing is printed, nothing stays installed, and the counts can be read.

    Limits: a recorded operator takes 10 to 50 microseconds more host time. Dynamo cannot compile under a dispatch mode,
    so code under `torch.compile` runs and is counted as eager code, in all threads; compiled code is used again
    afterwards (wrap the model before the recording starts; torch warns about an `OptimizedModule` with global hooks).
    Kernels launched without the dispatcher (a Triton kernel that is not a custom operator) are not recorded.
    `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` do not use their fused inference path while a function mode
    is on. Everything outside a backward and an optimizer step counts as `forward`.

    Args:
        print_table: Print `OperatorStats.table()` when the block ends without an exception.
        include_views: Also count operators that compute nothing: views, and allocations such as `empty`.
        kernels: Also time the kernels of each operator (`OperatorStats.kernels`, `tensor_core_share`). On a GPU this uses
            torch's profiler, which can run only once at a time. `module_table` shows the times.
        leaks: Also find operators that return float32 from half inputs and so push later operators into float32
            (`OperatorStats.leaks`).
    """
    stats = OperatorStats(include_views=include_views)
    times, tracker = KernelTimes() if kernels else None, LeakTracker() if leaks else None
    listeners: list[KernelListener] = [listener for listener in (stats, times, tracker) if listener is not None]
    with nullcontext() if times is None else times.profiled(), listening(*listeners):
        yield stats
    if times is not None:
        stats.kernels = times.rows
    if tracker is not None:
        stats.leaks = tracker.leaks()
    if print_table:
        say(stats.table(), end="")


def enable_operator_stats_collection() -> None:
    """Start recording in this thread, from zero; `disable_operator_stats_collection` ends it and prints the table."""
    if _active.enabled is not None:
        stop_listening(_active.enabled)
    _active.enabled = OperatorStats()
    start_listening(_active.enabled)


def disable_operator_stats_collection() -> None:
    """Stop what `enable_operator_stats_collection` started and print its table; silent if nothing was started."""
    stats = _active.enabled
    if stats is None:
        return
    stop_listening(stats)
    _active.enabled = None
    say(stats.table(), end="")
