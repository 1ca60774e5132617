"""The active policy of a thread, and torch's autocast state that goes with it.

The policy lies in torch's own thread-local object store, because that store travels where autocast's state travels: into
the threads that autograd starts for a backward pass. A thread of the user's starts without a policy. Tasks of an asyncio
loop, which share a thread, are kept apart by `_tasks`.
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
from mezzo.amp._marker import set_marker
from mezzo.amp._policy import Policy

_KEY = "mezzo.amp.policy"


def current_policy() -> Policy | None:
    """Return the policy of the innermost `auto_cast` region of this thread, None outside of one."""
    policy: Policy | None = stashed(_KEY) if is_stashed(_KEY) else None
    return policy


class _Here(threading.local):
    """The same policy where Python finds it in half the time; autograd's threads have none here and ask the store."""

    policy: Any = None

    def __init__(self) -> None:
        self.regions: list[tuple[object, AutocastState]] = []
        """The open regions, innermost last, each with what to put back when it is left."""
        self.casts: dict[Any, Any] = {}
        """Half copies of float32 weights that our kernels made in the outermost region."""
        self.is_replaying = False
        """Whether forward code runs within a backward pass: recomputation, or a decorated autograd Function."""
        self.is_in_handle = False
        """Whether a callback of an asyncio loop runs here that `_tasks` follows."""
        self.unsettled: int | None = None
        """How many regions were open around a callback that `_tasks` could not follow from its beginning."""


here = _Here()

tell_compiled: Callable[[int], None] | None = None
"""Gives the compiled kernels, where they are in use, the number of this thread's policy; 0 for none."""

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
    """From now on tell the compiled kernels of each change."""
    global tell_compiled
    tell_compiled = tell
    if tell is not None:
        tell(_number_of(here.policy))


def set_policy(policy: Any) -> None:
    """Make a policy the one of this thread."""
    here.policy = policy
    if tell_compiled is not None:
        tell_compiled(_number_of(policy))
    if STASH_STEALS:
        add_reference(policy)
    stash(_KEY, policy)


class AutocastState(NamedTuple):
    """Everything an `auto_cast` region changes, so that it can be put back or entered again elsewhere."""

    policy: Policy | None
    policy_here: Policy | None
    """What `here` held: nothing in a thread of autograd's, whatever its store says, or it would outlive the backward."""
    cuda_is_on: bool
    cuda_dtype: torch.dtype
    cpu_is_on: bool
    cpu_dtype: torch.dtype
    stays_half: bool | None = None
    """Whether this is inside a layer whose products are not FP8; None: as it is around."""


_is_on, _dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype
_switch, _set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype


def read_state() -> AutocastState:
    """Return the state of this thread."""
    own = here.policy
    policy = current_policy() if own is None else own
    flags = _is_on("cuda"), _dtype_of("cuda"), _is_on("cpu"), _dtype_of("cpu")
    return AutocastState(policy, own, *flags, _is_on(HALF_LAYER_DEVICE))


def write_state(state: AutocastState) -> None:
    """Put a state in force in this thread."""
    _switch("cuda", state.cuda_is_on)
    _set_dtype("cuda", state.cuda_dtype)
    _switch("cpu", state.cpu_is_on)
    _set_dtype("cpu", state.cpu_dtype)
    if state.stays_half is not None:
        _switch(HALF_LAYER_DEVICE, state.stays_half)
    set_marker(state.policy)
    set_policy(state.policy)
    if state.policy_here is not state.policy:
        here.policy = state.policy_here
        if tell_compiled is not None:
            tell_compiled(_number_of(state.policy_here))


@contextmanager
def without_decisions() -> Iterator[None]:
    """Inside, kernels of ours leave every call alone, although autocast is on."""
    policy = here.policy
    if policy is None:
        yield
        return
    here.policy = off = Policy.create("O0", policy.dtype)
    if tell_compiled is not None:
        tell_compiled(_number_of(off))
    try:
        yield
    finally:
        here.policy = policy
        if tell_compiled is not None:
            tell_compiled(_number_of(policy))


def state_of(policy: Policy) -> AutocastState:
    """Return the state in which a policy decides."""
    return AutocastState(policy, policy, True, policy.dtype, True, policy.dtype)


def on_one_device(state: AutocastState, device_type: str, around: AutocastState) -> AutocastState:
    """Return a state for tensors on one device type; autocast of the other one stays as it is around."""
    if device_type == "cuda":
        return state._replace(cpu_is_on=around.cpu_is_on, cpu_dtype=around.cpu_dtype)
    return state._replace(cuda_is_on=around.cuda_is_on, cuda_dtype=around.cuda_dtype)


def state_without(half: torch.dtype) -> AutocastState:
    """Return the state in which nothing is cast."""
    return AutocastState(None, None, False, half, False, half)
