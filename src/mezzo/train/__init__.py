"""Training: one engine for both tasks, every precision, one process or many."""

from mezzo.devices import DeviceError
from mezzo.train._engine import NonFiniteLoss
from mezzo.train._options import OptionError, RunOptions
from mezzo.train._plot import plot_curves, plot_run
from mezzo.train._precision import make_precision
from mezzo.train._run import TrainResult, evaluate, train
from mezzo.train._scalars import read_scalars
from mezzo.train.model import Model

__all__ = [
    "Model",
    "train",
    "evaluate",
    "TrainResult",
    "RunOptions",
    "OptionError",
    "make_precision",
    "read_scalars",
    "plot_run",
    "plot_curves",
    "DeviceError",
    "NonFiniteLoss",
]
