"""Side-by-side measurements, made in one run on one machine."""

from mezzo._timer import Timing, time_calls
from mezzo.bench._bisect import bisect_model
from mezzo.bench._compare import Comparison, ModeResult, compare
from mezzo.bench._doctor import examine_model
from mezzo.bench._static import StaticBench, StaticResult, bench_static
from mezzo.bench._step import StepBench, StepResult, bench_step

__all__ = [
    "bisect_model",
    "examine_model",
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
