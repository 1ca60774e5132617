"""`auto_cast` regions inside a function that is captured: they become markers in its graph.

Dynamo does not trace `auto_cast`, so with `fullgraph=True` a region is an error. While a function
with regions is called, `auto_cast` has other methods, which Dynamo can trace. They put two markers,
with the policy's key, around the calls inside. The markers run while the graph is traced into
operators, so the graph contains the casts of the region's policy.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mezzo._torch.dynamo import take_as_constants
from mezzo.amp import Policy, auto_cast
from mezzo.static import _region

_OWN = {name: getattr(auto_cast, name) for name in ("__init__", "__enter__", "__exit__")}

_regions: dict[str, auto_cast] = {}
"""By key, which holds everything that the casts depend on: compile caches see only the key."""


def _region_key(*args: Any, **kwargs: Any) -> str:
    """Return the key of the region `auto_cast(*args, **kwargs)`; Dynamo takes it as a constant."""
    region = object.__new__(auto_cast)
    _OWN["__init__"](region, *args, **kwargs)
    return _keep(region.key(), region)


def _policy_key(fields: tuple[Any, ...], *args: Any, **kwargs: Any) -> str:
    """Return the key of a region whose `policy` has these fields.

    Dynamo cannot take a policy as a constant.
    """
    return _region_key(*args, policy=Policy(*fields), **kwargs)


def _keep(key: str, region: auto_cast) -> str:
    _regions[key] = region
    return key


def enter_region(key: str) -> None:
    """Enter a region from here on; this is a marker."""
    region = _regions[key]
    _OWN["__enter__"](region)
    _region.thread_state.open.append(region)


def leave_region() -> None:
    """Undo `enter_region`."""
    if _region.thread_state.open:
        _OWN["__exit__"](_region.thread_state.open.pop(), None, None, None)


REGION_MARKERS = (enter_region, leave_region)


@functools.cache
def _show_to_dynamo() -> None:
    take_as_constants((_region_key, _policy_key, _is_captured_here))
    for marker in REGION_MARKERS:
        torch.compiler.allow_in_graph(marker)


class _ThreadState(threading.local):
    captures = 0
    """Number of active calls of functions with regions in this thread."""


_thread_state = _ThreadState()


def _is_captured_here() -> bool:
    return _thread_state.captures > 0


# Dynamo traces these methods. Meanwhile, untraced code may call them too, and other threads may
# compile other functions. `is_dynamo_compiling` is True only in traced code; `is_compiling` is True
# in every thread while one of them compiles (torch 2.13).


def _traced_init(self: Any, *args: Any, policy: Policy | None = None, **kwargs: Any) -> None:
    if not (torch.compiler.is_dynamo_compiling() and _is_captured_here()):
        _OWN["__init__"](self, *args, **({} if policy is None else {"policy": policy}), **kwargs)
    elif isinstance(policy, Policy):
        lists = (policy.white, policy.black, policy.inside)
        fields = (policy.level, policy.dtype, *lists, policy.use_promote, policy.cpu_compute, policy.fp8)
        self.policy = _policy_key(fields, *args, **kwargs)
    else:
        self.policy = _region_key(*args, policy=policy, **kwargs)


def _traced_enter(self: Any) -> Any:
    if not (torch.compiler.is_dynamo_compiling() and _is_captured_here()):
        return _OWN["__enter__"](self)
    enter_region(self.policy)
    return self


def _traced_exit(self: Any, *error: Any) -> None:
    if not (torch.compiler.is_dynamo_compiling() and _is_captured_here()):
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
        if _uses in (0, by):  # the first use begins, or the last one ends
            for name, method in (_TRACED if _uses else _OWN).items():
                setattr(auto_cast, name, method)


@contextmanager
def regions_traced() -> Iterator[None]:
    """Inside, Dynamo can trace `with auto_cast(...)`; code that is not traced runs as before."""
    _show_to_dynamo()
    _change_uses(1)
    _thread_state.captures += 1
    try:
        yield
    finally:
        _thread_state.captures -= 1
        _change_uses(-1)
