"""Whole runs: `train` writes checkpoints, lines and plots; `evaluate` returns scores."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mezzo._torch.data_loaders import translate_worker_errors
from mezzo.checkpoint import BEST, CheckpointStore, find_weights
from mezzo.files import folder_lock, say
from mezzo.model.parallel import World, decide_first, join_world
from mezzo.vision.models import load_trained
from mezzo.vision.options import RunOptions
from mezzo.vision.recipes import Recipe
from mezzo.vision.train._checkpoints import RunProgress, put_aside
from mezzo.vision.train._engine import TrainingEngine
from mezzo.vision.train._evaluate import Evaluator
from mezzo.vision.train._notices import find_notices
from mezzo.vision.train._record import write_record
from mezzo.vision.train._reporter import Reporter, eval_lines
from mezzo.vision.train._resume import AUTO, find_checkpoint, resume
from mezzo.vision.train._scalars import ScalarLog
from mezzo.vision.train._tasks import NetworkTask, Scores, make_task
from mezzo.vision.train._wandb import WandbLog
from mezzo.vision.train.log_lines import format_memory_line
from mezzo.vision.train.session import Session, UnusableRecipe, open_precision, open_session


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result of a run."""

    directory: Path
    steps: int
    best: float | None
    """Best top-1 or mIoU; None without evaluation."""
    best_step: int


def train(recipe: Recipe, options: RunOptions) -> TrainResult:
    """Train by a recipe and print the documented lines.

    With `torchrun`, every process calls this.

    Raises:
        MezzoError: Recipe, options, data or checkpoint have a fault, or another training uses the
            folder. No earlier result is lost.
    """
    options = options.with_precision_for(recipe.task)
    with join_world(options.device, options.dist_timeout) as world, translate_worker_errors(), ExitStack() as closing:
        store = CheckpointStore(options.save_dir, keep=options.keep_checkpoints)
        checkpoint, lines = decide_first(world, lambda: _open_folder(store, options, closing))
        options = replace(options, resume=None if checkpoint is None else Path(checkpoint))
        session = open_session(recipe, options, world)
        closing.callback(session.loader.close)
        session.notices[:0] = [*lines, *find_notices(recipe, options, world)]
        evaluator = None
        if options.do_eval:
            evaluator = _evaluator(recipe, options, world, session.task)
            closing.callback(evaluator.close)
            evaluator.start()
        session.loader.start()
        progress = _begin(session, store)
        scalars: ScalarLog | None = None
        if world.is_first:
            write_record(session, options.save_dir)
            wandb = WandbLog(options.save_dir, session.precision.name) if options.wandb else None
            scalars = closing.enter_context(ScalarLog(options.save_dir, resume_at=progress.step + 1, wandb=wandb))
        reporter = closing.enter_context(Reporter(session, scalars))
        reporter.begin(progress)
        TrainingEngine(session, store, reporter, evaluator).run(progress)
        if world.device.type == "cuda":
            reserved = torch.cuda.max_memory_reserved(world.device)
            reporter.note(format_memory_line(reserved, torch.cuda.max_memory_allocated(world.device)))
        if scalars is not None and not scalars.is_empty:
            reporter.plot(options.save_dir)
        return TrainResult(options.save_dir, progress.step, progress.best, progress.best_step)


def _open_folder(store: CheckpointStore, options: RunOptions, closing: ExitStack) -> tuple[str | None, list[str]]:
    """Lock the run's folder until `closing` ends, and choose the checkpoint to continue from.

    This must come before any other access: a second training must not disturb the first.
    """
    lock = folder_lock(
        store.directory,
        purpose="a training",
        advice="wait for it, or choose another --save_dir",
        force=options.force,
        force_by="--force",
    )
    notice = closing.enter_context(lock)
    store.clean()
    checkpoint, lines = find_checkpoint(store, options.resume)
    return None if checkpoint is None else str(checkpoint), [*([] if notice is None else [notice]), *lines]


def _begin(session: Session, store: CheckpointStore) -> RunProgress:
    """Return the progress to start with: from the checkpoint, or new.

    A new run moves earlier results aside.
    """
    options = session.options
    if options.resume is not None:
        progress = resume(session, Path(options.resume))
        if progress.best is not None and not (store.directory / BEST).exists():
            session.notices.append(f"{store.directory} has no {BEST} yet: the next evaluation writes it")
            progress.best, progress.evaluations_without_gain = None, 0
    else:
        progress = RunProgress(step=options.start_epoch * session.steps_per_epoch)
        if session.world.is_first and (moved := put_aside(store.directory)) is not None:
            session.notices.append(f"results of an earlier run are now in {moved}")
    session.world.barrier()
    return progress


def evaluate(recipe: Recipe, options: RunOptions) -> Scores:
    """Evaluate `options.pretrained`, or the checkpoint `options.resume`.

    Print the documented lines.
    """
    options = options.with_precision_for(recipe.task)
    with join_world(options.device, options.dist_timeout) as world, translate_worker_errors():
        precision = open_precision(recipe, options, world.device)
        model = recipe.create_model()
        precision.prepare_for_evaluation(model)
        report = load_trained(model, _weights(options, recipe))
        task = make_task(recipe, world.device)
        evaluator = _evaluator(recipe, options, world, task)
        try:
            scores = evaluator(model.to(world.device), precision)
        finally:
            evaluator.close()
        if world.is_first:
            for line in (*find_notices(recipe, options, world), str(report), *eval_lines(scores)):
                say(line)
        return scores


def _weights(options: RunOptions, recipe: Recipe) -> Path:
    given = options.pretrained or (options.save_dir if options.resume == AUTO else options.resume) or recipe.pretrained
    if given is None:
        raise UnusableRecipe(
            "no weights to evaluate: give --model_path (or --pretrained) FILE or a checkpoint's folder"
        )
    return find_weights(given)


def _evaluator(recipe: Recipe, options: RunOptions, world: World, task: NetworkTask) -> Evaluator:
    if recipe.val_data is None:
        raise UnusableRecipe("the recipe has no val_dataset: there is nothing to evaluate on")
    return Evaluator(recipe, recipe.val_data, options, task, world)
