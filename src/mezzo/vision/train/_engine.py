"""The training loop of a recipe: both tasks, every precision, one process or several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor

from mezzo.checkpoint import CheckpointStore
from mezzo.errors import MezzoError
from mezzo.model.meter import StepMeter, Window
from mezzo.model.parallel import share_buffers
from mezzo.model.steps import NonFiniteLoss, StepResult, run_steps
from mezzo.model.watchdog import FORWARD_DONE, begin_step, enter
from mezzo.static import CaptureError
from mezzo.vision.data import DeviceBatch
from mezzo.vision.train._checkpoints import RunProgress, save_best, save_checkpoint
from mezzo.vision.train._evaluate import Evaluator
from mezzo.vision.train._reporter import Reporter
from mezzo.vision.train._tasks import Scores
from mezzo.vision.train.session import Session

_NAMED_FILES = 4  # files of a bad batch that the message names


class BatchTooSmall(MezzoError):
    """Batch norm needs more than one value per channel."""


def train_step(session: Session, batch: DeviceBatch) -> StepResult:
    """Train one step on a batch."""
    task = session.task

    def forward() -> tuple[Any, Tensor]:
        outputs = session.wrapped(batch.images)
        loss = task.loss(outputs, batch.labels)
        enter(FORWARD_DONE)
        return outputs, loss

    clip_norm = session.recipe.optimizer.clip_norm
    outputs, loss = session.precision.train_step(forward, session.optimizer, max_norm=clip_norm)
    return StepResult(loss, task.watch(outputs, batch.labels))


class CompiledTraining:
    """The same step, captured and compiled at its first call; on a GPU later calls replay it.

    With several processes it averages the gradients itself.
    """

    def __init__(self, session: Session) -> None:
        self._watched: tuple[str, ...] = ()
        self._step = session.precision.compile(
            session.model,
            self._loss,
            session.optimizer,
            max_norm=session.recipe.optimizer.clip_norm,
            backend=session.backend,
            process_group=session.world.group,
        )
        self._task = session.task

    def _loss(self, outputs: Any, labels: Tensor) -> tuple[Tensor, ...]:
        watched = self._task.watch(outputs, labels)
        self._watched = tuple(watched)
        return (self._task.loss(outputs, labels), *watched.values())

    def __call__(self, session: Session, batch: DeviceBatch) -> StepResult:
        """Train one step on a batch."""
        loss, *watched = self._step.run((batch.images, batch.labels))
        enter(FORWARD_DONE)
        session.backend = self._step.report().backend
        return StepResult(loss, dict(zip(self._watched, watched, strict=True)))

    def describe(self) -> str:
        """Return a line that tells which form of the step runs, and why."""
        return str(self._step.report()).splitlines()[0]

    def operator_table(self) -> str:
        """Return the operators and dtypes of the captured step."""
        return self._step.operators().table()


class TrainingEngine:
    """Trains a session to its end: steps, evaluations, checkpoints and log lines."""

    def __init__(
        self, session: Session, store: CheckpointStore, reporter: Reporter, evaluator: Evaluator | None
    ) -> None:
        self._session, self._store, self._reporter, self._evaluate = session, store, reporter, evaluator
        self._meter = StepMeter(session.world.device)
        self._compiled = CompiledTraining(session) if session.is_compiled else None
        self._is_described = False

    def run(self, progress: RunProgress) -> RunProgress:
        """Train the steps after `progress`; update and return it."""
        session = self._session
        if progress.step >= session.steps:
            self._reporter.note(f"nothing left to train: {progress.step} of {session.steps} iterations are done")
            return progress
        self._records = session.options.wants_operator_table()
        run_steps(
            range(progress.step, session.steps),
            iter(session.batches(progress.step)),
            self._train,
            lambda batch: batch.images.shape[0],
            self._meter,
            before=self._begin,
            after=lambda step: self._end(step, progress),
        )
        return progress

    def _begin(self, step: int) -> None:
        begin_step(step)
        self._rate = self._session.set_learning_rate(step)

    def _train(self, step: int, batch: DeviceBatch) -> StepResult:
        session, records = self._session, self._records
        self._records = False
        if self._compiled is not None and not (records and session.world.size == 1):
            return self._train_compiled(self._compiled, batch, records)
        with session.precision.record() if records else nullcontext() as stats, _explained(session):
            result = train_step(session, batch)
        if stats is not None:
            self._reporter.operator_table(stats.table())
        return result

    def _train_compiled(self, step: CompiledTraining, batch: DeviceBatch, records: bool) -> StepResult:
        """Train one captured step.

        The operator table of several processes is that of the graph: a step as written would not
        average the gradients.
        """
        session = self._session
        with _explained(session):
            result = step(session, batch)
        if not self._is_described:
            self._reporter.note(step.describe())
            self._is_described = True
        if records and session.world.is_first:
            self._reporter.operator_table(step.operator_table())
        return result

    def _end(self, step: int, progress: RunProgress) -> bool:
        """After a step, log, evaluate and save if it is time; return whether the run ends."""
        session = self._session
        if session.ema is not None:
            session.ema.update()
        progress.step = step + 1
        self._reporter.advance(progress.step)
        if self._is_logged(step):
            self._log(step, self._rate)
        if progress.step % session.save_every and progress.step != session.steps:
            return False
        if not self._meter.is_empty:
            self._log(step, self._rate)
        self._meter.pause()
        self._end_interval(progress)
        self._meter.go_on()
        return self._is_stopped_early(progress)

    def _is_logged(self, step: int) -> bool:
        """Return whether a step is logged.

        Segmentation counts steps from 1, classification from 0 in each epoch.
        """
        session, every = self._session, self._session.options.log_every
        if session.recipe.task == "segmentation":
            return (step + 1) % every == 0
        return step % session.steps_per_epoch % every == 0

    def _log(self, step: int, rate: float) -> None:
        window = self._meter.read()
        self._raise_if_not_finite(window)
        if self._session.precision.scaler is not None:
            self._session.precision.scaler.flush()
        self._reporter.train_line(step, rate, window)

    def _raise_if_not_finite(self, window: Window) -> None:
        session, bad = self._session, window.first_bad_step
        if bad is None or session.precision.scaler is not None:
            return
        paths = [session.loader.dataset.path(index) for _, index in session.stream.batch(bad)]
        named = ", ".join(paths[:_NAMED_FILES]) + (
            f" and {len(paths) - _NAMED_FILES} more" if len(paths) > _NAMED_FILES else ""
        )
        raise NonFiniteLoss(
            f"the loss is not finite at iteration {bad + 1} (batch: {named}); lower the learning rate, or look at these "
            "files; the checkpoints before it are kept"
        )

    def _end_interval(self, progress: RunProgress) -> None:
        """Evaluate, then write a checkpoint."""
        session = self._session
        share_buffers(session.model, session.world)
        try:
            scores = self._evaluate_now(progress)
        except Exception:
            if session.world.size == 1:  # with several processes the others would not take part in saving
                save_checkpoint(session, self._store, progress)
            raise
        if scores is not None:
            self._reporter.eval_lines(progress, scores)
        self._reporter.saved(save_checkpoint(session, self._store, progress))

    def _evaluate_now(self, progress: RunProgress) -> Scores | None:
        session = self._session
        if self._evaluate is None:
            return None
        with nullcontext() if session.ema is None else session.ema.applied():
            scores = self._evaluate(session.model, session.precision)
            if progress.best is None or scores.best > progress.best:
                progress.best, progress.best_step, progress.evaluations_without_gain = scores.best, progress.step, 0
                save_best(session, self._store)
            else:
                progress.evaluations_without_gain += 1
        return scores

    def _is_stopped_early(self, progress: RunProgress) -> bool:
        limit = self._session.options.early_stop_after
        if limit is None or progress.evaluations_without_gain < limit:
            return False
        self._reporter.note(f"stopped at iteration {progress.step}: no better result in {limit} evaluations")
        return True


@contextmanager
def _explained(session: Session) -> Iterator[None]:
    """Translate torch's error about a batch norm with one value per channel."""
    try:
        yield
    except (ValueError, CaptureError) as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise BatchTooSmall(
            f"a batch norm of this network saw a single value: a batch of {session.recipe.batch_size} is too small for "
            "images of this size; use a larger --batch_size"
        ) from error
