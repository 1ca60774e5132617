"""Checks of sharded models: how they were sharded, and with which optimizer; all run before anything is changed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from mezzo._torch.sharding import gathering_dtypes, is_converted
from mezzo.amp._decorate_checks import wrapper_types
from mezzo.amp._half_weights import half_parameters
from mezzo.amp._sharding import is_sharded
from mezzo.dtypes import HALF_DTYPES, dtype_name
from mezzo.fp8 import Fp8Recipe
from mezzo.optim import is_dtensor

_with_optimizer: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models that were prepared with an optimizer, which holds their parameters: sharding would replace these."""

_DELAYED = "scaling='delayed' with sharded weights: each process would keep scales of its own; use 'current'"


def note_optimizer(model: nn.Module) -> None:
    """Remember that an optimizer holds the parameters of a model."""
    _with_optimizer.add(model)


def refuse_unshardable(model: Any) -> None:
    """Raise unless a model is a float32 module that is neither sharded nor prepared with an optimizer.

    Raises:
        TypeError: It is not a module.
        RuntimeError: It is wrapped, sharded, decorated or prepared with an optimizer already.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard(): model must be an nn.Module, not {type(model).__name__}")
    if is_sharded(model) or any(param.dtype in HALF_DTYPES for param in model.parameters()):
        raise RuntimeError("shard(): the model is sharded or has half weights already; give a float32 model")
    for name, module in model.named_modules():
        if isinstance(module, wrapper_types()):
            raise RuntimeError(
                f"shard(): {name or 'the model'!r} is a {type(module).__name__} already; give the plain float32 model"
            )
    if model in _with_optimizer:
        raise RuntimeError(
            "shard() after prepare(): the optimizer has the parameters that sharding replaces; call shard(model), create "
            "the optimizer, then call prepare(model, optimizer)"
        )


def refuse_old_parameters(model: nn.Module, optimizers: Any) -> None:
    """Raise RuntimeError for an optimizer with the parameters from before the sharding: it would train nothing."""
    current = {id(param) for param in model.parameters()}
    for each in optimizers if isinstance(optimizers, Sequence) else [optimizers]:
        params = [param for group in each.param_groups for param in group["params"]]
        if params and not any(id(param) in current for param in params):
            raise RuntimeError(
                f"prepare(): this {type(each).__name__} has no parameter of the sharded model, whose parameters are new: "
                "call shard(model) first, then create the optimizer"
            )


def refuse_unsharded_options(master_weight: Any, is_delayed: bool) -> None:
    """Raise ValueError for options that sharded weights cannot have."""
    if master_weight not in (None, True):
        raise ValueError(f"master_weight={master_weight!r}: sharded weights are float32 masters; leave it out")
    if is_delayed:
        raise ValueError(_DELAYED)


def refuse_gathering_in_fp8(recipe: Fp8Recipe | None, reshard_after_forward: object) -> None:
    """Raise ValueError unless weights can be gathered in FP8.

    Args:
        recipe: How products are computed; None: the level has no FP8.
        reshard_after_forward: As of `shard_model`. FSDP2 also takes a number of processes, but not with FP8.
    """
    if recipe is None:
        raise ValueError("shard(gather_fp8=True) at a level without FP8 products: it belongs to level O3")
    if recipe.granularity == "row":
        raise ValueError(
            "shard(gather_fp8=True) with granularity='row': the forward pass scales rows, the backward pass columns, so "
            "two matrices in FP8 would be as many bytes as one in half; use granularity='tensor', or leave gather_fp8 out"
        )
    if recipe.scaling == "delayed":
        raise ValueError(_DELAYED)
    if not isinstance(reshard_after_forward, bool):
        raise ValueError(
            f"shard(gather_fp8=True) with reshard_after_forward={reshard_after_forward!r}: FSDP2 reshards FP8 weights over "
            "all processes or not at all; use True or False"
        )


def refuse_other_fp8_gathering(model: nn.Module, in_fp8: Iterable[nn.Parameter]) -> None:
    """Raise RuntimeError if a weight is gathered in FP8 that is not used by FP8 products only.

    Args:
        model: A sharded model.
        in_fp8: The weights that may be gathered in FP8.
    """
    allowed = {id(param) for param in in_fp8}
    for name, param in model.named_parameters():
        if is_dtensor(param) and is_converted(param) and id(param) not in allowed:
            raise RuntimeError(
                f"prepare(): FSDP gathers {name!r} in FP8, and this level, its lists or its half_layers compute in half with "
                "it; shard and prepare with the same Precision"
            )


def refuse_other_gathering(model: nn.Module, level: str, half: torch.dtype, excluded: Sequence[nn.Module]) -> None:
    """Raise if a sharded model gathers its weights in another dtype than a level asks for.

    Raises:
        RuntimeError: Shards are not float32, or a weight is gathered in another dtype than `decorate` gives it.
    """
    in_half = half_parameters(model, level, half, excluded)
    gathered = gathering_dtypes(model)
    for name, param in model.named_parameters():
        if not param.is_floating_point():
            continue
        if param.dtype is not torch.float32:
            raise RuntimeError(
                f"prepare(): the shards of {name!r} are {dtype_name(param.dtype)}; sharded weights are their own "
                "masters and must be float32: shard the float32 model"
            )
        wanted = half if id(param) in in_half else torch.float32
        found = gathered.get(id(param), torch.float32)
        is_same = level == "O1" and found is torch.float32  # operators cast it, as with half_weights=False
        if found is not wanted and not is_same:
            raise RuntimeError(
                f"prepare(): FSDP gathers {name!r} in {dtype_name(found)}, and level {level} keeps it in "
                f"{dtype_name(wanted)}; shard the float32 model by precision.shard(model)"
            )
