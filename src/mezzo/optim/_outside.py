"""Steps are not affected by autocast: a step inside `auto_cast` equals the same step outside."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from mezzo._torch.autocast_state import is_any_autocast_enabled
from mezzo._torch.dispatcher import AUTOCAST_KEYS, DispatchKey, ExcludeKeys, exclude_key, is_key_excluded

_DISPATCH_KEYS = (DispatchKey.AutocastCPU, DispatchKey.AutocastCUDA)
_NOTHING = nullcontext()


def outside_autocast(device_type: str = "cuda") -> AbstractContextManager[Any]:
    """Return a context in which no operator is cast; nearly free outside of a region.

    Args:
        device_type: In a compiled function only operators on this kind of device are exempt.
    """
    if not is_any_autocast_enabled():
        return _NOTHING
    # Not is_compiling(): that is True in every thread while one of them compiles.
    if torch.compiler.is_dynamo_compiling():  # Dynamo traces this one, not the guard
        return torch.autocast(device_type, enabled=False)
    guard: AbstractContextManager[Any] = ExcludeKeys(AUTOCAST_KEYS)
    return guard


def forget_casts() -> None:
    """Drop the half copies of weights that autocast caches.

    A step inside the region changed the weights.
    """
    if is_any_autocast_enabled():
        torch.clear_autocast_cache()


def keep_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that keeps the current autocast state inside `outside_autocast()`.

    For closures: the user's forward pass runs in the region where `optimizer.step(closure)` was
    called.
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
