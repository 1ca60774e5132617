"""Which parts of a captured step are cast: policy, `fp16_guard`, and float32 variables."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mezzo.amp import Policy, auto_cast
from mezzo.dtypes import dtype_name
from mezzo.errors import MezzoError
from mezzo.record import operator_log


class NoGuardError(MezzoError):
    """The guard option is on, but nothing ran inside a guard, so everything would be float32."""


@dataclass(frozen=True, slots=True)
class CastRules:
    """What decides the dtypes of a captured program.

    Hashable: each value has its own captured graph.
    """

    policy: Policy | None = None
    """None: nothing is cast."""
    use_guard: bool = False
    """Only calls inside `fp16_guard()` follow the policy; all others are float32."""
    float32_names: frozenset[str] = frozenset()
    """Parameters and variables; calls that read or write them are float32."""

    @property
    def is_on(self) -> bool:
        """Whether anything may be cast."""
        return self.policy is not None and self.policy.level != "O0"

    def __str__(self) -> str:
        if self.policy is None or not self.is_on:
            return "O0"
        guarded = ", inside fp16_guard only" if self.use_guard else ""
        return f"{self.policy.level} {dtype_name(self.policy.dtype)}{guarded}"


class _ThreadState(threading.local):
    """Guards and regions of this thread's step."""

    def __init__(self) -> None:
        self.inside: Policy | None = None
        """The policy inside a guard; None: guards have no effect."""
        self.everywhere: Policy | None = None
        """The policy of the step; `enter_float32` derives its float32 version."""
        self.open: list[auto_cast] = []
        """Regions opened by markers, innermost last."""
        self.depth = 0
        """Number of open guards, including those without effect."""
        self.regions_before = 0
        """How many regions were open when a capture began."""
        self.entered = 0
        """How often a guard was entered."""


thread_state = _ThreadState()


@contextmanager
def casting_region(precision: CastRules) -> Iterator[None]:
    """Run a step's forward under its precision."""
    policy = precision.policy
    if policy is None or not precision.is_on:
        yield
        return
    before = thread_state.inside, thread_state.everywhere, thread_state.depth
    regions = len(thread_state.open)
    thread_state.inside, thread_state.everywhere = (policy if precision.use_guard else None), policy
    try:
        region = auto_cast(policy=policy.in_float32() if precision.use_guard else policy)
        with operator_log.paused(), region:  # a captured step has its own table: `operators()`
            try:
                yield
            finally:
                close_regions(regions)
    finally:
        thread_state.inside, thread_state.everywhere, thread_state.depth = before


def close_regions(down_to: int | None = None) -> None:
    """Close regions that a capture left open: Dynamo may stop inside a network and restart."""
    while len(thread_state.open) > (thread_state.regions_before if down_to is None else down_to):
        thread_state.open.pop().__exit__(None, None, None)


@contextmanager
def markers_balanced() -> Iterator[None]:
    """Restore the number of open guards and regions after a capture, also after an exception."""
    depth, before = thread_state.depth, thread_state.regions_before
    thread_state.regions_before = len(thread_state.open)
    try:
        yield
    finally:
        close_regions()
        thread_state.depth, thread_state.regions_before = depth, before


def is_inside_guard() -> bool:
    """Whether this thread is inside `fp16_guard()`."""
    return thread_state.depth > 0


def guards_entered() -> int:
    """Return how often this thread entered a guard."""
    return thread_state.entered


def refuse_missing_guard(found: bool) -> None:
    """Raise NoGuardError unless a guard was found."""
    if not found:
        raise NoGuardError(
            "use_fp16_guard is on, and no part of the network runs inside mezzo.static.amp.fp16_guard(): everything would "
            "stay float32; mark the parts that are to be half, or give use_fp16_guard=False"
        )


# The markers: plain calls that Dynamo puts into its graph unchanged. They run while the graph is
# traced into operators, not in the compiled code.


def enter_guard() -> None:
    """Follow the policy from here on."""
    thread_state.depth += 1
    thread_state.entered += 1
    _switch(thread_state.inside)


def leave_guard() -> None:
    """Undo `enter_guard`."""
    thread_state.depth -= 1
    if thread_state.inside is not None:
        _leave()


def enter_float32() -> None:
    """Compute in float32 from here on."""
    _switch(None if thread_state.everywhere is None else thread_state.everywhere.in_float32())


def leave_float32() -> None:
    """Undo `enter_float32`."""
    if thread_state.everywhere is not None:
        _leave()


MARKERS = (enter_guard, leave_guard, enter_float32, leave_float32)


def markers_key() -> str:
    """Return a text with everything that the markers depend on in this thread, for the keys of compile caches."""
    policies = thread_state.inside, thread_state.everywhere
    return ", ".join("none" if policy is None else auto_cast(policy=policy).key() for policy in policies)


def _switch(policy: Policy | None) -> None:
    if policy is not None:
        region = auto_cast(policy=policy)
        region.__enter__()
        thread_state.open.append(region)


def _leave() -> None:
    if thread_state.open:
        thread_state.open.pop().__exit__(None, None, None)


@contextmanager
def fp16_guard() -> Iterator[None]:
    """Mark a part of a network for half precision, if the program uses `use_fp16_guard`.

    Otherwise do nothing.

    >>> with fp16_guard():
    ...     pass
    """
    enter_guard()
    try:
        yield
    finally:
        leave_guard()
