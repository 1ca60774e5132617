"""The output of a run: documented lines, a progress bar, scalars for plots.

Only the first process prints.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from mezzo.files import plain, say
from mezzo.model.meter import Window
from mezzo.report import stamped
from mezzo.vision.train._checkpoints import RunProgress
from mezzo.vision.train._plot import plot_run
from mezzo.vision.train._scalars import ScalarLog
from mezzo.vision.train._tasks import ClassificationScores, MapScores, Scores
from mezzo.vision.train.log_lines import (
    EvalLine,
    SegmentationTrainLine,
    TrainLine,
    format_eval_line,
    format_segmentation_eval_lines,
    format_segmentation_train_line,
    format_train_line,
)
from mezzo.vision.train.session import Session


class Reporter:
    """Prints the lines of a run and logs its scalars.

    A context manager that shows the progress bar.

    Args:
        session: The run.
        scalars: The log of numbers; None in all processes except the first, which then print
            nothing.
    """

    def __init__(self, session: Session, scalars: ScalarLog | None) -> None:
        self._session, self._scalars = session, scalars
        self._console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
        self._bar: Bar | None = None
        if scalars is not None and self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("training", total=session.steps)

    def __enter__(self) -> Reporter:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def line(self, text: str) -> None:
        """Print a line."""
        if self._scalars is None:
            return
        if self._bar is None:
            say(text)
        else:
            self._console.print(plain(text))

    def note(self, text: str) -> None:
        """Print a line that begins with date and time, as in the segmentation documents."""
        self.line(stamped(text, datetime.now()))

    def begin(self, progress: RunProgress) -> None:
        """Print notices, number of iterations, precision and device; set the bar."""
        session = self._session
        for text in session.notices:
            self.note(text)
        done = f", from iteration {progress.step}" if progress.step else ""
        processes = f" in {session.world.size} processes" if session.world.size > 1 else ""
        self.note(
            f"training {session.steps} iterations in {session.precision.name} on {session.world.device}{processes}{done}"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=progress.step)

    def advance(self, step: int) -> None:
        """Move the bar to a step, if there is one."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def operator_table(self, table: str) -> None:
        """Print the operators and dtypes of the first step."""
        self.line(table.rstrip("\n"))

    def train_line(self, step: int, rate: float, window: Window) -> None:
        """Print and log the window that ends with a step."""
        if self._scalars is None:
            return
        is_classifier = self._session.recipe.task == "classification"
        self.line(self._class_line(step, rate, window) if is_classifier else self._map_line(step, rate, window))
        speed = {
            "reader_cost": window.reader_cost_s,
            "batch_cost": window.batch_cost_s,
            "ips": window.images_per_s * self._session.world.size,
        }
        self._scalars.add(step + 1, lr=rate, **window.values, **speed, **self._session.precision.numbers())

    def _class_line(self, step: int, rate: float, window: Window) -> str:
        epoch, position = divmod(step, self._session.steps_per_epoch)
        line = TrainLine(
            epoch=epoch + 1,
            step=position,
            top1=window.values["top1"],
            top5=window.values["top5"],
            lr=rate,
            loss=window.values["loss"],
            reader_cost_s=window.reader_cost_s,
            batch_cost_s=window.batch_cost_s,
            samples=window.samples,
            images_per_s=window.images_per_s,
        )
        return format_train_line(line)

    def _map_line(self, step: int, rate: float, window: Window) -> str:
        session = self._session
        line = SegmentationTrainLine(
            epoch=session.stream.epoch_of(step) + 1,
            step=step + 1,
            steps=session.steps,
            loss=window.values["loss"],
            lr=rate,
            batch_cost_s=window.batch_cost_s,
            reader_cost_s=window.reader_cost_s,
            samples_per_s=window.images_per_s,
            eta_s=int(window.batch_cost_s * (session.steps - step - 1)),
        )
        return stamped(format_segmentation_train_line(line), datetime.now())

    def eval_lines(self, progress: RunProgress, scores: Scores) -> None:
        """Print and log an evaluation, and which one is the best so far."""
        if self._scalars is None:
            return
        for text in eval_lines(scores):
            self.line(text)
        if progress.best is not None:
            self.note(f"best so far: {progress.best:.4f} at iteration {progress.best_step} (best_model)")
        self._scalars.add(progress.step, **{f"val_{name}": value for name, value in scores.values().items()})

    def plot(self, directory: Path) -> None:
        """Draw the curves of the run, or print which package is missing."""
        if self._scalars is None:
            return
        try:
            plot_run(self._scalars.path, directory / "curves.png")
        except ImportError:
            self.note("no curves.png: matplotlib is not installed (pip install 'mezzo[vision]')")

    def saved(self, folder: Path) -> None:
        """Print the folder of a checkpoint."""
        self.note(f"saved {folder}")


def eval_lines(scores: Scores) -> list[str]:
    """Return the documented lines of an evaluation."""
    if isinstance(scores, ClassificationScores):
        return [format_eval_line(EvalLine(top1=scores.topk[1], top5=scores.topk[5], loss=scores.loss))]
    assert isinstance(scores, MapScores)
    lines = format_segmentation_eval_lines(scores.images, scores.scores)
    return [stamped(line, datetime.now()) for line in lines]
