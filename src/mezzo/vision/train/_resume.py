"""Resuming: choose a checkpoint, check that it is complete and fits, and only then load it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mezzo.checkpoint import CheckpointError, CheckpointStore, read_state, unpack_tensors, verify
from mezzo.dtypes import HALF_DTYPES
from mezzo.files import read_bytes, short_repr
from mezzo.model.saved_state import (
    WRONG,
    check_optimizer,
    check_random,
    check_tensors,
    mapping,
    numpy_state,
    part,
    python_state,
    score,
    whole_number,
)
from mezzo.model.sharded import load_whole_states
from mezzo.model.step_rules import describe_new_rules
from mezzo.vision.train._checkpoints import RunProgress, counters_of, fixed_in
from mezzo.vision.train._ema import Ema
from mezzo.vision.train.session import Session, seed_everything

AUTO = "auto"
_WEIGHTS = "model.safetensors"
_BACKENDS = ("auto", "inductor", "aot_eager", "as_written")
_MOST_STEPS = 2**53  # a larger number means a damaged file


def find_checkpoint(store: CheckpointStore, given: Path | str | None) -> tuple[Path | None, list[str]]:
    """Return the checkpoint to continue from, verified, and lines about it; None for a new run.

    Args:
        store: The checkpoints of this run.
        given: The folder of a checkpoint; the folder of a run, for its latest checkpoint; or
            `auto`, for the newest undamaged checkpoint of this run, or a new run if it has no
            checkpoint.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged; for `auto`: all are damaged.
    """
    if given is None:
        return None, []
    if given == AUTO:
        return _newest_whole(store)
    folder = store.resume_from(given)
    if folder is None:
        raise CheckpointError(f"{given}: there is no checkpoint in it; give another folder, or --resume auto")
    if _holds_weights_only(folder):
        raise CheckpointError(
            f"{folder}: holds weights only, nothing to resume; start from them with --pretrained {folder}"
        )
    try:
        notice = verify(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_advice(folder)}") from error
    return folder, [] if notice is None else [notice]


def _newest_whole(store: CheckpointStore) -> tuple[Path | None, list[str]]:
    folders, trouble = store.candidates()
    notices = [] if trouble is None else [f"--resume auto: {trouble}"]
    if not folders:
        return None, [*notices, f"--resume auto: {store.directory} has no checkpoint; a new run begins"]
    faults = []
    for folder in folders:
        try:
            notice = verify(folder)
        except CheckpointError as error:
            faults.append(str(error))
            continue
        skipped = [f"--resume auto: {folder_fault}; this checkpoint is skipped" for folder_fault in faults]
        return folder, [*notices, *skipped, *([] if notice is None else [notice])]
    shown = " | ".join(faults[:5]) + (f" | and {len(faults) - 5} more" if len(faults) > 5 else "")
    raise CheckpointError(
        f"--resume auto: {store.directory} has no undamaged checkpoint: {shown}; start a new run without --resume, or "
        "restore a checkpoint from a backup"
    )


def _holds_weights_only(folder: Path) -> bool:
    return not (folder / "state.json").exists() and (folder / _WEIGHTS).exists()


def _advice(damaged: Path) -> str:
    """Return the advice for a damaged checkpoint: the newest undamaged one of the same run."""
    run = CheckpointStore(damaged.parent)
    for folder in run.candidates()[0]:
        if folder != damaged:
            try:
                verify(folder)
            except CheckpointError:
                continue
            return f"the newest undamaged one is {folder}: --resume {folder}, or --resume auto with --save_dir {run.directory}"
    return f"{run.directory} has no other undamaged checkpoint"


def resume(session: Session, folder: Path) -> RunProgress:
    """Load a checkpoint into a session and return its progress.

    Everything is checked before the session changes.

    Raises:
        CheckpointError: The checkpoint is incomplete, or belongs to a run with other data or batch
            size. The session is unchanged.
    """
    state = read_state(folder)
    try:
        _refuse_another_run(session, folder, state)
        progress = _progress(state)
        if progress.step > session.steps:
            raise CheckpointError(
                f"{folder}: has {progress.step} steps done, this run has {session.steps} in all; give a larger --iters "
                "(or --epochs), or evaluate the weights"
            )
        model = session.recipe.create_model() if session.options.fsdp else session.model
        weights = _weights(model, folder)
        _check_rest(session, model, state)
        with part("precision"):  # checks the whole state before it loads it
            session.precision.load_state_dict(mapping(state["precision"]))
        _restore(session, model, weights, state)
    except WRONG as error:
        reason = f"has no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{folder}: does not fit this run ({reason}); start from its weights with --pretrained, or resume another one"
        ) from error
    if (line := describe_new_rules(state, session.precision, "--amp_use_promote {}")) is not None:
        session.notices.append(f"the checkpoint was {line}")
    return progress


def _refuse_another_run(session: Session, folder: Path, state: dict[str, Any]) -> None:
    then, now = mapping(state["run"]), fixed_in(session)
    with part("run"):
        differing = [f"{name} {_plain(then[name])} (now {value})" for name, value in now.items() if then[name] != value]
    if differing:
        raise CheckpointError(
            f"{folder}: was written by a run with {', '.join(differing)}; the order of samples would differ: "
            "resume with the same options, or start from its weights with --pretrained"
        )


def _plain(value: Any) -> Any:
    if isinstance(value, (dict, list, tuple, Tensor)):
        raise ValueError(f"a {type(value).__name__} where a number or a name is expected")
    return value


def _progress(state: dict[str, Any]) -> RunProgress:
    with part("progress"):
        values = mapping(state["progress"])
        if strange := sorted(map(str, set(values) ^ set(RunProgress.__slots__))):
            raise ValueError(f"{strange[0][:40]!r} is missing or unknown")
        step = whole_number("step", values["step"], _MOST_STEPS)
        return RunProgress(
            step=step,
            best=score("best", values["best"]),
            best_step=whole_number("best_step", values["best_step"], step),
            evaluations_without_gain=whole_number("evaluations_without_gain", values["evaluations_without_gain"], step),
        )


def _weights(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint, all of which fit the model."""
    data = read_bytes(folder / _WEIGHTS, raising=CheckpointError)
    with part(_WEIGHTS):
        try:
            weights = unpack_tensors(data, {})
        except Exception as error:  # a damaged file can raise anything
            raise ValueError(f"cannot be read: {error}") from error
        check_tensors(weights, model.state_dict(), lambda own: torch.float32 if own.dtype in HALF_DTYPES else own.dtype)
    return weights


