"""Files of `mezzo.Model`: a folder to continue training from, or an exported forward."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo._torch.pytree import tree_leaves
from mezzo.amp import float32_copy
from mezzo.checkpoint import CheckpointError, CheckpointStore, WeightsError, load_weights, read_state, write_state
from mezzo.errors import RunError
from mezzo.export import own_program
from mezzo.files import one_line, report_write_errors
from mezzo.model.saved_state import WRONG, check_optimizer, mapping
from mezzo.model.step_rules import describe_new_rules, rules_of
from mezzo.precision import Precision
from mezzo.static import InputSpec, save_forward

_KIND = "mezzo.Model"
#: Largest error, relative to the largest output. torch.export runs the same kernels; only the order
#: of sums differs.
_MOST_ERROR = 1e-4


def save_training(path: Path, network: nn.Module, optimizer: Optimizer | None, precision: Precision) -> Path:
    """Write a folder with float32 weights, optimizer and loss scale, atomically."""
    state = {
        "kind": _KIND,
        "network": dict(network.state_dict()),
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "optimizer_kind": None if optimizer is None else type(optimizer).__name__,
        "precision": precision.state_dict(),
        "rules": rules_of(precision),
    }
    return CheckpointStore(path.parent).save(path.name, lambda folder: write_state(folder, state, with_manifest=False))


def load_training(
    path: Path,
    network: nn.Module,
    optimizer: Optimizer | None,
    precision: Precision,
    *,
    skip_mismatch: bool,
    reset_optimizer: bool,
) -> None:
    """Load a folder of `save_training`, or a file of weights; checks everything before any change.

    Raises:
        CheckpointError: `save_training` did not write the folder, or the state does not fit.
    """
    if path.is_file():
        faults = _load_file(path, network, skip_mismatch)
        if faults:
            _tell(path, faults, skip_mismatch, "skipped")
        return
    state = read_state(path)
    if state.get("kind") != _KIND:
        raise CheckpointError(f"{path}: was not written by Model.save(); give a folder that was, or a file of weights")
    weights, of_optimizer = state.get("network"), state.get("optimizer")
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise CheckpointError(f"{path}: its state has no weights; it is damaged, or another program wrote it")
    fitting, faults = _compare(network, weights)
    if faults:
        is_reset = optimizer is not None and not reset_optimizer
        _tell(
            path, faults, skip_mismatch, "skipped; the optimizer starts with an empty state" if is_reset else "skipped"
        )
        if optimizer is not None and not reset_optimizer:
            optimizer.state.clear()  # its state belongs to other weights
    elif optimizer is not None and of_optimizer is not None and not reset_optimizer:
        with _refusing(path, "the optimizer's state"):
            if (kind := state.get("optimizer_kind")) != type(optimizer).__name__:
                raise ValueError(f"it is of {str(kind)[:60]}, but the optimizer is {type(optimizer).__name__}")
            check_optimizer(optimizer, of_optimizer)
        if (line := describe_new_rules(state, precision, "amp_configs with 'use_promote': {}")) is not None:
            # Warn before any change: a filter can turn the warning into an error.
            warnings.warn(f"{path} was {line}", UserWarning, stacklevel=3)
        _take(path, optimizer, of_optimizer, precision, state.get("precision"))
    network.load_state_dict(fitting, strict=False)


def _take(path: Path, optimizer: Optimizer, of_optimizer: Any, precision: Precision, of_precision: Any) -> None:
    """Load the states of the precision and the optimizer; if either fails, restore both."""
    before = optimizer.state_dict(), precision.state_dict()
    with _refusing(path, "the state of its precision"):
        precision.load_state_dict(mapping({} if of_precision is None else of_precision))  # all or nothing
    try:
        with _refusing(path, "the optimizer's state"):
            optimizer.load_state_dict(of_optimizer)
    except CheckpointError:  # from an optimizer that `check_optimizer` cannot check
        optimizer.load_state_dict(before[0])
        precision.load_state_dict(before[1])
        raise


@contextmanager
def _refusing(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except WRONG as error:
        reason = f"has no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{path}: {what} does not fit ({reason}); load(..., reset_optimizer=True) takes only the weights"
        ) from error


def _load_file(path: Path, network: nn.Module, skip_mismatch: bool) -> list[str]:
    """Load a file of weights; return a line for each weight that does not fit."""
    try:
        report = load_weights(network, path, strict=not skip_mismatch)
    except WeightsError as error:
        text = str(error)
        raise CheckpointError(text if text.startswith(str(path)) else f"{path}: {text}") from error
    faults = [f"{name} is missing" for name in report.missing]
    faults += [f"{name} is not in the network" for name in report.unexpected]
    return faults + [f"{name} has another shape" for name in report.mismatched]


def _compare(network: nn.Module, saved: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights that fit, and a line for each that does not."""
    own = network.state_dict()
    fits = {name: value for name, value in saved.items() if name in own and _can_take(own[name], value)}
    faults = [f"{name} is missing" for name in own if name not in saved]
    faults += [f"{name} is not in the network" for name in saved if name not in own]
    faults += [
        f"{name} is {_described(saved[name], own[name])} on disk, {_described(own[name], saved[name])} in the network"
        for name in own
        if name in saved and name not in fits
    ]
    return fits, faults


def _can_take(own: Tensor, saved: Tensor) -> bool:
    """Return whether shapes are equal and both are integer, both floating-point or both complex."""
    kinds = (own.is_floating_point(), own.is_complex()) == (saved.is_floating_point(), saved.is_complex())
    return kinds and own.shape == saved.shape


def _described(tensor: Tensor, other: Tensor) -> str:
    return f"{tuple(tensor.shape)}" if tensor.shape != other.shape else f"of {tensor.dtype}"


def _tell(path: Path, faults: Sequence[str], skip_mismatch: bool, done: str) -> None:
    more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
    text = f"{path}: {'; '.join(faults[:3])}{more}"
    if not skip_mismatch:
        raise CheckpointError(f"{text}; load(..., skip_mismatch=True) takes what fits")
    warnings.warn(one_line(f"{text}: {done}"), UserWarning, stacklevel=4)


def export_forward(target: Path, network: nn.Module, inputs: Sequence[InputSpec], sample: Sequence[Tensor]) -> None:
    """Export forward in float32 and evaluation mode, and compare the file with the network.

    Raises:
        RunError: torch cannot export the network, the file gives different results, or the system
            refuses to write.
    """
    plain = float32_copy(network).eval().cpu()
    part = target.with_name(f".{target.name}.part")
    try:
        save_forward(plain, inputs, part, shown=target)
        _verify(plain, part, sample)
        with report_write_errors(target):
            part.replace(target)
    finally:
        part.unlink(missing_ok=True)


@torch.no_grad()
def _verify(network: nn.Module, path: Path, sample: Sequence[Tensor]) -> None:
    expected = _tensors(network(*sample))
    seen = _tensors(own_program(path)(*sample))
    for want, got in zip(expected, seen, strict=True):
        if want.shape != got.shape or not torch.allclose(
            want, got, rtol=0, atol=_MOST_ERROR * max(1.0, want.abs().max().item()), equal_nan=True
        ):
            raise RunError("the exported file gives different results than the network: nothing was written")


def _tensors(value: Any) -> list[Tensor]:
    return [leaf.float() for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
