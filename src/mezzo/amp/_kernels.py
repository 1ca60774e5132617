"""Kernels of ours on torch's autocast dispatch keys: they carry out what the active policy decides.

A kernel is installed only for operators whose native autocast behaviour differs from a policy in use, once a process; it
reads the policy of its thread. Without a policy (plain `torch.autocast`) it does what torch would have done.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from mezzo._torch.autograd_engine import graph_task_id
from mezzo._torch.dispatcher import (
    BINDINGS,
    DispatchKey,
    DispatchKeySet,
    ExcludeKeys,
    all_operator_names,
    call_at_key,
    exclude_key,
    has_kernel,
    is_key_excluded,
    is_key_included,
    keys_after,
    keys_of,
)
from mezzo._torch.dynamo import hide_from_dynamo
from mezzo._torch.kernel_library import OVERRIDE, remove_kernels
from mezzo._torch.script import tracing_state
from mezzo.amp import _cpu
from mezzo.amp._compiled import load_kernels
from mezzo.amp._fp8 import fp8_call, has_fp8
from mezzo.amp._native import AUTOCAST_KEYS, Native, has_native_kernel, native_behaviour
from mezzo.amp._ops import HEAVY, NO_CPU_HALF_KERNEL, OPS, PIECES, VARIANTS, WITH_NUMBERS, Op
from mezzo.amp._policy import CASTABLE, Decision, Policy
from mezzo.amp._state import current_policy, here, use_compiled, without_decisions

_autocast_dtype = torch.get_autocast_dtype
_TRANSFORMS = DispatchKey.FuncTorchDynamicLayerBackMode
_KEYS = {device: getattr(DispatchKey, key) for device, key in AUTOCAST_KEYS.items()}
#: Tensors that are never cast: statistics, which the operator writes in place, and what is never floating.
_NOT_CAST = ("running_mean", "running_var", "index", "indices", "offsets", "mask", "condition")

Kernel = Callable[..., Any]


def overloads_of(op: Op) -> Iterator[Any]:
    """Yield the functional overloads of an operator that take part in autocast: no `out=`, no explicit result dtype."""
    packet = getattr(torch.ops.aten, op.name, None)
    for name in packet.overloads() if packet is not None else ():
        overload = getattr(packet, name)
        if qualified(overload) not in _registered_names() or name in ("dtype", "quantized"):
            continue
        arguments = overload._schema.arguments
        if any(a.alias_info is not None and a.alias_info.is_write for a in arguments):
            continue
        if any("Dimname" in str(a.type) for a in arguments) or not any("Tensor" in str(a.type) for a in arguments):
            continue
        yield overload


def qualified(overload: Any) -> str:
    """Return the dispatcher's name of an overload, `aten::sum.dim_IntList`."""
    name: str = overload._schema.name
    return f"{name}.{overload._schema.overload_name}" if overload._schema.overload_name else name


_names: set[str] = set()


def _registered_names() -> set[str]:
    """Return the dispatcher's operators; some packets list overloads that exist for TorchScript alone."""
    if not _names:
        _names.update(all_operator_names())
    return _names


def _computes_between_borders(policy: Policy, variant: str, device_type: str) -> bool:
    """Whether a variant decided half is computed in float32 between half borders on a device type."""
    if device_type != "cpu":
        return False
    return variant in NO_CPU_HALF_KERNEL or (variant in HEAVY and _cpu.emulates(policy))


def agrees_with_native(policy: Policy, op: Op, variant: str, native: Native, device_type: str) -> bool:
    """Whether torch's own autocast already does what the policy says of a variant, so that no kernel is needed."""
    low, fp32 = policy.dtype, torch.float32
    for_half, for_fp32 = policy.decide(variant, (low,)), policy.decide(variant, (fp32,))
    if for_half.dtype is None:
        return False
    if for_half.compute is not for_half.dtype or for_fp32.compute is not for_fp32.dtype:
        return False
    if for_half.compute is low and _computes_between_borders(policy, variant, device_type):
        return False
    if for_half.dtype is for_fp32.dtype:
        if native is Native.NONE and for_half.dtype is fp32:
            return _pieces_are_float32(policy, variant, device_type)
        return native is (Native.LOW if for_half.dtype is low else Native.FP32)
    return native is Native.PROMOTE or (native is Native.NONE and not op.opaque)


