"""Warns, once per optimizer, of steps on half weights without masters: small updates are lost."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mezzo._torch.optimizers import wrap_loading_of_state
from mezzo.amp.user_lines import level_of_user
from mezzo.dtypes import HALF_DTYPES
from mezzo.optim import (
    describe_parameter,
    find_engine,
    float32_like,
    forget_casts,
    has_master,
    is_dtensor,
    stored_master,
)

_SHARDED = (
    "fully_shard() replaced half parameters of a decorated model and left their float32 masters behind; shard the "
    "float32 model with precision.shard(model), then prepare it"
)
_EXPECTED = "_mezzo_has_no_master"

_checked: WeakSet[Optimizer] = WeakSet()
"""Optimizers that were checked; forgotten when another model is decorated."""

_without_masters: WeakSet[Optimizer] = WeakSet()
"""Optimizers of half parameters without masters: worth a warning only when a scaler steps them."""


def expect_no_master(param: Tensor) -> None:
    """Note that a parameter has no master on purpose."""
    setattr(param, _EXPECTED, True)


def check_again() -> None:
    """Check the next step of every optimizer: a model was decorated."""
    _checked.clear()
    _without_masters.clear()


@functools.cache
def watch_optimizers() -> None:
    """Install the hooks of this module, once per process."""
    register_optimizer_step_pre_hook(_look_at_step)
    register_optimizer_step_post_hook(_forget_casts)
    wrap_loading_of_state(_for_master)


def _for_master(load_value: Callable[..., Any]) -> Callable[..., Any]:
    def load_value_for_master(param: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Its state is float32, and torch would round it to the parameter's dtype
        kept = stored_master(param)
        return load_value(param if kept is None else float32_like(kept), *args, **kwargs)

    return load_value_for_master


def _forget_casts(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Drop torch's half copies of weights: a step inside a region changed the weights."""
    if not is_dynamo_compiling():
        forget_casts()


def _look_at_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    warn_if_masters_are_missing(optimizer, is_by_scaler=False)


def warn_if_masters_are_missing(optimizer: Optimizer, *, is_by_scaler: bool) -> None:
    """Warn, once per optimizer, of a step that updates half weights without float32 masters.

    Args:
        optimizer: The one that is about to step.
        is_by_scaler: Whether `GradScaler.step` takes the step. Plain steps of half parameters that
            never had masters are torch's usual way, and no reason for a warning.
    """
    if is_dynamo_compiling() or optimizer in _checked:
        return
    if optimizer in _without_masters and not is_by_scaler:
        return
    engine = find_engine(optimizer)
    is_attached = engine is not None and engine.attached
    params: list[Tensor] = [param for group in optimizer.param_groups for param in group["params"]]
    bare = [param for param in params if param.dtype in HALF_DTYPES and not has_master(param)]
    if any(is_dtensor(param) for param in bare):
        advice = _SHARDED
    elif any(has_master(param) for param in params):
        advice = _without_master(optimizer, bare) if is_attached else _bypassed(optimizer)
    elif bare:
        if not is_by_scaler and not is_attached:
            _without_masters.add(optimizer)
            return  # a step through a scaler may follow
        advice = "" if is_attached else _without_master(optimizer, bare)
    else:
        advice = ""
    _checked.add(optimizer)
    if advice:
        warnings.warn(advice, UserWarning, stacklevel=level_of_user())


def _bypassed(optimizer: Optimizer) -> str:
    return (
        f"{type(optimizer).__name__}.step() updates half weights without their float32 masters; pass the optimizer to "
        "mezzo.amp.decorate(models, optimizers) before an object such as apex's LARC wraps it, or step it through "
        "scaler.step(optimizer)"
    )


def _without_master(optimizer: Optimizer, bare: list[Tensor]) -> str:
    """Return the advice for float16 parameters without a master, which were made half by hand.

    Nothing for others.
    """
    lost = {id(p) for p in bare if p.dtype is torch.float16 and p.grad is not None and not hasattr(p, _EXPECTED)}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    index = next((index for index, param in enumerate(params) if id(param) in lost), None)
    if index is None:
        return ""
    return (
        "scaler.step(optimizer) updates float16 parameters without float32 masters, the first is "
        f"{describe_parameter(optimizer, index)}: small updates are lost, and those of Adam become NaN; leave the model in "
        "float32 and call mezzo.amp.decorate(model, optimizer), after the last layer was put in"
    )
