"""`model.half()`, `.to(dtype)` and `.float()` on a decorated model keep its float32 values."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mezzo._torch.module_calls import wrap_conversions
from mezzo.amp._decorated import Decoration, decoration_of
from mezzo.amp.user_lines import level_of_user
from mezzo.dtypes import HALF_DTYPES, dtype_name
from mezzo.optim import attach_master, detach_master, has_master, master_of, stored_master


class _Before(NamedTuple):
    dtype: torch.dtype
    value: Tensor
    """float32: the tensor itself, or its master."""
    had_master: bool
    is_compact: bool


@functools.cache
def follow_conversions() -> None:
    """Make modules of decorated models keep float32 values when their dtype changes; once per process."""
    wrap_conversions(_with_masters)


def _with_masters(apply: Callable[..., Any]) -> Callable[..., Any]:
    def apply_with_masters(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        decoration = decoration_of(module)
        if decoration is None:
            return apply(module, *args, **kwargs)
        before = {key: _look_at(tensor) for key, tensor in _own(module).items()}
        result = apply(module, *args, **kwargs)
        with torch.no_grad():
            for key, tensor in _own(module).items():
                if key in before:
                    _settle(module, decoration, tensor, before[key])
        return result

    return apply_with_masters


def _own(module: nn.Module) -> dict[tuple[str, str], Tensor]:
    kinds: dict[str, dict[str, Any]] = {"parameter": module._parameters, "buffer": module._buffers}
    return {
        (kind, name): tensor
        for kind, holder in kinds.items()
        for name, tensor in holder.items()
        if tensor is not None and tensor.dtype in (*HALF_DTYPES, torch.float32, torch.float64)
    }


def _look_at(tensor: Tensor) -> _Before:
    kept = stored_master(tensor)
    value = tensor.detach() if kept is None else master_of(tensor)
    assert value is not None
    return _Before(tensor.dtype, value, kept is not None, kept is not None and not kept.is_floating_point())


def _settle(module: nn.Module, decoration: Decoration, tensor: Tensor, before: _Before) -> None:
    """Restore the float32 value of a converted tensor: as its master if it is half, otherwise as its value."""
    if tensor.dtype is before.dtype:
        if before.had_master and not has_master(tensor):  # torch replaced the tensor
            attach_master(tensor, before.value, compact=before.is_compact)
    elif tensor.dtype in HALF_DTYPES:
        decoration.half, decoration.looked_at = tensor.dtype, None
        if before.dtype not in HALF_DTYPES:
            attach_master(tensor, before.value)
            if module.training:
                _warn(module, decoration, tensor.dtype)
        elif before.had_master:
            tensor.copy_(before.value)  # rounded from float32, not from the other half dtype
            attach_master(tensor, before.value, compact=before.is_compact)
    elif before.dtype in HALF_DTYPES and before.had_master:
        tensor.copy_(before.value)
        detach_master(tensor)


def _warn(module: nn.Module, decoration: Decoration, half: torch.dtype) -> None:
    if decoration.has_warned_of_conversion:
        return
    decoration.has_warned_of_conversion = True
    warnings.warn(
        f"a decorated model was converted to {dtype_name(half)}: {type(module).__name__}, which decorate() keeps in float32, "
        "is half now (with a float32 master); leave out .half() or .to(dtype), or call decorate() again",
        UserWarning,
        stacklevel=level_of_user(),
    )
