"""Training: one engine for both tasks, every precision, one process or many."""

from mezzo.errors import OptionError
from mezzo.vision.options import RunOptions
from mezzo.vision.train._checkpoints import RunProgress as RunProgress
from mezzo.vision.train._checkpoints import put_aside as put_aside
from mezzo.vision.train._checkpoints import save_checkpoint as save_checkpoint
from mezzo.vision.train._ema import Ema
from mezzo.vision.train._plot import plot_curves, plot_run
from mezzo.vision.train._recipes import make_recipe, with_usual_data
from mezzo.vision.train._resume import find_checkpoint as find_checkpoint
from mezzo.vision.train._resume import resume as resume
from mezzo.vision.train._run import TrainResult, evaluate, train
from mezzo.vision.train._scalars import ScalarLog, ScalarLogError, read_scalars
from mezzo.vision.train._tasks import undo_sizes as undo_sizes

# What users call. The names imported `as` themselves above are the parts of a run.
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
