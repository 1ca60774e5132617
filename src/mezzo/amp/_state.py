"""The active policy of a thread, and torch's autocast state that goes with it.

The policy is in torch's thread-local object store, because torch copies that store, like autocast's state, into the
threads that autograd starts for a backward pass. New threads of the user start without a policy. `_tasks` keeps the
tasks of an asyncio loop apart, which share a thread.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from mezzo._torch.autocast_state import HALF_LAYER_DEVICE
from mezzo._torch.references import add_reference
from mezzo._torch.thread_store import STASH_STEALS, is_stashed, stash, stashed
from mezzo.amp._dialects import check_device_type
from mezzo.amp._marker import set_marker
from mezzo.amp._policy import Policy
from mezzo.amp.support import DEVICE_TYPES

_KEY = "mezzo.amp.policy"


def current_policy() -> Policy | None:
    """Return the policy of the innermost `auto_cast` region of this thread, None outside of one."""
    policy: Policy | None = stashed(_KEY) if is_stashed(_KEY) else None
    return policy


def is_autocast_enabled(device_type: str | torch.device | None = None) -> bool:
    """Return whether a region of mezzo casts tensors here; Paddle's and torch's name.

    A region of torch.autocast does not count: `torch.is_autocast_enabled` tells about both.

    Args:
        device_type: `cuda` or `cpu`: tensors there; None: tensors on either.
    """
    kinds = DEVICE_TYPES if device_type is None else (check_device_type("is_autocast_enabled", device_type),)
    return current_policy() is not None and any(map(torch.is_autocast_enabled, kinds))


def get_autocast_dtype(device_type: str | torch.device | None = None) -> torch.dtype:
    """Return the half dtype of the innermost region of mezzo; float16 outside of one. Paddle's and torch's name.

    Args:
        device_type: `cuda` or `cpu`; both have the same dtype.
    """
    if device_type is not None:
        check_device_type("get_autocast_dtype", device_type)
    policy = current_policy()
    return torch.float16 if policy is None else policy.dtype


class _ThreadState(threading.local):
    """The policy again, where Python finds it in half the time. In threads of autograd it is None: they ask the store."""

    policy: Any = None

    def __init__(self) -> None:
        self.regions: list[tuple[object, AutocastState]] = []
        """The open regions, innermost last, each with the state to restore on exit."""
        self.casts: dict[Any, Any] = {}
        """Half copies of float32 weights that mezzo's kernels made in the outermost region."""
        self.is_replaying = False
        """Whether forward code runs during a backward pass: recomputation, or a decorated autograd Function."""
        self.is_in_handle = False
        """Whether this thread runs a callback of an asyncio loop that `_tasks` follows."""
        self.unsettled: int | None = None
        """How many regions were open when a callback began that `_tasks` did not follow yet."""


thread_state = _ThreadState()

tell_compiled: Callable[[int], None] | None = None
"""Sends the number of this thread's policy, 0 for none, to the compiled kernels; None if they are not used."""

_NUMBER = ("number", "")
_count = itertools.count(1)


def _number_of(policy: Any) -> int:
    if not isinstance(policy, Policy):
        return 0
    number: int | None = policy._plans.get(_NUMBER)
    if number is None:
        number = policy._plans[_NUMBER] = next(_count)
    return number


def use_compiled(tell: Callable[[int], None] | None) -> None:
    """Tell the compiled kernels about every change of policy from now on."""
    global tell_compiled
    tell_compiled = tell
    if tell is not None:
        tell(_number_of(thread_state.policy))


def set_policy(policy: Any) -> None:
    """Make a policy the current one of this thread."""
    thread_state.policy = policy
    if tell_compiled is not None:
        tell_compiled(_number_of(policy))
    if STASH_STEALS:
        add_reference(policy)
    stash(_KEY, policy)


class AutocastState(NamedTuple):
    """Everything that an `auto_cast` region changes, so that it can be restored, or entered again elsewhere."""

    policy: Policy | None
    policy_in_python: Policy | None
    """`thread_state.policy`: None in threads of autograd, so that it cannot outlive the backward pass."""
    cuda_is_on: bool
    cuda_dtype: torch.dtype
    cpu_is_on: bool
    cpu_dtype: torch.dtype
    stays_half: bool | None = None
    """Whether this is inside a layer whose products are not FP8; None leaves that unchanged."""
    caches: bool | None = None
    """Whether a weight is cast once per region; None leaves that unchanged. Only a region with `cache_enabled` sets it."""


_is_on, _dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype
_switch, _set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype


def read_state() -> AutocastState:
    """Return the state of this thread."""
    own = thread_state.policy
    policy = current_policy() if own is None else own
    flags = _is_on("cuda"), _dtype_of("cuda"), _is_on("cpu"), _dtype_of("cpu")
    return AutocastState(policy, own, *flags, _is_on(HALF_LAYER_DEVICE))


def write_state(state: AutocastState) -> None:
    """Make a state the current one of this thread."""
    _switch("cuda", state.cuda_is_on)
    _set_dtype("cuda", state.cuda_dtype)
    _switch("cpu", state.cpu_is_on)
    _set_dtype("cpu", state.cpu_dtype)
    if state.stays_half is not None:
        _switch(HALF_LAYER_DEVICE, state.stays_half)
    if state.caches is not None:
        torch.set_autocast_cache_enabled(state.caches)
    set_marker(state.policy)
    set_policy(state.policy)
    if state.policy_in_python is not state.policy:
        thread_state.policy = state.policy_in_python
        if tell_compiled is not None:
            tell_compiled(_number_of(state.policy_in_python))


@contextmanager
def without_decisions() -> Iterator[None]:
    """Inside, mezzo's kernels decide nothing, although autocast is on."""
    policy = thread_state.policy
    if policy is None:
        yield
        return
    thread_state.policy = off = Policy.create("O0", policy.dtype)
    if tell_compiled is not None:
        tell_compiled(_number_of(off))
    try:
        yield
    finally:
        thread_state.policy = policy
        if tell_compiled is not None:
            tell_compiled(_number_of(policy))


def state_of(policy: Policy) -> AutocastState:
    """Return the state in which a policy decides."""
    return AutocastState(policy, policy, True, policy.dtype, True, policy.dtype)


def on_one_device(state: AutocastState, device_type: str, around: AutocastState) -> AutocastState:
    """Return a state for tensors on one device type; the other one keeps the autocast state of `around`.

    Raises:
        RuntimeError: There a region of mezzo casts by other rules. A thread has one policy at a time.
    """
    is_on = around.cpu_is_on if device_type == "cuda" else around.cuda_is_on
    if around.policy is not None and is_on and state.policy is None:  # off here; the other one keeps its policy
        turned_off = {f"{device_type}_is_on": False, "caches": state.caches}
        return around._replace(**turned_off)  # type: ignore[arg-type]
    if around.policy is not None and is_on and state.policy is not None and state.policy.digest != around.policy.digest:
        other = "cpu" if device_type == "cuda" else "cuda"
        raise RuntimeError(
            f"auto_cast({device_type!r}) inside a region with other rules for {other} tensors: a thread has one policy at a "
            "time. Use the same level, dtype and lists in both, or leave the device type out of the inner region"
        )
    if device_type == "cuda":
        return state._replace(cpu_is_on=around.cpu_is_on, cpu_dtype=around.cpu_dtype)
    return state._replace(cuda_is_on=around.cuda_is_on, cuda_dtype=around.cuda_dtype)


def state_without(half: torch.dtype) -> AutocastState:
    """Return the state in which nothing is cast, with a half dtype for autocast."""
    return AutocastState(None, None, False, half, False, half)
