"""Arithmetic of ours that no autocast region may touch: a step inside `auto_cast` equals the same step outside."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from mezzo._torch.autocast_state import is_any_autocast_enabled
from mezzo._torch.dispatcher import DispatchKey, DispatchKeySet, ExcludeKeys, exclude_key, is_key_excluded

_DISPATCH_KEYS = (DispatchKey.AutocastCPU, DispatchKey.AutocastCUDA)
_KEYS = DispatchKeySet(_DISPATCH_KEYS[0]) | DispatchKeySet(_DISPATCH_KEYS[1])
_NOTHING = nullcontext()


def outside_autocast(device_type: str = "cuda") -> AbstractContextManager[Any]:
    """Return a context in which no operator is cast; outside of a region it costs next to nothing.

    Args:
        device_type: In a compiled function operators on this kind of device are not cast, and others are.
    """
    if not is_any_autocast_enabled():
        return _NOTHING
    # Not is_compiling(): that is True in every thread while one of them compiles.
    if torch.compiler.is_dynamo_compiling():  # Dynamo traces this one, not the guard
        return torch.autocast(device_type, enabled=False)
    guard: AbstractContextManager[Any] = ExcludeKeys(_KEYS)
    return guard


def forget_casts() -> None:
    """Forget half copies that autocast keeps of float32 weights: a step changed the weights inside the region."""
    if is_any_autocast_enabled():
        torch.clear_autocast_cache()


def keep_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs under the autocast state of now, also when called inside `outside_autocast()`.

    For closures: the user's forward pass sees the region in which the user called `optimizer.step(closure)`.
    """
    wanted = [is_key_excluded(key) for key in _DISPATCH_KEYS]

    def run(*args: Any, **kwargs: Any) -> Any:
        found = [is_key_excluded(key) for key in _DISPATCH_KEYS]
        _set_excluded(wanted)
        forget_casts()  # LBFGS moves the weights between two evaluations
        try:
            return function(*args, **kwargs)
        finally:
            _set_excluded(found)

    return run


def _set_excluded(states: list[bool]) -> None:
    for key, is_out in zip(_DISPATCH_KEYS, states, strict=True):
        exclude_key(key, is_out)
