"""mezzo's kernels on torch's autocast dispatch keys: they carry out what the active policy decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mezzo._torch.autograd_engine import graph_task_id
from mezzo._torch.dispatcher import (
    DispatchKey,
    DispatchKeySet,
    ExcludeKeys,
    call_at_key,
    exclude_key,
    has_kernel,
    is_key_excluded,
    is_key_included,
    keys_after,
    keys_of,
)
from mezzo._torch.dynamo import hide_from_dynamo
from mezzo.amp._carried import is_plainly_called
from mezzo.amp._casting import TRANSFORMS, cast_arguments, cast_outputs
from mezzo.amp._compiled import COMPILED
from mezzo.amp._fp8 import fp8_call, has_fp8
from mezzo.amp._native import AUTOCAST_KEYS, has_native_kernel, native_behaviour
from mezzo.amp._ops import WITH_NUMBERS, Op
from mezzo.amp._overloads import Signature, callable_of, has_numbers, is_decided_by_dtypes, qualified
from mezzo.amp._plans import CastPlan
from mezzo.amp._policy import Decision, Policy
from mezzo.amp._state import current_policy, thread_state, without_decisions

Kernel = Callable[..., Any]

_autocast_dtype = torch.get_autocast_dtype
_KEYS = {device: getattr(DispatchKey, key) for device, key in AUTOCAST_KEYS.items()}
_OFF = {
    **{device: DispatchKeySet(key) for device, key in _KEYS.items()},
    "both": DispatchKeySet(_KEYS["cpu"]) | DispatchKeySet(_KEYS["cuda"]),
}
_MISSING = object()

#: Not composites, but they call operators that see autocast if torch lets the operator itself through.
_CALLS_OTHERS = tuple(
    f"aten::{name}" for name in "affine_grid_generator linalg_pinv linalg_matrix_exp _safe_softmax stft".split()
)


def make_kernel(overload: Any, op: Op, device_type: str) -> Kernel:
    """Return the kernel of an overload for the autocast key of a device type.

    It reads the policy of its thread. Without one (plain `torch.autocast`) it does what torch would have done.
    """
    target = _Target(overload, op, device_type)
    # What every call reads is a variable of this function: that is faster than an attribute.
    function, signature, name = target.function, target.signature, target.name
    classify, only_variant = op.classify, op.variants[0]
    only_slot = signature.slots[0] if op.weights == "stay" else signature.only_slot
    pick = None if op.name in WITH_NUMBERS else signature.pick
    with_numbers, is_covered = has_numbers(op), is_decided_by_dtypes(op, device_type)
    own_key, other_key = _KEYS[device_type], _KEYS["cpu" if device_type == "cuda" else "cuda"]

    @hide_from_dynamo("a kernel of mezzo.amp is called by torch's dispatcher, not traced")
    def kernel(*args: Any, **kwargs: Any) -> Any:
        policy: Policy | None = thread_state.policy
        if policy is None or _autocast_dtype(device_type) is not policy.dtype:
            policy = target.policy_of_another_thread()
            if policy is None:
                return target.call_natively(*args, **kwargs)
        if (graph_task_id() != -1 and not thread_state.is_replaying) or (
            target.may_be_elsewhere and _is_elsewhere(args)
        ):
            return target.call_undecided(args, kwargs)
        if policy.fp8 is not None:
            result = target.call_in_fp8(policy, args, kwargs)
            if result is not None:
                return result
        variant = only_variant if classify is None else classify(args, kwargs)
        plan = policy._plans.get((name, variant))
        if plan is None:
            plan = target.make_plan(policy, variant)
        if plan.defer:
            return target.call_natively(*args, **kwargs)
        if only_slot is not None:
            data = args[only_slot]
            key: Any = data.dtype if not plan.spare_scalars or data.dim() else ()
        elif plan.spare_scalars:
            key = signature.dtypes(args, True)
        elif pick is not None:
            key = tuple([tensor.dtype for tensor in pick(args)])
        else:
            key = signature.dtypes(args, False)
        decision: Any = plan.actions.get(key, _MISSING)
        if decision is _MISSING:
            decision = plan.decide(policy, variant, key)
        if decision is not None:
            if not (signature.takes_dtype and signature.asks_for_dtype(args, kwargs)):
                return target.carry_out(decision, plan, args, kwargs)
        elif is_covered and COMPILED.library is not None:
            target.tell_compiled_kernel(policy)
        if op.opaque and is_key_included(TRANSFORMS):
            return _call_without_autocast(target.own_keys, function, args, kwargs)
        # The same as `_call_without_autocast`, spelled out for speed: most calls that need no cast end here.
        other_is_on = with_numbers and not is_key_excluded(other_key)
        exclude_key(own_key, True)
        if other_is_on:
            exclude_key(other_key, True)
        try:
            return function(*args, **kwargs)
        finally:
            exclude_key(own_key, False)
            if other_is_on:
                exclude_key(other_key, False)

    return kernel


class _Target:
    """The overload and device type that a kernel serves, and the less frequent ways of a call."""

    def __init__(self, overload: Any, op: Op, device_type: str) -> None:
        self.name = f"{device_type} {qualified(overload)}"
        """Key of the plans: torch may have a kernel for one overload and not for another."""
        self.signature = Signature(overload)
        self.function = callable_of(overload, op)
        self.call_natively = _make_native_call(overload, device_type)
        # A number beside a CUDA tensor is a 0-dim CPU tensor: with one key still on, it would be decided twice.
        self.own_keys = _OFF["both" if has_numbers(op) else device_type]
        self.may_be_elsewhere = device_type == "cpu" and has_numbers(op)
        self.overload, self.op, self.device_type = overload, op, device_type
        self.native = native_behaviour(op.name, qualified(overload), device_type)
        self.cast_slots = self.signature.slots[:1] if op.weights == "stay" else self.signature.slots

    def policy_of_another_thread(self) -> Policy | None:
        """Return the policy that decides in a thread of autograd; None if torch decides.

        torch decides under plain `torch.autocast`, also if that changes the dtype inside a region of mezzo.
        """
        policy = current_policy() if thread_state.policy is None else thread_state.policy
        if policy is None or _autocast_dtype(self.device_type) is not policy.dtype:
            return None
        return policy

    def call_undecided(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call the operator on its inputs as they are: its dtypes were decided before."""
        return _call_without_autocast(self.own_keys, self.overload, args, kwargs)

    def call_in_fp8(self, policy: Policy, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of a product in FP8; None if it is not one, or is computed in half."""
        if not has_fp8(policy, self.op.name):
            return None
        return _call_without_autocast(self.own_keys, fp8_call, (policy, self.op.name, args, kwargs), {})

    def make_plan(self, policy: Policy, variant: str) -> CastPlan:
        """Make the plan of a variant under a policy, and keep it with the policy."""
        plan = policy._plans[self.name, variant] = CastPlan(policy, self.op, variant, self.native, self.device_type)
        return plan

    def tell_compiled_kernel(self, policy: Policy) -> None:
        """Tell the compiled kernel, which called this one, that such calls need no decision."""
        if not has_fp8(policy, self.op.name):
            COMPILED.library.remember()

    def carry_out(self, decision: Decision, plan: CastPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Cast the inputs, call the operator with autocast off, cast its result."""
        compute, result = decision.compute, decision.dtype
        if compute is None or result is None:
            raise AssertionError("a decision to leave the call as it is has no action")
        if compute is torch.float32:
            outputs = self.carry_out_on_half(result, plan, args, kwargs)
            if outputs is not None:
                return outputs
        slots = self.cast_slots if compute is not torch.float32 else self.signature.slots
        args = cast_arguments(slots, args, compute, plan.spare_scalars)
        if plan.border_only and compute is not torch.float32:
            # Half inputs and outputs, float32 arithmetic: what Tensor Cores do, on any CPU.
            args = cast_arguments(slots, args, torch.float32)
            outputs = _call_without_autocast(self.own_keys, self.function, args, kwargs)
            outputs = cast_outputs(outputs, compute, only_first=False)
        else:
            outputs = _call_without_autocast(self.own_keys, self.function, args, kwargs)
        if result is compute:
            return outputs
        return cast_outputs(outputs, result, only_first=compute is torch.float32)

    def carry_out_on_half(
        self, result: torch.dtype, plan: CastPlan, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of a call that is float32 inside without casts; None if it needs them."""
        if plan.carrier is not None:
            wanted = torch.float32 if self.op.name == "cross_entropy_loss" else args[0].dtype
            if result is wanted:
                return _call_without_autocast(self.own_keys, plan.carrier, (args, kwargs), {})
        elif plan.is_float32_inside and result is args[0].dtype and is_plainly_called(args):
            return _call_without_autocast(self.own_keys, self.function, args, kwargs)
        return None


def _is_elsewhere(args: Sequence[Any]) -> bool:
    """Whether a kernel for CPU tensors was called because a number among CUDA tensors is a 0-dim CPU tensor.

    An addition to a CUDA tensor from C++ code carries the CPU's autocast key too; the CUDA kernel has decided.
    """
    return any([isinstance(value, Tensor) and not value.is_cpu for value in args])


def _call_without_autocast(keys: Any, function: Kernel, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an operator with autocast off: the pieces of a composite are not decided again."""
    with ExcludeKeys(keys):
        if not is_key_included(TRANSFORMS):
            return function(*args, **kwargs)
        # torch.func runs the pieces with the dispatch keys of its caller, autocast on: turn the policy off instead.
        with without_decisions():
            return function(*args, **kwargs)


def _make_native_call(overload: Any, device_type: str) -> Kernel:
    """Return a function that does what torch's autocast does for an overload without mezzo."""
    name = qualified(overload)
    if has_native_kernel(name, device_type):
        kernel = torch.library.get_kernel(overload, AUTOCAST_KEYS[device_type])
        keys = keys_after(_KEYS[device_type])
        return lambda *args, **kwargs: kernel.call_boxed(keys, *args, **kwargs)
    if has_kernel(name, "CompositeImplicitAutograd"):
        return call_at_key(overload, DispatchKey.CompositeImplicitAutograd)  # its pieces still see autocast
    if overload._schema.name in _CALLS_OTHERS:
        below = keys_after(_KEYS[device_type]) - DispatchKeySet(DispatchKey.ADInplaceOrView)
        return lambda data, *args, **kwargs: overload.redispatch(keys_of(data) & below, data, *args, **kwargs)
    return lambda *args, **kwargs: _call_without_autocast(_OFF[device_type], overload, args, kwargs)
