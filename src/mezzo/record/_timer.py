"""The one timer: calls on a device, each waited for, warm-up calls left out."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from mezzo._arguments import check_at_least

UNSTEADY = 0.25
"""Spread over median from which times are called unreliable."""
_UNRELIABLE = "something else keeps this machine busy, so the times and the speed-up are not reliable."


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of each timed call, in order; the first ones of a run, which pay for set-up, are not among them."""

    times_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The median: one call that something else disturbed does not move it."""
        return statistics.median(self.times_s)

    @property
    def spread_s(self) -> float:
        """The distance between the quartiles; 0 for a single call."""
        if len(self.times_s) < 2:
            return 0.0
        lower, _, upper = statistics.quantiles(self.times_s, n=4)
        return upper - lower

    @property
    def is_unsteady(self) -> bool:
        """Whether the calls differ so much that something else must have disturbed them."""
        return self.spread_s > UNSTEADY * self.median_s


def unsteady_note(timings: Mapping[str, Timing]) -> str:
    """Return what a reader must know of times that are not steady, by what was timed; nothing where all are."""
    unsteady = [name for name, timing in timings.items() if timing.is_unsteady]
    if not unsteady:
        return ""
    return f"The step times of {', '.join(unsteady)} vary by more than {UNSTEADY:.0%} (quartiles): {_UNRELIABLE}"


def drift_note(name: str, first: Timing, again: Timing) -> str:
    """Return what a reader must know where the same calls took another time later; nothing where they did not."""
    low, high = sorted((first.median_s, again.median_s))
    if high <= (1 + UNSTEADY) * low:
        return ""
    return f"The step time of {name} was {high / low:.1f}x apart at the start and at the end: {_UNRELIABLE}"


def synchronize(device: torch.device) -> None:
    """Wait for the work queued on `device`; a CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_memory(device: torch.device) -> None:
    """Give back what finished measurements held, so that it does not count for the next."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def time_calls(
    call: Callable[[], object],
    *,
    calls: int,
    warmup_calls: int,
    device: torch.device,
    after_call: Callable[[], object] | None = None,
) -> Timing:
    """Return the time of each of `calls` calls, made after `warmup_calls` more.

    Args:
        call: What is timed; the device's queue is empty before it, and waited for after it.
        calls: At least 1.
        warmup_calls: May be 0.
        device: Where `call` queues its work.
        after_call: Run untimed after every call, warm-up ones too (a progress bar, say).
    """
    check_at_least("calls", calls)
    times_s = []
    for index in range(warmup_calls + calls):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        elapsed_s = time.perf_counter() - start
        if index >= warmup_calls:
            times_s.append(elapsed_s)
        if after_call is not None:
            after_call()
    return Timing(tuple(times_s))


def time_on_device(call: Callable[[], object], *, calls: int, warmup_calls: int, device: torch.device) -> Timing:
    """Return the time that each call's work takes on the device, without the host's part; on a CPU both are one.

    Args:
        call: What is timed.
        calls: At least 1.
        warmup_calls: May be 0.
        device: Where `call` queues its work.
    """
    if device.type != "cuda":
        return time_calls(call, calls=calls, warmup_calls=warmup_calls, device=device)
    pairs = []
    for _ in range(warmup_calls + calls):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        pairs.append((start, end))
    synchronize(device)
    return Timing(tuple(start.elapsed_time(end) / 1e3 for start, end in pairs[warmup_calls:]))
