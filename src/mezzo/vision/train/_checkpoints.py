"""Checkpoints of a run: `iter_N/` with weights and all other state, `best_model/`, `latest`."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mezzo.checkpoint import BEST, CheckpointStore, save_pdparams, save_weights, write_state
from mezzo.files import report_write_errors
from mezzo.model.sharded import whole_states
from mezzo.model.step_rules import rules_of
from mezzo.model.watchdog import SAVING, enter
from mezzo.vision.train.session import Session

_RESULTS = frozenset(
    f"{BEST} latest latest.pdparams best.pdparams scalars.jsonl tensorboard curves.png config.yml run.json".split()
)
_PREVIOUS = re.compile(r"previous_([0-9]{1,9})")


@dataclass(slots=True)
class RunProgress:
    """How far a run has come."""

    step: int = 0
    """Steps done."""
    best: float | None = None
    """The best result of an evaluation."""
    best_step: int = 0
    evaluations_without_gain: int = 0


def save_checkpoint(session: Session, store: CheckpointStore, progress: RunProgress) -> Path:
    """Write `iter_N`, point `latest` to it, return the folder.

    All processes must call it; the first one writes.
    """
    enter(SAVING)
    model, optimizer_state = _whole(session)
    folder = store.directory / f"iter_{progress.step}"
    if session.world.is_first:
        state = {
            "progress": {name: getattr(progress, name) for name in RunProgress.__slots__},
            "optimizer": optimizer_state,
            "counters": counters_of(model),
            "precision": session.precision.state_dict(),
            "rules": rules_of(session.precision),
            "backend": session.backend if session.is_compiled else None,
            "ema": None if session.ema is None else session.ema.state_dict(),
            "random": _random_state(session.world.device),
            "run": fixed_in(session),
        }

        def write(part: Path) -> None:
            save_weights(part, model)
            write_state(part, state, with_manifest=False)

        store.save(folder.name, write)
        store.save_latest(folder.name)
        if session.recipe.task == "classification":  # the classifier's documents name this file
            save_pdparams(model, store.directory / "latest.pdparams")
        store.prune(up_to=progress.step)
    session.world.barrier()
    return folder


def save_best(session: Session, store: CheckpointStore) -> None:
    """Write the weights that were just evaluated as the best ones. All processes must call it."""
    model, _ = _whole(session)
    if session.world.is_first:
        store.save(BEST, lambda folder: save_weights(folder, model))
        if session.recipe.task == "classification":
            save_pdparams(model, store.directory / "best.pdparams")


def put_aside(directory: Path) -> Path | None:
    """Move the results of an earlier run into a folder `previous_N`.

    Return it, or None if there are no results.
    """
    names = [path for path in directory.glob("*") if path.name in _RESULTS or path.name.startswith("iter_")]
    if not names:
        return None
    taken = [int(match[1]) for path in directory.glob("previous_*") if (match := _PREVIOUS.fullmatch(path.name))]
    target = directory / f"previous_{1 + max(taken, default=0)}"
    with report_write_errors(target):
        target.mkdir()
        for path in names:
            path.rename(target / path.name)
    return target


def _whole(session: Session) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model with all weights, and the state of the optimizer.

    With FSDP they are complete only in the first process.
    """
    if not session.options.fsdp:
        return session.model, session.optimizer.state_dict()
    weights, optimizer_state = whole_states(session.model, session.optimizer)
    model = session.recipe.create_model()
    if session.world.is_first:
        model.load_state_dict(weights)
    return model, optimizer_state


def counters_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the integer buffers, such as batch counters, which files of weights leave out."""
    return {name: buffer for name, buffer in model.named_buffers() if not buffer.is_floating_point()}


def fixed_in(session: Session) -> dict[str, Any]:
    """Return the settings that must not change when a run is resumed."""
    stream = session.stream
    return {
        "seed": stream.seed,
        "samples": stream.length,
        "global batch size": stream.global_batch_size,
        "optimizer": type(session.optimizer).__name__,
    }


def _random_state(device: torch.device) -> dict[str, Any]:
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss],
        "python": list(random.getstate()[1]),
    }
