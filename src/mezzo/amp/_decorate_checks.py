"""Checks of the arguments of `decorate`; all of them run before anything is changed."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from mezzo.amp.user_lines import level_of_user
from mezzo.dtypes import HALF_DTYPES, dtype_name
from mezzo.optim import engine_of, is_dtensor, stored_master, unwrap_optimizer

T = TypeVar("T")

_SMALLEST_HALF = 2.0**-25  # half of the smallest float16 number: anything below rounds to 0


def parse_master_weight(master_weight: Any) -> str:
    """Return the kind of masters that `master_weight` asks for: `full`, `compact` or `none`.

    Raises:
        ValueError: It is not a bool, None or 'compact'.
    """
    if isinstance(master_weight, str) and master_weight == "compact":
        return "compact"
    if master_weight is None or isinstance(master_weight, bool):
        return "none" if master_weight is False else "full"
    raise ValueError(f"master_weight={master_weight!r}: must be True, False or 'compact'")


def parse_optimizer_state(optimizer_state: Any) -> torch.dtype | None:
    """Return the dtype of optimizer state that `optimizer_state` asks for; None if it is None.

    Raises:
        ValueError: It is not None, float32 or bfloat16.
    """
    for dtype in (torch.float32, torch.bfloat16):
        if optimizer_state is dtype or optimizer_state == dtype_name(dtype):
            return dtype
    if optimizer_state is None:
        return None
    raise ValueError(f"optimizer_state={optimizer_state!r}: must be 'float32' or 'bfloat16'")


def check_optimizer_state(dtype: torch.dtype | None, masters: str, optimizers: Sequence[Optimizer]) -> None:
    """Raise ValueError if bfloat16 state is asked for and impossible."""
    if dtype is not torch.bfloat16:
        return
    if not optimizers:
        raise ValueError("optimizer_state='bfloat16' without an optimizer: give the optimizer, too")
    if masters == "none":
        raise ValueError("optimizer_state='bfloat16' with master_weight=False: its updates need float32 masters")
    for optimizer in optimizers:
        # A wrapper, such as Accelerate's, passes the step on
        engine_of(unwrap_optimizer(optimizer)).refuse_half_state()


def as_list(value: Any, kind: type[T], argument: str) -> list[T]:
    """Return one object or a list of them as a list; raise TypeError for anything else."""
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    for item in items:
        if not isinstance(item, kind):
            raise TypeError(f"{argument}: must be a torch {kind.__name__} or a list of them, not {type(item).__name__}")
    return items


def refuse_wrapped(model: nn.Module, prefix: str) -> None:
    """Raise RuntimeError if a model, or a part of it, is wrapped for distributed training."""
    for name, module in model.named_modules():
        if isinstance(module, wrapper_types()):
            path = ".".join(part for part in (prefix, name) if part) or "the model itself"
            if any(map(is_dtensor, model.parameters())):
                raise RuntimeError(
                    "decorate() of a sharded model: the float32 shards of FSDP2 are the masters; use Precision.shard(model) "
                    f"and Precision.prepare(model, optimizer) instead; found {type(module).__name__} at {path}"
                )
            if type(module).__name__ == "FullyShardedDataParallel":
                raise RuntimeError(
                    "FullyShardedDataParallel (FSDP1) keeps several weights in one, so they cannot be half by layer; shard the "
                    f"plain model by Precision.shard(model), which uses FSDP2; found it at {path}"
                )
            raise RuntimeError(
                "call decorate() or Precision.prepare() first, then wrap with DistributedDataParallel; "
                f"found {type(module).__name__} at {path}"
            )


def wrapper_types() -> tuple[type, ...]:
    """Return the classes of distributed wrappers. FSDP that was never imported has no instances."""
    kinds: list[type] = [nn.DataParallel, nn.parallel.DistributedDataParallel]
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds += [getattr(fsdp, name) for name in ("FullyShardedDataParallel", "FSDPModule") if hasattr(fsdp, name)]
    return tuple(kinds)


def refuse_uninitialised(model: nn.Module) -> None:
    """Raise RuntimeError for lazy modules, and inside inference mode."""
    for name, param in model.named_parameters():
        if is_lazy(param):
            raise RuntimeError(f"{name!r} has no shape yet (a lazy module): run the model once, then decorate it")
        if torch.is_inference_mode_enabled() or param.is_inference():
            raise RuntimeError("decorate() prepares training: call it outside torch.inference_mode()")


def refuse_scripted(model: nn.Module) -> None:
    """Raise RuntimeError if a part of a model is a TorchScript module."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise RuntimeError(f"{name or 'the model'!r} is a TorchScript module: decorate the model, then script it")


