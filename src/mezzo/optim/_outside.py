"""Arithmetic of ours that no autocast region may touch: a step inside `auto_cast` equals the same step outside."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_C = torch._C
_DISPATCH_KEYS = (_C.DispatchKey.AutocastCPU, _C.DispatchKey.AutocastCUDA)
_KEYS = _C.DispatchKeySet(_DISPATCH_KEYS[0]) | _C.DispatchKeySet(_DISPATCH_KEYS[1])
_exclude, _is_excluded = _C._dispatch_tls_set_dispatch_key_excluded, _C._dispatch_tls_is_dispatch_key_excluded
_ExcludeKeys = _C._ExcludeDispatchKeyGuard
_is_any_autocast_on = getattr(_C, "_is_any_autocast_enabled", lambda: True)  # True is right, too, only slower
_NOTHING = nullcontext()


def outside_autocast(device_type: str = "cuda") -> AbstractContextManager[Any]:
    """Return a context in which no operator is cast; outside of a region it costs next to nothing.

    Args:
        device_type: In a compiled function operators on this kind of device are not cast, and others are.
    """
    if not _is_any_autocast_on():
        return _NOTHING
    # Not is_compiling(): that is True in every thread while one of them compiles.
    if torch.compiler.is_dynamo_compiling():  # Dynamo traces this one, not the guard
        return torch.autocast(device_type, enabled=False)
    guard: AbstractContextManager[Any] = _ExcludeKeys(_KEYS)
    return guard


def forget_casts() -> None:
    """Forget half copies that autocast keeps of float32 weights: a step changed the weights inside the region."""
    if _is_any_autocast_on():
        torch.clear_autocast_cache()


def keep_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs under the autocast state of now, also when called inside `outside_autocast()`.

    For closures: the user's forward pass sees the region in which the user called `optimizer.step(closure)`.
    """
    wanted = [_is_excluded(key) for key in _DISPATCH_KEYS]

    def run(*args: Any, **kwargs: Any) -> Any:
        found = [_is_excluded(key) for key in _DISPATCH_KEYS]
        _set_excluded(wanted)
        forget_casts()  # LBFGS moves the weights between two evaluations
        try:
            return function(*args, **kwargs)
        finally:
            _set_excluded(found)

    return run


def _set_excluded(states: list[bool]) -> None:
    for key, is_out in zip(_DISPATCH_KEYS, states, strict=True):
        _exclude(key, is_out)
