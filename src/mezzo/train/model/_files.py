"""A model on disk: everything to go on training from, or the forward alone for others to run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo._errors import RunError
from mezzo._exported import load_program
from mezzo.amp import float32_copy
from mezzo.checkpoint import CheckpointError, CheckpointStore, read_state, write_state
from mezzo.models import load_weights
from mezzo.static import InputSpec, save_forward
from mezzo.train._precision import Precision

_KIND = "mezzo.Model"
#: Of the largest output: torch.export runs the same kernels, so what is left is the order of sums.
_MOST_ERROR = 1e-4


def save_training(path: Path, network: nn.Module, optimizer: Optimizer | None, precision: Precision) -> Path:
    """Write a folder with weights (float32), optimizer and loss scale; it is there whole or not at all."""
    state = {
        "kind": _KIND,
        "network": dict(network.state_dict()),
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "precision": precision.state_dict(),
    }
    return CheckpointStore(path.parent).save(path.name, lambda folder: write_state(folder, state))


def load_training(
    path: Path,
    network: nn.Module,
    optimizer: Optimizer | None,
    precision: Precision,
    *,
    skip_mismatch: bool,
    reset_optimizer: bool,
) -> None:
    """Load what `save_training` wrote, or a file of weights alone.

    Raises:
        CheckpointError: It is no such folder, or its weights do not fit.
    """
    if path.is_file():
        load_weights(network, path, strict=not skip_mismatch)
        return
    state = read_state(path)
    if state.get("kind") != _KIND:
        raise CheckpointError(f"{path}: was not written by Model.save(); give a folder that was, or a file of weights")
    _load_network(path, network, state["network"], skip_mismatch)
    if optimizer is not None and state["optimizer"] is not None and not reset_optimizer:
        try:
            optimizer.load_state_dict(state["optimizer"])
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                f"{path}: the optimizer's state does not fit ({error}); load(..., reset_optimizer=True) takes the weights alone"
            ) from error
        precision.load_state_dict(state["precision"])


def _load_network(path: Path, network: nn.Module, saved: Mapping[str, Tensor], skip_mismatch: bool) -> None:
    own = network.state_dict()
    fits = {name: value for name, value in saved.items() if name in own and own[name].shape == value.shape}
    if len(fits) < max(len(own), len(saved)):
        faults = [f"{name} is missing" for name in own if name not in saved]
        faults += [f"{name} is not in the network" for name in saved if name not in own]
        faults += [
            f"{name} is {tuple(saved[name].shape)} on disk, {tuple(own[name].shape)} in the network"
            for name in own
            if name in saved and name not in fits
        ]
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        text = f"{path}: {'; '.join(faults[:3])}{more}"
        if not skip_mismatch:
            raise CheckpointError(f"{text}; load(..., skip_mismatch=True) takes what fits")
        warnings.warn(f"{text}: skipped", UserWarning, stacklevel=4)
    network.load_state_dict(fits, strict=False)


def export_forward(
    path: Path, network: nn.Module, inputs: Sequence[InputSpec], sample: Sequence[Tensor] | None
) -> Path:
    """Write the forward, in evaluation and float32, as a `torch.export` file; what was written is run before it stays.

    Raises:
        RunError: torch cannot export the network, or the file gives other results.
    """
    target = path if path.suffix == ".pt2" else path.with_name(path.name + ".pt2")
    plain = float32_copy(network).eval().cpu()
    part = target.with_name(f".{target.name}.part")
    try:
        save_forward(plain, inputs, part)
        if sample is not None:
            _verify(plain, part, sample)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return target


@torch.no_grad()
def _verify(network: nn.Module, path: Path, sample: Sequence[Tensor]) -> None:
    expected = _tensors(network(*sample))
    seen = _tensors(load_program(path, keep_sizes=True).module()(*sample))
    for want, got in zip(expected, seen, strict=True):
        if want.shape != got.shape or not torch.allclose(
            want, got, rtol=0, atol=_MOST_ERROR * max(1.0, want.abs().max().item()), equal_nan=True
        ):
            raise RunError("the exported file gives other results than the network: nothing was written")


def _tensors(value: Any) -> list[Tensor]:
    return [leaf.float() for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
