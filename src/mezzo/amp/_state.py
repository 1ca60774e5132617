"""The active policy of a thread, and torch's autocast state that goes with it.

The policy lies in torch's own thread-local object store, because that store travels where autocast's state travels: into
the threads that autograd starts for a backward pass. A thread of the user's starts without a policy.
"""

import ctypes
import sys
import threading
from typing import Any, NamedTuple

import torch

from mezzo.amp._policy import Policy

_KEY = "mezzo.amp.policy"
_C = torch._C


def current_policy() -> Policy | None:
    """Return the policy of the innermost `auto_cast` region of this thread, None outside of one."""
    policy: Policy | None = _C._get_obj_in_tls(_KEY) if _C._is_key_in_tls(_KEY) else None
    return policy


def _stash_steals_a_reference() -> bool:
    """Whether torch's store takes a reference that it was not given (a fault of some releases: objects die too early)."""
    probe = object()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))  # one to lose; otherwise this one object is never freed
    before = sys.getrefcount(probe)
    _C._stash_obj_in_tls("mezzo.amp.probe", probe)
    stolen = sys.getrefcount(probe) == before
    _C._stash_obj_in_tls("mezzo.amp.probe", None)  # None never dies
    return stolen


_GIVE_A_REFERENCE = _stash_steals_a_reference()


class _Here(threading.local):
    """The same policy where Python finds it in half the time; autograd's threads have none here and ask the store."""

    policy: Any = None


here = _Here()


def set_policy(policy: Any) -> None:
    """Make a policy the one of this thread."""
    here.policy = policy
    if _GIVE_A_REFERENCE:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(policy))
    _C._stash_obj_in_tls(_KEY, policy)


class AutocastState(NamedTuple):
    """Everything an `auto_cast` region changes, so that it can be put back or entered again elsewhere."""

    policy: Policy | None
    devices: tuple[tuple[str, bool, torch.dtype], ...]
    """(device type, enabled, dtype) of torch's autocast."""


def read_state(device_types: tuple[str, ...]) -> AutocastState:
    """Return the state of this thread."""
    devices = tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in device_types)
    return AutocastState(current_policy(), devices)


def write_state(state: AutocastState) -> None:
    """Put a state in force in this thread."""
    for device_type, enabled, dtype in state.devices:
        torch.set_autocast_enabled(device_type, enabled)
        torch.set_autocast_dtype(device_type, dtype)
    set_policy(state.policy)
