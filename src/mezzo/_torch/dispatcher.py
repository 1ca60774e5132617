"""torch's dispatcher: its keys, which of them this thread excludes, and kernels of operators.

Why: the kernels of `mezzo.amp` sit on the autocast keys. They ask what torch has there itself, call
an operator with autocast off inside, and call what was there before them.
Releases: 2.11 to 2.15.
Without it: no policy of mezzo's own. Only what torch's autocast decides by itself would be left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

__all__ = [
    "AUTOCAST_KEYS",
    "BINDINGS",
    "DispatchKey",
    "DispatchKeySet",
    "ExcludeKeys",
    "OpOverload",
    "OpOverloadPacket",
    "all_operator_names",
    "below_autograd",
    "call_at_key",
    "call_below_autograd",
    "exclude_key",
    "has_kernel",
    "is_key_excluded",
    "is_key_included",
    "keys_after",
    "keys_of",
    "overload_binding",
]

DispatchKey = torch._C.DispatchKey
DispatchKeySet = torch._C.DispatchKeySet

ExcludeKeys = torch._C._ExcludeDispatchKeyGuard
"""A context in which the keys of a set are switched off in this thread."""
AUTOCAST_KEYS = DispatchKeySet(DispatchKey.AutocastCPU) | DispatchKeySet(DispatchKey.AutocastCUDA)
# torch keeps "autocast is on" as "its key is not excluded": inside a kernel of a key that key is
# known to be on.
exclude_key = torch._C._dispatch_tls_set_dispatch_key_excluded
is_key_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
is_key_included = torch._C._dispatch_tls_is_dispatch_key_included

has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
all_operator_names = torch._C._dispatch_get_all_op_names
keys_after = torch._C._dispatch_keyset_full_after
keys_of = torch._C._dispatch_keys

below_autograd = torch._C._AutoDispatchBelowAutograd
"""A context in which autograd records nothing."""
_after_autograd = torch._C._after_autograd_keyset

BINDINGS: tuple[Any, ...] = (torch._C._VariableFunctions, torch._C._nn)
"""Where the Python bindings of operators are: calling one takes half the time of calling the
overload."""


def call_below_autograd(operator: Any, keys: Any, args: Sequence[Any]) -> Any:
    """Call an operator below autograd, from its autograd kernel, which was called with `keys`."""
    with below_autograd():
        return operator.redispatch(keys & _after_autograd, *args)


def call_at_key(overload: Any, key: Any) -> Callable[..., Any]:
    """Return a function that calls the kernel which an overload has at one key."""
    return lambda *args, **kwargs: overload._op_dk(key, *args, **kwargs)


def overload_binding(function: Any) -> Callable[..., Any]:
    """Return what the `__call__` of an overload calls; anything else comes back unchanged."""
    binding: Callable[..., Any] = getattr(function, "_op", function)
    return binding
