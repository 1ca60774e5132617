"""How long each batch takes to pre-process, run and post-process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from mezzo.errors import MezzoError

STAGES = ("preprocess", "inference", "postprocess")


@dataclass(frozen=True, kw_only=True, slots=True)
class Percentiles:
    """The 50th, 95th and 99th percentile of the batch time in milliseconds, interpolated."""

    p50_ms: float
    p95_ms: float
    p99_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """The statistics of a `StageTimer`; warm-up cycles count only in `cycles`."""

    cycles: int
    """Completed cycles, including warm-up."""

    warmup: int
    """Cycles that all fields below leave out."""

    total_s: float
    """Sum of the whole cycles."""

    preprocess_ms: float
    """Mean of a cycle, as the next two."""

    inference_ms: float
    postprocess_ms: float

    inference: Percentiles
    cycle: Percentiles

    samples_per_s: float | None
    """Samples per second; None if no time passed."""


@dataclass(frozen=True, slots=True)
class _Cycle:
    stages_s: tuple[float, ...]
    total_s: float
    samples: int


class StageTimer:
    """Times the three stages of every batch with a monotonic clock.

    A device works behind the program's back: copy its results to the host before the stamp that ends a stage.

    Args:
        warmup: Leading cycles to leave out, 0 or more.
        clock: Seconds since some moment; for tests.

    >>> timer = StageTimer()
    >>> with timer.cycle(samples=2):
    ...     images = [1, 2]
    ...     timer.stamp()
    ...     scores = [image * 3 for image in images]
    ...     timer.stamp()
    ...     best = max(scores)
    >>> timer.times().cycles
    1
    """

    def __init__(self, *, warmup: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        if warmup < 0:
            raise ValueError(f"warmup={warmup}: must be 0 or more")
        self._warmup = warmup
        self._clock = clock
        self._cycles: list[_Cycle] = []
        self._stamps_s: list[float] | None = None

    @contextmanager
    def cycle(self, samples: int = 1, *, begun: float | None = None) -> Iterator[None]:
        """Time one batch of `samples`: `stamp()` ends the first and the second stage, the block's end the third.

        A block that raises leaves no trace in the times.

        Args:
            samples: In the batch.
            begun: When the batch began, by `now()`, if that was before this call.
        """
        if self._stamps_s is not None:
            raise ValueError("a cycle is running already; end it before the next")
        if samples < 1:
            raise ValueError(f"samples={samples}: a cycle needs at least 1")
        stamps_s = self._stamps_s = [self._clock() if begun is None else begun]
        try:
            yield
            stamps_s.append(self._clock())
        finally:
            self._stamps_s = None
        self._cycles.append(_cycle_of(stamps_s, samples))

    def now(self) -> float:
        """Return the time of the clock."""
        return self._clock()

    def stamp(self) -> None:
        """End a stage of the running cycle and begin the next."""
        if self._stamps_s is None:
            raise ValueError("stamp() outside of a cycle; call it in `with timer.cycle():`")
        self._stamps_s.append(self._clock())

    def times(self) -> StageTimes:
        """Return the statistics of all cycles after warm-up; raise MezzoError if there are none."""
        cycles = self._cycles[self._warmup :]
        if not cycles:
            raise MezzoError(_too_few(len(self._cycles), self._warmup))
        stages_ms = [[cycle.stages_s[stage] * 1e3 for cycle in cycles] for stage in range(len(STAGES))]
        means_ms = [math.fsum(times_ms) / len(cycles) for times_ms in stages_ms]
        total_s = math.fsum(cycle.total_s for cycle in cycles)
        return StageTimes(
            cycles=len(self._cycles),
            warmup=self._warmup,
            total_s=total_s,
            preprocess_ms=means_ms[0],
            inference_ms=means_ms[1],
            postprocess_ms=means_ms[2],
            inference=percentiles(stages_ms[1]),
            cycle=percentiles([cycle.total_s * 1e3 for cycle in cycles]),
            samples_per_s=sum(cycle.samples for cycle in cycles) / total_s if total_s > 0 else None,
        )


def percentiles(times_ms: Sequence[float]) -> Percentiles:
    """Return three percentiles of at least one time.

    >>> percentiles([10.0, 30.0, 20.0])
    Percentiles(p50_ms=20.0, p95_ms=29.0, p99_ms=29.8)
    """
    ordered = sorted(times_ms)
    return Percentiles(**{f"p{share}_ms": _at(ordered, share) for share in (50, 95, 99)})


def _at(ordered: Sequence[float], percent: int) -> float:
    whole, part = divmod((len(ordered) - 1) * percent, 100)  # integers, so that rounding cannot exceed the last index
    low, high = ordered[whole], ordered[min(whole + 1, len(ordered) - 1)]
    return low + (high - low) * part / 100


def _cycle_of(stamps_s: Sequence[float], samples: int) -> _Cycle:
    inner = len(stamps_s) - 2
    if inner != len(STAGES) - 1:
        raise ValueError(f"a cycle had {inner} stamps; it needs 2: after pre-processing, and after inference")
    stages_s = tuple(end - start for start, end in pairwise(stamps_s))
    return _Cycle(stages_s, stamps_s[-1] - stamps_s[0], samples)


def _too_few(cycles: int, warmup: int) -> str:
    lower = f", or set warmup to {cycles - 1} or less" if cycles else ""
    return f"{cycles} batch(es) timed, none left after warmup={warmup}; time at least {warmup + 1}{lower}"
