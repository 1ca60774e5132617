"""Side-by-side measurements, made in one run on one machine."""

from mezzo.bench._compare import Comparison, ModeResult, compare
from mezzo.bench._static import StaticBench, StaticResult, bench_static
from mezzo.bench._step import StepBench, StepResult, bench_step
from mezzo.bench._timer import Timing, time_calls

__all__ = [
    "compare",
    "Comparison",
    "ModeResult",
    "bench_step",
    "StepBench",
    "StepResult",
    "bench_static",
    "StaticBench",
    "StaticResult",
    "time_calls",
    "Timing",
]