def refuse_other_dtype(model: nn.Module, half: torch.dtype) -> None:
    """Raise RuntimeError if a parameter is already in the other half dtype."""
    for name, param in model.named_parameters():
        if param.dtype in HALF_DTYPES and param.dtype is not half:
            raise RuntimeError(
                f"{name!r} is {dtype_name(param.dtype)} already; decorate was called with {dtype_name(half)}"
            )


def refuse_sharded(models: Iterable[nn.Module]) -> None:
    """Raise RuntimeError if a parameter is a DTensor: it cannot have a compact master."""
    for name, param in (named for model in models for named in model.named_parameters()):
        if is_dtensor(param):
            raise RuntimeError(
                f"master_weight='compact': {name!r} is a DTensor, which needs a full master; use master_weight=True"
            )


def refuse_other_masters(models: Iterable[nn.Module], masters: str) -> None:
    """Raise RuntimeError if a parameter has a master of another kind than `master_weight` asks for.

    `master_weight=False` does not drop masters: the weights would lose small updates made so far.
    """
    for name, param in (named for model in models for named in model.named_parameters()):
        kept = stored_master(param)
        has = None if kept is None else "full" if kept.is_floating_point() else "compact"
        if has is not None and masters == "none":
            raise RuntimeError(
                f"master_weight=False: {name!r} has a {has} master already; leave master_weight out to go on with it, or call "
                "model.float() first"
            )
        if has is not None and has != masters:
            raise RuntimeError(f"{name!r} has a {has} master already; master_weight asks for a {masters} one")


def ids_of_parameters(excluded: Iterable[nn.Parameter], models: Iterable[nn.Module]) -> set[int]:
    """Return the ids of `excluded_parameters`; raise unless they are parameters of the models."""
    known = {id(param) for model in models for param in model.parameters()}
    for param in (chosen := list(excluded)):
        if not isinstance(param, nn.Parameter):
            raise TypeError(
                f"excluded_parameters: {type(param).__name__} is not a Parameter; names go into excluded_layers"
            )
        if id(param) not in known:
            raise ValueError(
                f"excluded_parameters: the parameter of shape {list(param.shape)} is in none of the models"
            )
    return {id(param) for param in chosen}


def warn_about_foreign_optimizers(models: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> None:
    """Warn about optimizers that have no parameter of the models."""
    known = {id(param) for model in models for param in model.parameters()}
    for optimizer in optimizers:
        if not any(id(param) in known for group in optimizer.param_groups for param in group["params"]):
            warnings.warn(
                f"this {type(optimizer).__name__} has no parameter of the models given; build it from their "
                "parameters()",
                UserWarning,
                stacklevel=level_of_user(),
            )


def warn_about_vanishing_eps(optimizers: Iterable[Optimizer]) -> None:
    """Warn if an optimizer's `eps` rounds to 0 in float16: without float32 masters it may divide by zero."""
    for optimizer in optimizers:
        eps = {group["eps"] for group in optimizer.param_groups if isinstance(group.get("eps"), float)}
        if any(0 < value < _SMALLEST_HALF for value in eps):
            warnings.warn(
                f"decorate(master_weight=False): eps={min(eps)} of this {type(optimizer).__name__} is 0 in float16, so its "
                "updates become NaN; keep the float32 masters, use bfloat16, or give eps=1e-4",
                UserWarning,
                stacklevel=3,
            )
