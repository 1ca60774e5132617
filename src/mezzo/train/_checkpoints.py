"""A run on disk: `iter_N/` with weights and everything else that the next step depends on, `best_model/`, `latest`."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mezzo.checkpoint import BEST, CheckpointError, CheckpointStore, read_state, save_weights, write_state
from mezzo.files import explained
from mezzo.models import load_weights, save_pdparams
from mezzo.train._ema import Ema
from mezzo.train._rules import describe_new_rules, rules_of
from mezzo.train._session import Session, seed_everything
from mezzo.train._sharded import load_whole_states, whole_states

_RESULTS = frozenset(
    f"{BEST} latest latest.pdparams best.pdparams scalars.jsonl tensorboard curves.png config.yml run.json".split()
)


@dataclass(slots=True)
class Progress:
    """How far a run has come."""

    step: int = 0
    """Steps done."""
    best: float | None = None
    """The best result of an evaluation."""
    best_step: int = 0
    evaluations_without_gain: int = 0


def save(session: Session, store: CheckpointStore, progress: Progress) -> Path:
    """Write `iter_N` and let `latest` name it; return the folder. All processes call it, the first one writes."""
    model, optimizer_state = _whole(session)
    folder = store.directory / f"iter_{progress.step}"
    if session.world.is_first:
        state = {
            "progress": {name: getattr(progress, name) for name in Progress.__slots__},
            "optimizer": optimizer_state,
            "counters": _counters(model),
            "precision": session.precision.state_dict(),
            "rules": rules_of(session.precision),
            "ema": None if session.ema is None else session.ema.state_dict(),
            "random": _random_state(session.world.device),
            "run": _fixed(session),
        }

        def write(part: Path) -> None:
            save_weights(part, model)
            write_state(part, state)

        store.save(folder.name, write)
        store.save_latest(folder.name)
        if session.recipe.task == "classification":  # the file that the documents of the classifier name
            save_pdparams(model, store.directory / "latest.pdparams")
        store.prune(up_to=progress.step)
    session.world.barrier()
    return folder


def save_best(session: Session, store: CheckpointStore) -> None:
    """Write the weights that were just evaluated as the best ones. All processes call it."""
    model, _ = _whole(session)
    if session.world.is_first:
        store.save(BEST, lambda folder: save_weights(folder, model))
        if session.recipe.task == "classification":
            save_pdparams(model, store.directory / "best.pdparams")


def put_aside(directory: Path) -> Path | None:
    """Move the results of an earlier run into a folder beside those to come, so that they do not mix; return it."""
    names = [path for path in directory.glob("*") if path.name in _RESULTS or path.name.startswith("iter_")]
    if not names:
        return None
    number = 1 + max((int(p.name.rpartition("_")[2]) for p in directory.glob("previous_[0-9]*")), default=0)
    target = directory / f"previous_{number}"
    with explained(target):
        target.mkdir()
        for path in names:
            path.rename(target / path.name)
    return target


def _whole(session: Session) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model with all its weights, and the whole state of the optimizer, in the first process."""
    if not session.options.fsdp:
        return session.model, session.optimizer.state_dict()
    weights, optimizer_state = whole_states(session.model, session.optimizer)
    model = session.recipe.create_model()
    if session.world.is_first:
        model.load_state_dict(weights)
    return model, optimizer_state


def resume(session: Session, folder: Path) -> Progress:
    """Put a session into the state of a checkpoint; return how far it had come.

    Raises:
        CheckpointError: The folder holds no complete checkpoint, or one of a run with other data or batch size.
    """
    if not (folder / "state.json").exists() and (folder / "model.safetensors").exists():
        raise CheckpointError(
            f"{folder}: holds weights only, nothing to resume; start from them with --pretrained {folder}"
        )
    state = read_state(folder)
    try:
        then, now = state["run"], _fixed(session)
        differing = [f"{name} {then[name]} (now {value})" for name, value in now.items() if then[name] != value]
        if differing:
            raise CheckpointError(
                f"{folder}: was written by a run with {', '.join(differing)}; the order of samples would not go on: "
                "resume with the same options, or start from its weights with --pretrained"
            )
        _restore_weights(session, folder, state)
        session.precision.load_state_dict(state["precision"])
        if (line := describe_new_rules(state, session.precision, "--amp_use_promote {}")) is not None:
            session.notices.append(f"the checkpoint was {line}")
        _restore_average(session, state["ema"])
        _set_random_state(session, state["random"])
        return Progress(**state["progress"])
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}: state.json is no state of a training run ({error!r})") from error
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}; start from its weights with --pretrained") from error


def _restore_weights(session: Session, folder: Path, state: dict[str, Any]) -> None:
    model = session.recipe.create_model() if session.options.fsdp else session.model
    for name, value in _counters(model).items():  # first: loading weights is when guards of statistics look
        value.copy_(state["counters"][name])
    report = load_weights(model, folder / "model.safetensors")
    if report.missing or report.unexpected or report.mismatched:
        raise CheckpointError(f"{folder}: its weights are not those of this network: {report}")
    if session.options.fsdp:
        load_whole_states(session.model, session.optimizer, model.state_dict(), state["optimizer"])
    else:
        session.optimizer.load_state_dict(state["optimizer"])


def _restore_average(session: Session, state: dict[str, Any] | None) -> None:
    if session.ema is None:
        if state is not None:
            session.notices.append("the checkpoint has an average of the weights, which ends here: no --use_ema")
    elif state is None:
        session.ema = Ema(session.model)
        session.notices.append("--use_ema: the checkpoint has no average of the weights; it begins here")
    else:
        session.ema.load_state_dict(state)


def _counters(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are no weights: numbers of batches, which weights files leave out."""
    return {name: buffer for name, buffer in model.named_buffers() if not buffer.is_floating_point()}


def _fixed(session: Session) -> dict[str, Any]:
    """Return what must not change within a run."""
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


def _set_random_state(session: Session, state: dict[str, Any]) -> None:
    device = session.world.device
    if not session.world.is_first:  # the states of other processes are not kept: each goes on with a seed of its own
        seed_everything(session.options.seed + session.world.rank)
        return
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    random.setstate((3, tuple(state["python"]), None))
