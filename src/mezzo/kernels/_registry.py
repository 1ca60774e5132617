"""The one way in which mezzo registers an operator of its own with torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from mezzo._torch.dispatcher import AUTOCAST_KEYS, ExcludeKeys
from mezzo._torch.functorch import innermost_transform

Function = Callable[..., Any]

_names: dict[Any, str] = {}


def register(
    *, fake: Function, setup_context: Function | None = None, backward: Function | None = None
) -> Callable[[Function], Any]:
    """Return a decorator that registers a function as the operator `mezzo::NAME`.

    Eager mode, AOTAutograd and Inductor all call the operator, so one kernel serves the three. The
    function gets plain tensors and must not return one of its inputs. Autocast never changes its
    inputs, nor what it computes: who calls it decides the dtypes.

    Args:
        fake: The same signature; returns empty tensors with shape, dtype and strides of the result.
        setup_context: Stores what the backward needs, as in `torch.library.register_autograd`.
        backward: Returns the gradients of the inputs; it may call other operators of this package.
    """

    def decorate(function: Function) -> Any:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with ExcludeKeys(AUTOCAST_KEYS):
                return function(*args, **kwargs)

        schema = torch.library.infer_schema(function, mutates_args=())
        operator = torch.library.custom_op(f"mezzo::{function.__name__}", run, mutates_args=(), schema=schema)
        _names[operator] = function.__name__
        operator.register_fake(fake)
        if backward is not None:
            operator.register_autograd(backward, setup_context=setup_context)
        return operator

    return decorate


def operator_name(operator: Any) -> str:
    """Return the name of a registered operator, such as `enlarge_bilinear`."""
    name: str = _names[operator]
    return name


def has_rules(*tensors: Tensor) -> bool:
    """Whether registered operators can take tensors while a captured graph is traced.

    They have no rules for `torch.func`, nor for tensors that hold others, such as DTensors. They would drop derivatives
    in forward mode without a message. These are asked for at level 0, the only one: by default `unpack_dual` reads the
    level of a Python region, and there is none while a graph is traced.
    """
    if innermost_transform() is not None or any(hasattr(tensor, "__tensor_flatten__") for tensor in tensors):
        return False
    return all(unpack_dual(tensor, level=0).tangent is None for tensor in tensors)
