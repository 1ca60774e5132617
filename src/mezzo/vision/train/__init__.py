"""Training: one engine for both tasks, every precision, one process or many."""

from mezzo.errors import OptionError
from mezzo.vision.options import RunOptions
from mezzo.vision.train._ema import Ema
from mezzo.vision.train._plot import plot_curves, plot_run
from mezzo.vision.train._recipes import make_recipe, with_usual_data
from mezzo.vision.train._run import TrainResult, evaluate, train
from mezzo.vision.train._scalars import ScalarLog, ScalarLogError, read_scalars

__all__ = [
    "train",
    "evaluate",
    "TrainResult",
    "RunOptions",
    "make_recipe",
    "with_usual_data",
    "OptionError",
    "read_scalars",
    "ScalarLog",
    "ScalarLogError",
    "Ema",
    "plot_run",
    "plot_curves",
]
