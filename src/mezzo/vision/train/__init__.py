"""Training: one engine for both tasks, every precision, one process or many."""

from mezzo.vision.train._options import OptionError, RunOptions
from mezzo.vision.train._plot import plot_curves, plot_run
from mezzo.vision.train._run import TrainResult, evaluate, train
from mezzo.vision.train._scalars import read_scalars

__all__ = [
    "train",
    "evaluate",
    "TrainResult",
    "RunOptions",
    "OptionError",
    "read_scalars",
    "plot_run",
    "plot_curves",
]
