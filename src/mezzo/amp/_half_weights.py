"""The parameters and buffers of a decorated model: which become half, which stay or become float32."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo._torch.layers import BatchNorm, ConvNd, InstanceNorm
from mezzo.amp._steps import expect_no_master
from mezzo.dtypes import HALF_DTYPES
from mezzo.optim import attach_master, detach_master, master_of, stored_master


def cast_model(
    model: nn.Module,
    level: str,
    half: torch.dtype,
    excluded: Iterable[nn.Module],
    excluded_parameters: set[int],
    *,
    masters: str,
    master_grad: bool,
) -> list[nn.Parameter]:
    """Cast the parameters of a model as a level says.

    Returns:
        The half parameters that became float32, because the level keeps them in float32.
    """
    chosen = half_parameters(model, level, half, excluded) - excluded_parameters
    widened: list[nn.Parameter] = []
    for param in model.parameters():
        if id(param) not in chosen:
            if param.dtype is half:  # made half by hand, or by another level
                _widen_parameter(param)
                widened.append(param)
        elif param.dtype in (torch.float32, half):
            _cast_parameter(param, half, masters, master_grad)
    _widen_buffers(model, half)
    return widened


def half_parameters(model: nn.Module, level: str, half: torch.dtype, excluded: Iterable[nn.Module]) -> set[int]:
    """Return the ids of the parameters that a level makes half."""
    kept_modules = {id(module) for layer in excluded for module in layer.modules()}
    kept_modules |= {id(module) for module in model.modules() if _keeps_float32(module, half)}
    # Tied weights are one object: a parameter shared with a module that stays float32 stays float32.
    kept = {id(param) for m in model.modules() if id(m) in kept_modules for param in _own_parameters(m, "O2")}
    return {id(param) for m in model.modules() for param in _own_parameters(m, level)} - kept


def _keeps_float32(module: nn.Module, half: torch.dtype) -> bool:
    """Whether a module's own parameters stay float32 at O2."""
    if isinstance(module, BatchNorm):
        return True
    return half is torch.float16 and isinstance(module, (nn.LayerNorm, InstanceNorm))


def _own_parameters(module: nn.Module, level: str) -> list[nn.Parameter]:
    """Return a module's own parameters that a level may cast."""
    if level == "O1" and not isinstance(module, (nn.Linear, ConvNd)):
        return []
    return [param for param in module._parameters.values() if param is not None]


@torch.no_grad()
def _cast_parameter(param: nn.Parameter, half: torch.dtype, masters: str, master_grad: bool) -> None:
    """Make a parameter half in place, so that optimizers that hold it stay valid."""
    if param.dtype is torch.float32:
        value, grad = param.data, param.grad
        param.grad = None
        param.data = value.to(half)
        if masters != "none":
            attach_master(param, value, compact=masters == "compact")
        if grad is not None:
            param.grad = grad.to(half)
    elif masters != "none" and stored_master(param) is None and param.requires_grad:
        # A frozen half weight, such as the base model of LoRA, has no other bits to keep
        attach_master(param, compact=masters == "compact")
    if masters == "none":
        expect_no_master(param)
    if master_grad:
        param.grad_dtype = torch.float32


@torch.no_grad()
def _widen_parameter(param: nn.Parameter) -> None:
    """Make a half parameter float32 in place, with the value of its master if it has one."""
    master, grad = master_of(param), param.grad
    detach_master(param)
    param.grad = None
    param.data = param.data.float() if master is None else master
    if grad is not None:
        param.grad = grad.float()


def _widen_buffers(model: nn.Module, half: torch.dtype) -> None:
    """Make half buffers float32: rotary frequencies, positions and masks are silently wrong in half."""
    wide: dict[int, Tensor] = {}  # a buffer that two modules share stays shared
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype is half:
                master = master_of(buffer)  # of a decorated model that was converted by hand
                module._buffers[name] = wide.setdefault(id(buffer), buffer.float() if master is None else master)


def widen_state(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> None:
    """Cast an optimizer's half state to float32 for parameters that became float32."""
    for state in (optimizer.state[param] for param in params if param in optimizer.state):
        state.update({key: t.float() for key, t in state.items() if isinstance(t, Tensor) and t.dtype in HALF_DTYPES})
