"""bfloat16 optimizer state: which optimizers can have it, and converting what an optimizer has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.optim import _fused
from mezzo.optim._masters import stored_master
from mezzo.optim._rounding import STATE_DTYPE

_MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq")


def refuse_half_state(optimizer: Optimizer, *, has_own_step: bool) -> None:
    """Raise ValueError if an optimizer cannot have bfloat16 state.

    Args:
        optimizer: Any torch optimizer.
        has_own_step: Whether the user put a step of their own on the object.
    """
    name = type(optimizer).__name__
    if has_own_step or not _fused.covers_class(optimizer):
        reason = "has a step of its own" if has_own_step else "rounds its own state"
        raise ValueError(
            f"optimizer_state='bfloat16': this {name} {reason}; it works with SGD, Adam and AdamW of torch"
        )
    for group in optimizer.param_groups:
        if any(param.is_complex() for param in group["params"]):
            raise ValueError(f"optimizer_state='bfloat16': this {name} has complex parameters; use float32 state")
        odd = [key for key in ("amsgrad", "differentiable") if group.get(key)]
        odd += ["dampening"] if group.get("dampening") and group["momentum"] else []
        if odd or not _fused.covers_options(group):
            found = odd[0] if odd else "a tensor as weight_decay or betas"
            raise ValueError(
                f"optimizer_state='bfloat16': this {name} has {found}; leave that out, or use float32 state"
            )


def stored_dtype(optimizer: Optimizer) -> torch.dtype:
    """Return bfloat16 if an optimizer has bfloat16 state already, otherwise float32.

    `copy.deepcopy` and pickle copy the state of an optimizer, and nothing else that mezzo keeps.
    """
    if not _fused.covers_class(optimizer):
        return torch.float32
    found = {
        value.dtype
        for param, state in optimizer.state.items()
        if _is_updated_in_float32(param) and isinstance(state, dict)
        for key, value in state.items()
        if key in _MOMENTS and isinstance(value, Tensor)
    }
    return STATE_DTYPE if STATE_DTYPE in found else torch.float32


def _is_updated_in_float32(param: Any) -> bool:
    if not isinstance(param, Tensor):
        return False
    return param.dtype is torch.float32 or stored_master(param) is not None


def convert_state(optimizer: Optimizer, dtype: torch.dtype) -> None:
    """Convert the state of all parameters that are updated in float32; from float32 by rounding to nearest."""
    for param, state in optimizer.state.items():
        if not isinstance(state, dict) or not _is_updated_in_float32(param):
            continue
        for key in _MOMENTS:
            value = state.get(key)
            if isinstance(value, Tensor) and value.dtype in (torch.float32, STATE_DTYPE):
                state[key] = value.to(dtype)