def _check_rest(session: Session, model: nn.Module, state: dict[str, Any]) -> None:
    with part("counters"):
        counters = mapping(state["counters"])
        check_tensors(counters, counters_of(model), lambda own: own.dtype)
        if any(bool((value < 0).any()) for value in counters.values() if value.dtype != torch.bool):
            raise ValueError("a number of batches is negative")
    with part("optimizer"):
        if session.options.fsdp:  # whole and by name; torch shards it when it loads it
            mapping(mapping(state["optimizer"])["state"])
        else:
            check_optimizer(session.optimizer, state["optimizer"])
    if session.ema is not None and state["ema"] is not None:
        session.ema.check_state_dict(state["ema"])
    with part("backend"):
        if (backend := state.get("backend")) is not None and backend not in _BACKENDS:
            raise ValueError(f"is {short_repr(backend)}; must be one of {', '.join(_BACKENDS)}, or None")
    with part("random"):
        check_random(state["random"], session.world.device)


def _restore(session: Session, model: nn.Module, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
    with torch.no_grad():
        for name, value in counters_of(model).items():  # first: loading weights compares these counters
            value.copy_(state["counters"][name])
    counters = [name for name in weights if name.endswith("num_batches_tracked")]
    model.load_state_dict({name: value for name, value in weights.items() if name not in counters}, strict=False)
    if session.options.fsdp:
        load_whole_states(session.model, session.optimizer, model.state_dict(), state["optimizer"])
    else:
        session.optimizer.load_state_dict(state["optimizer"])
    if session.world.size == 1:  # several processes always compile
        session.backend = state.get("backend") or session.backend  # an eager run, and an older checkpoint, has none
    _restore_average(session, state["ema"])
    _set_random_state(session, state["random"])


def _restore_average(session: Session, state: dict[str, Any] | None) -> None:
    if session.ema is None:
        if state is not None:
            session.notices.append("the checkpoint has an average of the weights, which is dropped without --use_ema")
    elif state is None:
        session.ema = Ema(session.model)
        session.notices.append("--use_ema: the checkpoint has no average of the weights; averaging starts now")
    else:
        session.ema.load_state_dict(state)


def _set_random_state(session: Session, state: dict[str, Any]) -> None:
    device = session.world.device
    if not session.world.is_first:  # only the first process saves its state; the others take a new seed
        seed_everything(session.options.seed + session.world.rank)
        return
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    np.random.set_state(numpy_state(state["numpy"]))
    random.setstate(python_state(state["python"]))
