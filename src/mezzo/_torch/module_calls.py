"""Calls and conversions of `nn.Module`.

Why: torch has no hook for some of them. Hooks of calls cost a microsecond, and TorchScript refuses
them. No hook sees `module.half()`, which would lose the float32 values of a decorated model. A call
with a variable of a static program must be written down before `nn.Module.__call__` runs.
Releases: 2.11 to 2.15.
Without it: no notes on calls outside of `auto_cast`, no masters after `.half()`, no static programs
with modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import nn

from mezzo._torch.dynamo import load_dynamo
from mezzo._torch.patches import Around, wrap_attribute

CALL_CODE = nn.Module._call_impl.__code__
"""Code of the function that `nn.Module.__call__` ends in: how a call of a module is known on the
stack."""

plain_call: Callable[[nn.Module], Callable[..., Any]] = attrgetter("_call_impl")
"""Return the call of a module with its hooks, past what `set_compiled_call` put there."""


def wrap_calls_of_class(kind: type[nn.Module], around: Around, mark: str) -> None:
    """Let `around` wrap the calls of a class's modules, unless it or a base class is marked."""
    call = kind._call_impl
    if hasattr(call, mark):
        return
    wrapped = functools.wraps(call)(around(call))
    setattr(wrapped, mark, True)
    kind._call_impl = wrapped  # type: ignore[method-assign]


def wrap_conversions(around: Around) -> None:
    """Let `around` wrap the method behind `module.half()`, `to()`, `float()` and `cuda()`."""
    wrap_attribute(nn.Module, "_apply", around)


def replace_call(call: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `nn.Module.__call__`; return the function before, for a second call that undoes it.

    Dynamo remembers `nn.Module.__call__` when it is imported, so it is imported first. If it remembered the replacement,
    it would take torch's own function for a patch from then on, and trace every call of a module in full.
    """
    load_dynamo()
    before: Callable[..., Any] = nn.Module.__call__
    nn.Module.__call__ = call  # type: ignore[method-assign]
    return before


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Let calls of a module go through a function, stored where `Module.compile` stores its own.

    Copies and pickles of the module do not contain it.
    """
    module._compiled_call_impl = call


def compiled_call(module: nn.Module) -> Any:
    """Return what `set_compiled_call` set, or `Module.compile`; None if neither was called."""
    return getattr(module, "_compiled_call_impl", None)
