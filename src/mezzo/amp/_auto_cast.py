"""`auto_cast`: the region in which a policy decides the precision of every operator."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, TypeVar, overload

import torch

from mezzo._torch.dynamo import hide_from_dynamo
from mezzo._torch.generators import generator_in_context
from mezzo.amp._compile import prepare_compilations
from mezzo.amp._cpu import emulates
from mezzo.amp._dialects import check_device_type, takes_torch_arguments
from mezzo.amp._foreign import CHECKS_ON_ENTRY, raise_if_replaced
from mezzo.amp._kernel_table import KERNELS
from mezzo.amp._operator_log import operator_log
from mezzo.amp._policy import Policy
from mezzo.amp._recompute import carry_policy_along
from mezzo.amp._state import (
    AutocastState,
    on_one_device,
    read_state,
    state_of,
    state_without,
    thread_state,
    write_state,
)
from mezzo.amp._steps import watch_optimizers
from mezzo.amp._tasks import follow_tasks, keep_for_task, leave_out_of_order, running_loop
from mezzo.amp.hardware import warn_if_unsupported
from mezzo.amp.support import DEVICE_TYPES
from mezzo.dtypes import HALF_SPELLINGS, LEVELS
from mezzo.fp8 import Fp8Recipe

F = TypeVar("F", bound=Callable[..., Any])

_hidden = hide_from_dynamo(
    "mezzo.amp.auto_cast inside a compiled function: enter the region around the call of the compiled function instead"
)

#: Half dtypes for which the GPU was looked at.
_checked_dtypes: set[torch.dtype] = set()


_policies: dict[Any, Policy] = {}


def _policy_of(level: Any, dtype: Any, white: Any, black: Any, use_promote: bool, cpu_compute: str, fp8: Any) -> Policy:
    """Return the policy of a region; cache it unless it has custom lists, because a loop asks in every step."""
    plain = white is None and black is None and fp8 is None
    plain = plain and isinstance(level, str) and isinstance(dtype, (str, torch.dtype))
    if not plain:
        return Policy.create(level, dtype, white, black, use_promote, cpu_compute, fp8)
    key = (level, dtype, use_promote, cpu_compute)
    policy = _policies.get(key)
    if policy is None:
        policy = _policies[key] = Policy.create(level, dtype, use_promote=use_promote, cpu_compute=cpu_compute)
    return policy


def _check_enable(enable: Any) -> bool:
    """Return whether the region is on.

    Raises:
        TypeError: It is not a bool; the message names the argument that was probably meant.
        ValueError: It is a device type whose tensors mezzo does not cast.
    """
    if isinstance(enable, bool) or (type(enable).__module__ == "numpy" and type(enable).__name__.startswith("bool")):
        return bool(enable)
    if callable(enable) and not isinstance(enable, type):
        raise TypeError("auto_cast is used with parentheses: write @auto_cast(), not @auto_cast")
    if isinstance(enable, torch.dtype) or (isinstance(enable, str) and enable.lower() in HALF_SPELLINGS):
        raise TypeError(f"auto_cast({enable!r}): the first argument is `enable`; write auto_cast(dtype={enable!r})")
    if isinstance(enable, str) and enable.upper() in LEVELS:
        raise TypeError(f"auto_cast({enable!r}): the first argument is `enable`; write auto_cast(level={enable!r})")
    if isinstance(enable, Policy):
        raise TypeError("auto_cast(Policy(...)): the first argument is `enable`; write auto_cast(policy=...)")
    if isinstance(enable, (str, torch.device)):
        check_device_type("auto_cast", enable)
        raise TypeError(f"auto_cast(enable={enable!r}): a device is given by device_type=")
    raise TypeError(f"auto_cast(enable={enable!r}): must be True or False, not {type(enable).__name__}")


def _forget_casts_to_another_dtype(before: AutocastState, after: AutocastState) -> None:
    """Empty torch's cache of cast weights if the dtype changes: torch does not check the dtype of its entries."""
    changes = before.cuda_dtype is not after.cuda_dtype or before.cpu_dtype is not after.cpu_dtype
    if changes and (before.cuda_is_on or before.cpu_is_on) and (after.cuda_is_on or after.cpu_is_on):
        torch.clear_autocast_cache()


