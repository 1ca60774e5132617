"""Casts of the inputs and results of an operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from mezzo._torch.dispatcher import DispatchKey, is_key_included
from mezzo._torch.script import tracing_state
from mezzo.amp._policy import CASTABLE
from mezzo.amp._state import thread_state

TRANSFORMS = DispatchKey.FuncTorchDynamicLayerBackMode
"""Included while a transform of torch.func runs."""


def cast_arguments(
    slots: Sequence[int], args: Sequence[Any], dtype: torch.dtype, spare_scalars: bool = False
) -> list[Any]:
    """Return arguments with those at `slots` cast; `spare_scalars` leaves 0-dim tensors as they are."""
    args = list(args)
    for slot in slots:
        if slot < len(args):
            args[slot] = _cast_but_scalars(args[slot], dtype) if spare_scalars else _cast(args[slot], dtype)
    return args


def cast_outputs(outputs: Any, dtype: torch.dtype, *, only_first: bool) -> Any:
    """Return the result of an operator, one tensor or several, in a dtype."""
    if isinstance(outputs, Tensor):
        return _cast(outputs, dtype)
    if only_first:  # norms also return statistics, which stay float32
        return (_cast(outputs[0], dtype), *outputs[1:])
    return tuple(_cast(output, dtype) for output in outputs)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return a tensor, or a list of tensors, in a dtype; anything else is returned unchanged."""
    if isinstance(value, Tensor):
        if value.dtype not in CASTABLE or value.dtype is dtype:
            return value
        is_weight = type(value) is Parameter and value.requires_grad and dtype is not torch.float32
        return _cast_weight(value, dtype) if is_weight else value.to(dtype)
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype) for item in value]
    return value


def _cast_but_scalars(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return [_cast_but_scalars(item, dtype) for item in value]
    return value if isinstance(value, Tensor) and value.dim() == 0 else _cast(value, dtype)


def _cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a float32 weight in half; like torch's autocast, cast it once per region.

    A weight that changed in place is cast again. An edit of `weight.data` is not noticed, as in torch. A copy made
    without gradients is not reused where gradients are needed; torch does reuse it. A trace gets the weight itself.
    """
    is_kept = torch.is_autocast_cache_enabled() and thread_state.regions and not weight.is_inference()
    if not is_kept or is_key_included(TRANSFORMS) or tracing_state() is not None:
        return weight.to(dtype)
    key = (id(weight), dtype, torch.is_grad_enabled())
    state = (weight._version, weight.data_ptr())
    kept = thread_state.casts.get(key)
    if kept is None or kept[1] != state:
        cast = weight.to(dtype)
        if type(cast) is not Tensor:  # made by a mode such as FakeTensorMode: useless outside of it
            return cast
        kept = thread_state.casts[key] = (weight, state, cast)
    found: Tensor = kept[2]
    return found
