"""`auto_cast`: the region in which a policy decides the precision of every operator."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, TypeVar

import torch

from mezzo.amp._compile import hide_from_dynamo, marker_of
from mezzo.amp._foreign import CHECKS_ON_ENTRY, raise_if_replaced
from mezzo.amp._hardware import warn_if_unsupported
from mezzo.amp._kernels import KERNELS
from mezzo.amp._policy import Policy, parse_level
from mezzo.amp._recompute import carry_policy_into_recompute
from mezzo.amp._state import AutocastState, read_state, write_state

F = TypeVar("F", bound=Callable[..., Any])

#: Device types whose tensors follow our lists.
DEVICE_TYPES = ("cuda", "cpu")


#: Half dtypes for which the GPU was looked at.
_checked_dtypes: set[torch.dtype] = set()


class auto_cast:  # the documents' name, used like a function
    """Run operators in the precision that a policy decides; a context manager and a decorator.

    Args:
        enable: False turns mixed precision off inside, also within another region.
        custom_white_list: Operators to compute in half besides the defaults.
        custom_black_list: Operators to compute in float32 besides the defaults.
        level: `O0` off, `OD` only white operators half, `O1` by lists, `O2` all half but the black list.
        dtype: `float16` or `bfloat16`, as string or torch dtype.
        use_promote: At O2, an operator on neither list is half only if none of its inputs is float32.
        cpu_compute: See `Policy.cpu_compute`.
        policy: A ready policy instead of level, dtype and lists.

    >>> with auto_cast(level="O1", dtype="bfloat16"):
    ...     torch.nn.Linear(4, 4)(torch.ones(2, 4)).dtype
    torch.bfloat16
    """

    @hide_from_dynamo
    def __init__(
        self,
        enable: bool = True,
        custom_white_list: Iterable[str] | None = None,
        custom_black_list: Iterable[str] | None = None,
        level: str = "O1",
        dtype: str | torch.dtype = "float16",
        use_promote: bool = False,
        *,
        cpu_compute: str = "auto",
        policy: Policy | None = None,
    ) -> None:
        if policy is None:
            level = parse_level(level)
            policy = Policy.create(
                level if enable else "O0", dtype, custom_white_list, custom_black_list, use_promote, cpu_compute
            )
        self.policy = policy
        self._enabled = enable and policy.level != "O0"
        self._local = threading.local()

    @hide_from_dynamo
    def __enter__(self) -> auto_cast:
        if self._enabled:
            if not KERNELS.are_installed(self.policy):
                carry_policy_into_recompute()
                KERNELS.install(self.policy, DEVICE_TYPES)
            if CHECKS_ON_ENTRY:
                raise_if_replaced()
            if self.policy.dtype not in _checked_dtypes and torch.cuda.is_initialized():
                _checked_dtypes.add(self.policy.dtype)
                warn_if_unsupported(self.policy.dtype)
        markers = marker_of(self.policy if self._enabled else None)
        before = read_state((*DEVICE_TYPES, *(device for device, _, _ in markers)))
        self._regions().append(before)
        torch.autocast_increment_nesting()
        devices = tuple((device, self._enabled, self.policy.dtype) for device in DEVICE_TYPES)
        write_state(AutocastState(self.policy if self._enabled else None, (*devices, *markers)))
        return self

    @hide_from_dynamo
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        write_state(self._regions().pop())

    def __call__(self, function: F) -> F:
        """Return the function run in a region of its own at each call."""
        if not callable(function):
            raise TypeError(f"auto_cast() decorates a function; got {type(function).__name__}")

        @functools.wraps(function)
        def in_region(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return in_region  # type: ignore[return-value]

    def _regions(self) -> list[AutocastState]:
        """Return what to put back, innermost last: one object may be entered again inside itself and in other threads."""
        regions: list[AutocastState] | None = getattr(self._local, "regions", None)
        if regions is None:
            regions = self._local.regions = []
        return regions
