"""Side-by-side measurements, made in one run on one machine."""

from mezzo.bench._compare import Comparison, ModeResult, compare
from mezzo.bench._timer import Timing, time_calls

__all__ = ["compare", "Comparison", "ModeResult", "time_calls", "Timing"]
