"""bfloat16 optimizer state: which optimizers can have it, and converting what an optimizer has."""

from __future__ import annotations

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
        odd = [key for key in ("amsgrad", "differentiable") if group.get(key)]
        odd += ["dampening"] if group.get("dampening") and group["momentum"] else []
        if odd or not _fused.covers_options(group):
            found = odd[0] if odd else "a tensor as weight_decay or betas"
            raise ValueError(
                f"optimizer_state='bfloat16': this {name} has {found}; leave that out, or use float32 state"
            )


def convert_state(optimizer: Optimizer, dtype: torch.dtype) -> None:
    """Convert the state of all parameters that are updated in float32; from float32 by rounding to nearest."""
    for param, state in optimizer.state.items():
        if not isinstance(state, dict) or not isinstance(param, Tensor):
            continue
        if param.dtype is not torch.float32 and stored_master(param) is None:
            continue
        for key in _MOMENTS:
            value = state.get(key)
            if isinstance(value, Tensor) and value.dtype in (torch.float32, STATE_DTYPE):
                state[key] = value.to(dtype)