def _pieces_are_float32(policy: Policy, variant: str, device_type: str) -> bool:
    """Whether a composite that torch's autocast lets through is float32 because its pieces are, by torch's own kernels."""
    pieces = [(VARIANTS[piece], piece) for piece in PIECES.get(variant, ())]
    return bool(pieces) and all(
        piece in policy.black and native_behaviour(op.name, qualified(overload), device_type) is Native.FP32
        for op, piece in pieces
        for overload in overloads_of(op)
    )


class _Signature:
    """Where the tensors of an overload are, and where a caller may ask for a result dtype himself."""

    def __init__(self, overload: Any) -> None:
        arguments = overload._schema.arguments
        positional = [a for a in arguments if not a.kwarg_only]
        self.slots = tuple(i for i, a in enumerate(positional) if "Tensor" in str(a.type) and a.name not in _NOT_CAST)
        plain = all(str(positional[slot].type) == "Tensor" for slot in self.slots)
        self.only_slot = self.slots[0] if plain and len(self.slots) == 1 else None
        self.pick = itemgetter(*self.slots) if plain and len(self.slots) > 1 else None
        """Gives the tensors of a call at once, where each of them must be there."""
        self.takes_dtype = any(a.name == "dtype" for a in arguments)
        self._dtype_slot = next((i for i, a in enumerate(positional) if a.name == "dtype"), len(arguments))

    def dtypes(self, args: Sequence[Any], spare_scalars: bool) -> tuple[torch.dtype, ...]:
        """Return the dtypes of the tensors given, 0-dim ones left out if they are to be spared.

        A list of tensors (the weights of an RNN) counts a dtype once for each run of equal ones.
        """
        found = []
        count = len(args)
        for slot in self.slots:
            if slot >= count:
                break
            value = args[slot]
            if value is None:
                continue
            if type(value) in (list, tuple):  # asked first: 'is it a Tensor' is slow for what is none
                last = None
                for item in value:
                    if item is not None and item.dtype is not last and not (spare_scalars and item.dim() == 0):
                        last = item.dtype
                        found.append(last)
            elif isinstance(value, Tensor) and (not spare_scalars or value.dim()):
                found.append(value.dtype)
        return tuple(found)

    def asks_for_dtype(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether the caller named the dtype of the result: then that is his decision, not the policy's."""
        given = args[self._dtype_slot] if len(args) > self._dtype_slot else kwargs.get("dtype")
        return given is not None


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return a tensor, or a list of them, in a dtype; whatever cannot be cast comes back as it is."""
    if isinstance(value, Tensor):
        if value.dtype not in CASTABLE or value.dtype is dtype:
            return value
        is_weight = type(value) is Parameter and value.requires_grad and dtype is not torch.float32
        return _cast_weight(value, dtype) if is_weight else value.to(dtype)
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype) for item in value]
    return value


def _cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a float32 weight in half, cast once per region as torch's autocast does it.

    A weight that was changed in place is cast again (an edit of `weight.data` is not seen, as in torch), and so is one
    whose copy was made without gradients, which torch forgets to do. A trace must see the weight itself.
    """
    is_kept = torch.is_autocast_cache_enabled() and here.regions and not weight.is_inference()
    if not is_kept or is_key_included(_TRANSFORMS) or tracing_state() is not None:
        return weight.to(dtype)
    key = (id(weight), dtype, torch.is_grad_enabled())
    state = (weight._version, weight.data_ptr())
    kept = here.casts.get(key)
    if kept is None or kept[1] != state:
        cast = weight.to(dtype)
        if type(cast) is not Tensor:  # a mode, as FakeTensorMode, made it: no value for others
            return cast
        kept = here.casts[key] = (weight, state, cast)
    found: Tensor = kept[2]
    return found


def _cast_outputs(outputs: Any, dtype: torch.dtype, *, only_first: bool) -> Any:
    if isinstance(outputs, Tensor):
        return _cast(outputs, dtype)
    if only_first:  # the statistics that norms return besides stay float32
        return (_cast(outputs[0], dtype), *outputs[1:])
    return tuple(_cast(output, dtype) for output in outputs)


_OFF = {
    **{device: DispatchKeySet(key) for device, key in _KEYS.items()},
    "both": DispatchKeySet(_KEYS["cpu"]) | DispatchKeySet(_KEYS["cuda"]),
}


def _call_without_autocast(keys: Any, function: Kernel, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an operator with autocast off inside: what a composite consists of is not decided again."""
    with ExcludeKeys(keys):
        if not is_key_included(_TRANSFORMS):
            return function(*args, **kwargs)
        # torch.func runs the pieces below autograd with the keys of its caller, autocast on: only the policy can be off.
        with without_decisions():
            return function(*args, **kwargs)


#: No composites, but they call operators that see autocast where torch lets the operator itself through.
_CALLS_OTHERS = tuple(
    f"aten::{name}" for name in "affine_grid_generator linalg_pinv linalg_matrix_exp _safe_softmax stft".split()
)


def make_native_call(overload: Any, device_type: str) -> Kernel:
    """Return a function that does what torch's autocast did for an overload before a kernel of ours was there."""
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


class _Plan:
    """What a kernel does for one variant under one policy, worked out at its first call."""

    __slots__ = ("actions", "border_only", "defer", "leaves_alone", "spare_scalars")

    def __init__(self, policy: Policy, op: Op, variant: str, native: Native, device_type: str) -> None:
        gray = not (variant in policy.white or variant in policy.black or variant in policy.inside)
        agrees = agrees_with_native(policy, op, variant, native, device_type)
        self.defer = agrees and native is not Native.NONE
        """torch's own kernel does the right thing, and caches weight casts."""
        promotes = policy.decide(variant, (policy.dtype,)).dtype is not policy.decide(variant, (torch.float32,)).dtype
        self.leaves_alone = agrees and native is Native.NONE and promotes
        """The operator promotes by itself, as the policy says: another policy has put the kernel there."""
        self.spare_scalars = gray and not op.opaque
        """0-dim tensors neither decide nor are cast, like Python numbers: a float32 loss stays float32 at O2."""
        self.border_only = _computes_between_borders(policy, variant, device_type)
        """CPU: compute in float32 between half borders."""
        self.actions: dict[Any, Decision | None] = {}
        """By input dtypes: the decision, or None if the call is right as it is."""

    def decide(self, policy: Policy, variant: str, key: Any) -> Decision | None:
        dtypes: tuple[torch.dtype, ...] = key if isinstance(key, tuple) else (key,)
        decision = policy.decide(variant, dtypes)
        unchanged = decision.compute is decision.dtype and not (self.border_only and decision.compute is policy.dtype)
        floats = [dtype for dtype in dtypes if dtype in CASTABLE]  # labels and lengths are never cast
        is_right = unchanged and all(dtype is decision.compute for dtype in floats)
        as_it_is = self.leaves_alone or decision.compute is None or is_right
        self.actions[key] = None if as_it_is else decision
        return self.actions[key]


def _callable_of(overload: Any, op: Op) -> Kernel:
    """Return torch's Python binding where it takes the same arguments: it is called in half the time of the overload."""
    names = [argument.name for argument in overload._schema.arguments if not argument.kwarg_only]
    # The binding has `alpha` as a keyword only, and another default `reduction`.
    if "alpha" in names or "reduction" in names:
        return cast(Kernel, overload)
    for home in BINDINGS:
        if hasattr(home, op.name):
            return cast(Kernel, getattr(home, op.name))
    return cast(Kernel, overload)


def make_kernel(overload: Any, op: Op, device_type: str) -> Kernel:
    """Return the kernel of an overload for the autocast key of a device type."""
    signature = _Signature(overload)
    native_call = make_native_call(overload, device_type)
    native = native_behaviour(op.name, qualified(overload), device_type)
    classify, only_variant = op.classify, op.variants[0]
    takes_dtype = signature.takes_dtype
    only_slot = signature.slots[0] if op.weights == "stay" else signature.only_slot
    pick = None if op.name in WITH_NUMBERS else signature.pick
    function = _callable_of(overload, op)
    # A number beside a CUDA tensor is a 0-dim CPU tensor: both keys are off inside, or it would be decided twice.
    with_numbers = _has_numbers(op)
    own_keys = _OFF["both" if with_numbers else device_type]
    own_key, other_key = _KEYS[device_type], _KEYS["cpu" if device_type == "cuda" else "cuda"]
    may_be_elsewhere = device_type == "cpu" and with_numbers
    is_composite = op.opaque
    is_covered = _is_decided_by_dtypes(op, device_type)
    own_name = f"{device_type} {qualified(overload)}"  # torch may have a kernel for one overload and not for another
    missing = object()

    @hide_from_dynamo("a kernel of mezzo.amp is called by torch's dispatcher, not traced")
    def kernel(*args: Any, **kwargs: Any) -> Any:
        policy: Policy | None = here.policy
        if policy is None:
            policy = current_policy()  # a thread of autograd's, or plain torch.autocast
            if policy is None:
                return native_call(*args, **kwargs)
        if _autocast_dtype(device_type) is not policy.dtype:  # torch.autocast in another dtype, inside our region
            return native_call(*args, **kwargs)
        if graph_task_id() != -1 and not here.is_replaying:  # a gradient, not a forward: its dtypes are settled
            return _call_without_autocast(own_keys, overload, args, kwargs)
        if may_be_elsewhere and _is_elsewhere(args):
            return _call_without_autocast(own_keys, overload, args, kwargs)
        may_be_fp8 = policy.fp8 is not None and has_fp8(policy, op.name)
        if may_be_fp8:
            result = _call_without_autocast(own_keys, fp8_call, (policy, op.name, args, kwargs), {})
            if result is not None:
                return result
        variant = only_variant if classify is None else classify(args, kwargs)
        plan = policy._plans.get((own_name, variant))
        if plan is None:
            plan = policy._plans[own_name, variant] = _Plan(policy, op, variant, native, device_type)
        if plan.defer:
            return native_call(*args, **kwargs)
        if only_slot is not None:
            data = args[only_slot]
            key: Any = data.dtype if not plan.spare_scalars or data.dim() else ()
        elif plan.spare_scalars:
            key = signature.dtypes(args, True)
        elif pick is not None:
            key = tuple([tensor.dtype for tensor in pick(args)])
        else:
            key = signature.dtypes(args, False)
        decision: Any = plan.actions.get(key, missing)
        if decision is missing:
            decision = plan.decide(policy, variant, key)
        if decision is None and is_covered and not may_be_fp8 and KERNELS.compiled is not None:
            KERNELS.compiled.remember()  # the compiled kernel, which called this one, need not ask again
        if decision is not None and not (takes_dtype and signature.asks_for_dtype(args, kwargs)):
            return _carry_out(decision, plan, own_keys, function, op, signature, args, kwargs)
        if is_composite and is_key_included(_TRANSFORMS):
            return _call_without_autocast(own_keys, function, args, kwargs)
        # The same as `_call_without_autocast`, spelled out: this is the way of a call that needs no cast.
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


def _is_elsewhere(args: Sequence[Any]) -> bool:
    """Whether a kernel for CPU tensors was reached because a number rides along as a 0-dim CPU tensor.

    An addition to a CUDA tensor from C++ code carries the CPU's autocast key too; what CUDA's key decided holds.
    """
    return any([isinstance(value, Tensor) and not value.is_cpu for value in args])


def _carry_out(
    decision: Decision,
    plan: _Plan,
    keys: Any,
    function: Kernel,
    op: Op,
    signature: _Signature,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Cast the inputs, call the operator with autocast off, cast its result."""
    compute, result = decision.compute, decision.dtype
    if compute is None or result is None:
        raise AssertionError("a decision to leave the call as it is has no action")
    slots = signature.slots[:1] if op.weights == "stay" and compute is not torch.float32 else signature.slots
    args = _cast_arguments(slots, args, compute, plan.spare_scalars)
    if plan.border_only and compute is not torch.float32:
        # Half at the border, float32 inside: what Tensor Cores do, on any CPU.
        args = _cast_arguments(slots, args, torch.float32)
        outputs = _cast_outputs(_call_without_autocast(keys, function, args, kwargs), compute, only_first=False)
    else:
        outputs = _call_without_autocast(keys, function, args, kwargs)
    if result is compute:
        return outputs
    return _cast_outputs(outputs, result, only_first=compute is torch.float32)


def _cast_arguments(
    slots: Sequence[int], args: Sequence[Any], dtype: torch.dtype, spare_scalars: bool = False
) -> list[Any]:
    args = list(args)
    for slot in slots:
        if slot < len(args):
            args[slot] = _cast_but_scalars(args[slot], dtype) if spare_scalars else _cast(args[slot], dtype)
    return args


def _cast_but_scalars(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return [_cast_but_scalars(item, dtype) for item in value]
    return value if isinstance(value, Tensor) and value.dim() == 0 else _cast(value, dtype)


def _cover(compiled: Any, overload: Any, op: Op, device_type: str) -> None:
    """Put the compiled kernel above ours, unless ours looks at more than dtypes."""
    if not _is_decided_by_dtypes(op, device_type):
        return
    signature = _Signature(overload)
    slots = signature.slots[:1] if op.weights == "stay" else signature.slots
    dtype_slot = [a.name for a in overload._schema.arguments].index("dtype") if signature.takes_dtype else -1
    name, overload_name = overload._schema.name, overload._schema.overload_name
    compiled.cover(device_type, name, overload_name, list(slots), dtype_slot, _has_numbers(op))


def _has_numbers(op: Op) -> bool:
    """Whether a number that rides along may be a 0-dim CPU tensor beside a CUDA one."""
    return op.name in WITH_NUMBERS and torch.cuda.is_available()


def _is_decided_by_dtypes(op: Op, device_type: str) -> bool:
    return op.classify is None and not (device_type == "cpu" and _has_numbers(op))


_INSTALLED = ("installed in generation", "")


class KernelTable:
    """The kernels installed in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._library: torch.library.Library | None = None
        self._policies: set[Policy] = set()
        self.installed: dict[tuple[str, str], Op] = {}
        """(device type, qualified overload) of every kernel of ours."""
        self.compiled: Any = None
        """The compiled tier, where it was built; it is above our kernels and keeps from them what needs no cast."""
        self._looked_for_compiled = False
        self.generation = 0
        """Counts uninstallations: a policy remembers under which one its kernels were installed."""

    def install(self, policy: Policy, device_types: Sequence[str]) -> None:
        """Make sure that every operator which the policy treats otherwise than torch has a kernel of ours."""
        with self._lock:
            if policy in self._policies:
                policy._plans[_INSTALLED] = self.generation
                return
            if not self._looked_for_compiled:
                self._looked_for_compiled = True
                self.compiled = load_kernels()
                use_compiled(None if self.compiled is None else self.compiled.set_policy)
            for device_type in device_types:
                for op in OPS.values():
                    for overload in overloads_of(op):
                        self._install_one(policy, op, overload, device_type)
            self._policies.add(policy)
            policy._plans[_INSTALLED] = self.generation

    def _install_one(self, policy: Policy, op: Op, overload: Any, device_type: str) -> None:
        name = qualified(overload)
        if (device_type, name) in self.installed:
            return
        native = native_behaviour(op.name, name, device_type)
        only = op.overload_variant.get(overload._schema.overload_name)
        variants = op.variants if only is None else (only,)
        agrees = all(agrees_with_native(policy, op, variant, native, device_type) for variant in variants)
        if agrees and not has_fp8(policy, op.name):
            return
        if self._library is None:
            self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
            kernel = make_kernel(overload, op, device_type)
            self._library.impl(name.removeprefix("aten::"), kernel, AUTOCAST_KEYS[device_type], **OVERRIDE)
            if self.compiled is not None:
                _cover(self.compiled, overload, op, device_type)
        self.installed[device_type, name] = op

    def uninstall(self) -> None:
        """Take every kernel of ours out again; torch's own come back."""
        with self._lock:
            if self.compiled is not None:
                self.compiled.uncover_all()
            if self._library is not None:
                remove_kernels(self._library)
            self._library = None
            self._policies.clear()
            self.installed.clear()
            self.generation += 1

    def are_installed(self, policy: Policy) -> bool:
        """Whether `install` has nothing left to do for a policy; the cheap question asked at every region."""
        return policy._plans.get(_INSTALLED) == self.generation


KERNELS = KernelTable()