class auto_cast:  # lower case, because it is used like a function
    """Run operators in the precision that a policy decides; a context manager and a decorator.

    Args:
        enable: False turns mixed precision off inside, also within another region. torch's name is `enabled`.
        custom_white_list: Operators to compute in half, in addition to the defaults.
        custom_black_list: Operators to compute in float32, in addition to the defaults.
        level: `O0`: off. `OD`: only white operators compute in half. `O1`: by lists. `O2`: all half except the black
            list. `O3`: as O2, with large matrix products in FP8.
        dtype: `float16` or `bfloat16`, as string or torch dtype; None: `float16`, on every device.
        use_promote: At O2, an operator on neither list stays float32 if one of its inputs is float32; 0-dim tensors in
            arithmetic and the weights of norm layers do not count. False: it is half for any input.
        cpu_compute: See `Policy.cpu_compute`.
        fp8: O3: an `Fp8Recipe`, or a mapping of its settings; None: the default one.
        policy: A ready policy instead of level, dtype and lists.
        device_type: `cuda` or `cpu`: only tensors there are cast; None: tensors on both. If an outer region casts
            tensors on the other kind of device, both regions need the same level, dtype and lists. As torch.autocast
            takes it, a device may also come first: `auto_cast("cuda", torch.bfloat16)` reads device type, dtype, `enabled` and
            `cache_enabled`, in this order.
        cache_enabled: False: a float32 weight is cast at each use, not once per region. None: as outside.

    >>> with auto_cast(level="O1", dtype="bfloat16"):
    ...     torch.nn.Linear(4, 4)(torch.ones(2, 4)).dtype
    torch.bfloat16
    """

    __slots__ = ("_only_on", "_state", "policy")

    @overload
    def __init__(
        self,
        enable: bool = True,
        custom_white_list: Iterable[str] | None = None,
        custom_black_list: Iterable[str] | None = None,
        level: str = "O1",
        dtype: str | torch.dtype | None = "float16",
        use_promote: bool = True,
        *,
        cpu_compute: str = "auto",
        fp8: Fp8Recipe | Mapping[str, Any] | None = None,
        policy: Policy | None = None,
        device_type: str | torch.device | None = None,
        cache_enabled: bool | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        device_type: str | torch.device = ...,
        dtype: str | torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        custom_white_list: Iterable[str] | None = None,
        custom_black_list: Iterable[str] | None = None,
        level: str = "O1",
        use_promote: bool = True,
        cpu_compute: str = "auto",
        fp8: Fp8Recipe | Mapping[str, Any] | None = None,
        policy: Policy | None = None,
    ) -> None: ...
    @_hidden
    @takes_torch_arguments("device_type", "dtype", "enabled", "cache_enabled", enabled="enable")
    def __init__(
        self,
        enable: bool = True,
        custom_white_list: Iterable[str] | None = None,
        custom_black_list: Iterable[str] | None = None,
        level: str = "O1",
        dtype: str | torch.dtype | None = "float16",
        use_promote: bool = True,
        *,
        cpu_compute: str = "auto",
        fp8: Fp8Recipe | Mapping[str, Any] | None = None,
        policy: Policy | None = None,
        device_type: str | torch.device | None = None,
        cache_enabled: bool | None = None,
    ) -> None:
        if enable is not True and enable is not False:
            enable = _check_enable(enable)
        only_on = None if device_type is None else check_device_type("auto_cast", device_type)
        if cache_enabled is not None and not isinstance(cache_enabled, bool):
            raise TypeError(f"auto_cast(cache_enabled={cache_enabled!r}): must be True, False or None")
        if isinstance(custom_white_list, torch.dtype):
            raise TypeError(
                f"auto_cast(..., {custom_white_list}): the second argument is `custom_white_list`; write dtype="
            )
        if dtype is None:
            dtype = "float16"
        if policy is None:
            if not enable and dtype in (torch.float32, "float32"):
                dtype = "float16"  # as torch.autocast(enabled=False): nothing is cast, so the dtype does not matter
            policy = _policy_of(level, dtype, custom_white_list, custom_black_list, use_promote, cpu_compute, fp8)
        elif not isinstance(policy, Policy):
            raise TypeError(f"policy={policy!r}: must be a mezzo.amp.Policy, from Policy.create(...)")
        elif (custom_white_list, custom_black_list, level, dtype, use_promote, fp8) != (
            *(None, None, "O1", "float16"),
            *(True, None),
        ):
            raise TypeError("auto_cast: give a policy, or level, dtype and lists, not both")
        self.policy = policy
        self._only_on = only_on
        state = state_of(policy) if enable and policy.level != "O0" else state_without(policy.dtype)
        self._state = state if cache_enabled is None else state._replace(caches=cache_enabled)

    def key(self) -> str:
        """Return a text with everything that the casts of this region depend on; equal texts mean equal casts."""
        policy = self._state.policy
        how = "off" if policy is None else "emulated" if emulates(policy) else "native"
        return f"{self.policy.digest} {how} {self._only_on}"

    @_hidden
    def __enter__(self) -> auto_cast:
        around = read_state()
        if self._state.caches is not None:
            around = around._replace(caches=torch.is_autocast_cache_enabled())
        state = self._state if self._only_on is None else on_one_device(self._state, self._only_on, around)
        policy = self._state.policy
        if policy is not None:
            if not KERNELS.are_installed(policy):
                carry_policy_along()
                watch_optimizers()
                KERNELS.install(policy, DEVICE_TYPES)
            prepare_compilations()
            if CHECKS_ON_ENTRY:
                raise_if_replaced()
            if policy.dtype not in _checked_dtypes and torch.cuda.is_initialized():
                _checked_dtypes.add(policy.dtype)
                warn_if_unsupported(policy.dtype)
            if operator_log.is_pending:
                operator_log.begin(len(thread_state.regions))
        in_loop = running_loop() is not None
        if in_loop:
            follow_tasks()
        thread_state.regions.append((self, around))
        torch.autocast_increment_nesting()
        _forget_casts_to_another_dtype(around, state)
        write_state(state)
        if in_loop:
            keep_for_task()
        return self

    @_hidden
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        regions = thread_state.regions
        if not regions or regions[-1][0] is not self:
            leave_out_of_order(self, is_failing=kind is not None)
            return
        torch.autocast_decrement_nesting()
        around = regions.pop()[1]
        if not regions:
            torch.clear_autocast_cache()
            thread_state.casts.clear()
        _forget_casts_to_another_dtype(self._state, around)
        write_state(around)
        if running_loop() is not None:
            keep_for_task()
        if operator_log.recording is not None:
            operator_log.end(len(thread_state.regions), is_complete=kind is None)

    def __call__(self, function: F) -> F:
        """Return a function that enters a region at each call; coroutines and generators run in it, too."""
        if not callable(function):
            raise TypeError(f"auto_cast() decorates a function; got {type(function).__name__}")
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited_in_region(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return await function(*args, **kwargs)

            return awaited_in_region  # type: ignore[return-value]
        if inspect.isasyncgenfunction(function):
            raise TypeError("auto_cast() cannot decorate an async generator: open the region inside it")
        if inspect.isgeneratorfunction(function):  # active while the generator runs, not while it is suspended
            return generator_in_context(lambda: self, function)  # type: ignore[no-any-return]

        @functools.wraps(function)
        def in_region(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return in_region  # type: ignore[return-value]
