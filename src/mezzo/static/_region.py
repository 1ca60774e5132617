"""How precision is decided inside a captured step: a policy, `fp16_guard`, and variables that stay in float32."""

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
    """The guard option is on, and nothing ran inside a guard: the whole network would be float32, silently."""


@dataclass(frozen=True, slots=True)
class CastRules:
    """What decides the dtypes of a captured program; hashable, one captured graph for each."""

    policy: Policy | None = None
    """None: nothing is cast."""
    use_guard: bool = False
    """Only what runs inside `fp16_guard()` follows the policy; everything else is float32."""
    float32_names: frozenset[str] = frozenset()
    """Parameters and variables: whatever touches them is float32."""

    @property
    def is_on(self) -> bool:
        """Whether anything may be cast."""
        return self.policy is not None and self.policy.level != "O0"

    def __str__(self) -> str:
        if self.policy is None or not self.is_on:
            return "O0"
        guarded = ", inside fp16_guard only" if self.use_guard else ""
        return f"{self.policy.level} {dtype_name(self.policy.dtype)}{guarded}"


class _Here(threading.local):
    """The guard of this thread's step."""

    def __init__(self) -> None:
        self.inside: Policy | None = None
        """What a guard switches to; None: guards do nothing."""
        self.everywhere: Policy | None = None
        """The policy of the step, for what is switched to float32."""
        self.open: list[auto_cast] = []
        """The regions that markers opened, innermost last."""
        self.depth = 0
        """Guards that are open, whether they switch anything or not."""
        self.regions_before = 0
        """Regions that were open when a capture began: they are not its own."""
        self.entered = 0
        """How often a guard was entered."""


_here = _Here()


@contextmanager
def casting_region(precision: CastRules) -> Iterator[None]:
    """Run a step's forward under its precision."""
    policy = precision.policy
    if policy is None or not precision.is_on:
        yield
        return
    before = _here.inside, _here.everywhere, _here.depth
    regions = len(_here.open)
    _here.inside, _here.everywhere = (policy if precision.use_guard else None), policy
    try:
        region = auto_cast(policy=policy.in_float32() if precision.use_guard else policy)
        with operator_log.paused(), region:  # a captured step has a table of its own: `operators()`
            try:
                yield
            finally:
                close_regions(regions)
    finally:
        _here.inside, _here.everywhere, _here.depth = before


def close_regions(down_to: int | None = None) -> None:
    """Leave what was left open since a capture began: Dynamo stops in the middle of a network and begins again."""
    while len(_here.open) > (_here.regions_before if down_to is None else down_to):
        _here.open.pop().__exit__(None, None, None)


@contextmanager
def markers_balanced() -> Iterator[None]:
    """Inside something is captured; afterwards as many guards and regions are open as before, whatever happened."""
    depth, before = _here.depth, _here.regions_before
    _here.regions_before = len(_here.open)
    try:
        yield
    finally:
        close_regions()
        _here.depth, _here.regions_before = depth, before


def is_inside_guard() -> bool:
    """Whether this thread is inside `fp16_guard()`."""
    return _here.depth > 0


def guards_entered() -> int:
    """Return how often this thread entered a guard."""
    return _here.entered


def refuse_missing_guard(found: bool) -> None:
    """Raise NoGuardError unless a guard was found."""
    if not found:
        raise NoGuardError(
            "use_fp16_guard is on, and no part of the network runs inside mezzo.static.amp.fp16_guard(): everything would "
            "stay float32; mark the parts that are to be half, or give use_fp16_guard=False"
        )


# The markers: plain calls that Dynamo puts into its graph as they are. They run when the graph is traced, not in what is
# compiled from it.


def enter_guard() -> None:
    """Follow the policy from here on."""
    _here.depth += 1
    _here.entered += 1
    _switch(_here.inside)


def leave_guard() -> None:
    """Undo `enter_guard`."""
    _here.depth -= 1
    if _here.inside is not None:
        _leave()


def enter_float32() -> None:
    """Be float32 from here on."""
    _switch(None if _here.everywhere is None else _here.everywhere.in_float32())


def leave_float32() -> None:
    """Undo `enter_float32`."""
    if _here.everywhere is not None:
        _leave()


def _switch(policy: Policy | None) -> None:
    if policy is not None:
        region = auto_cast(policy=policy)
        region.__enter__()
        _here.open.append(region)


def _leave() -> None:
    if _here.open:
        _here.open.pop().__exit__(None, None, None)


@contextmanager
def fp16_guard() -> Iterator[None]:
    """Mark a part of a network for half precision, in a program decorated with `use_fp16_guard`; elsewhere it does nothing.

    >>> with fp16_guard():
    ...     pass
    """
    enter_guard()
    try:
        yield
    finally:
        leave_guard()
