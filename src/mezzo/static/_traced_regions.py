"""`auto_cast` regions inside a function that is captured: they become markers in its graph.

Dynamo leaves the code of `auto_cast` alone, so with `fullgraph=True` a region is an error. While a function with regions
is called, `auto_cast` has methods that Dynamo can trace. They write two markers, with the policy's key, around what runs
inside. The markers run when the graph is traced into operators, and the casts of the region's policy get into the graph.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mezzo.amp import Policy, auto_cast
from mezzo.amp._cpu import emulates
from mezzo.static import _region

_OWN = {name: getattr(auto_cast, name) for name in ("__init__", "__enter__", "__exit__")}

_regions: dict[str, auto_cast] = {}
"""By key; the key says everything that the casts depend on, because compile caches see nothing else."""


def _region_key(*args: Any, **kwargs: Any) -> str:
    """Return the key of the region that `auto_cast(*args, **kwargs)` is; Dynamo takes it as a constant."""
    region = object.__new__(auto_cast)
    _OWN["__init__"](region, *args, **kwargs)
    policy = region._state.policy
    off = "off" if policy is None else "emulated" if emulates(policy) else "native"
    return _keep(f"{region.policy.digest} {off}", region)


def _policy_key(level: str, dtype: torch.dtype, *rest: Any) -> str:
    """Return the key of the region of a policy with these fields."""
    return _region_key(policy=Policy(level, dtype, *rest))


def _keep(key: str, region: auto_cast) -> str:
    _regions[key] = region
    return key


def enter_region(key: str) -> None:
    """Enter a region from here on: a marker."""
    region = _regions[key]
    _OWN["__enter__"](region)
    _region._here.open.append(region)


def leave_region() -> None:
    """Undo `enter_region`."""
    if _region._here.open:
        _OWN["__exit__"](_region._here.open.pop(), None, None, None)


@functools.cache
def _show_to_dynamo() -> None:
    import torch._dynamo

    for constant in (_region_key, _policy_key):
        torch._dynamo.assume_constant_result(constant)
    for marker in (enter_region, leave_region):
        torch.compiler.allow_in_graph(marker)


# What Dynamo traces. Other threads may call these for real while a function is captured here.


def _traced_init(self: Any, *args: Any, policy: Policy | None = None, **kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        _OWN["__init__"](self, *args, **({} if policy is None else {"policy": policy}), **kwargs)
    elif policy is None:
        self.policy = _region_key(*args, **kwargs)
    else:
        lists = (policy.white, policy.black, policy.inside)
        self.policy = _policy_key(
            policy.level, policy.dtype, *lists, policy.use_promote, policy.cpu_compute, policy.fp8
        )


def _traced_enter(self: Any) -> Any:
    if not torch.compiler.is_compiling():
        return _OWN["__enter__"](self)
    enter_region(self.policy)
    return self


def _traced_exit(self: Any, *error: Any) -> None:
    if not torch.compiler.is_compiling():
        _OWN["__exit__"](self, *error)
    else:
        leave_region()


_TRACED = {"__init__": _traced_init, "__enter__": _traced_enter, "__exit__": _traced_exit}
_lock = threading.Lock()
_uses = 0


def _change_uses(by: int) -> None:
    global _uses
    with _lock:
        _uses += by
        if _uses in (0, by):  # the first one in, or the last one out
            for name, method in (_TRACED if _uses else _OWN).items():
                setattr(auto_cast, name, method)


@contextmanager
def regions_traced() -> Iterator[None]:
    """Inside, Dynamo can trace `with auto_cast(...)`; what runs for real does so as before."""
    _show_to_dynamo()
    _change_uses(1)
    try:
        yield
    finally:
        _change_uses(-1)
