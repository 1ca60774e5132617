"""`auto_cast`: the region in which a policy decides the precision of every operator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, TypeVar

import torch

from mezzo.amp._compile import hide_from_dynamo, tag_compile_caches
from mezzo.amp._foreign import CHECKS_ON_ENTRY, raise_if_replaced
from mezzo.amp._hardware import warn_if_unsupported
from mezzo.amp._kernels import KERNELS
from mezzo.amp._policy import Policy
from mezzo.amp._recompute import carry_policy_into_recompute
from mezzo.amp._state import here, read_state, state_of, state_without, write_state

F = TypeVar("F", bound=Callable[..., Any])

#: Device types whose tensors follow our lists.
DEVICE_TYPES = ("cuda", "cpu")


#: Half dtypes for which the GPU was looked at.
_checked_dtypes: set[torch.dtype] = set()


@functools.lru_cache(maxsize=64)
def _policy_of_defaults(level: str, dtype: str | torch.dtype, use_promote: bool, cpu_compute: str) -> Policy:
    """Return the policy of a region without custom lists: a training loop asks for it every step."""
    return Policy.create(level, dtype, use_promote=use_promote, cpu_compute=cpu_compute)


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

    __slots__ = ("_state", "policy")

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
            if custom_white_list is None and custom_black_list is None:
                policy = _policy_of_defaults(level, dtype, use_promote, cpu_compute)
            else:
                policy = Policy.create(level, dtype, custom_white_list, custom_black_list, use_promote, cpu_compute)
        self.policy = policy
        self._state = state_of(policy) if enable and policy.level != "O0" else state_without(policy.dtype)

    @hide_from_dynamo
    def __enter__(self) -> auto_cast:
        policy = self._state.policy
        if policy is not None:
            if not KERNELS.are_installed(policy):
                carry_policy_into_recompute()
                KERNELS.install(policy, DEVICE_TYPES)
            tag_compile_caches()
            if CHECKS_ON_ENTRY:
                raise_if_replaced()
            if policy.dtype not in _checked_dtypes and torch.cuda.is_initialized():
                _checked_dtypes.add(policy.dtype)
                warn_if_unsupported(policy.dtype)
        here.regions.append(read_state())
        torch.autocast_increment_nesting()
        write_state(self._state)
        return self

    @hide_from_dynamo
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        write_state(here.regions.pop())

    def __call__(self, function: F) -> F:
        """Return the function run in a region of its own at each call."""
        if not callable(function):
            raise TypeError(f"auto_cast() decorates a function; got {type(function).__name__}")

        @functools.wraps(function)
        def in_region(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return in_region  # type: ignore[return-value]
