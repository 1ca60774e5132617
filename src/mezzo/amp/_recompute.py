"""Carries the policy to code that runs later: recomputed forwards, custom backwards, replicas, scripts.

Activation checkpointing runs a forward again during the backward pass, outside the `auto_cast` region. torch restores
its own autocast state there, but not the policy. A custom autograd Function also runs its backward outside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mezzo._torch.autograd_functions import wrap_function_backwards
from mezzo._torch.checkpointing import bind_checkpointed_functions
from mezzo._torch.data_parallel import wrap_parallel_apply
from mezzo._torch.pytree import tree_map
from mezzo._torch.script import optimise_scripts, scripts_are_optimised, wrap_script_calls
from mezzo.amp._dialects import check_device_type
from mezzo.amp._exclude import rebind_forward
from mezzo.amp._policy import CASTABLE
from mezzo.amp._state import AutocastState, current_policy, read_state, state_without, thread_state, write_state

_HINT = (
    "mezzo: this autograd Function ran under auto_cast without mezzo.amp.custom_fwd / custom_bwd, so its backward sees "
    "the dtypes of the forward but no casting; decorate its forward and backward with them"
)


def run_in_state(state: AutocastState, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function under a policy and autocast state, and restore the present one."""
    before, was_replaying = read_state(), thread_state.is_replaying
    write_state(state)
    thread_state.is_replaying = True
    try:
        return function(*args, **kwargs)
    finally:
        thread_state.is_replaying = was_replaying
        write_state(before)


def bind_policy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs under the policy that is active now; outside `auto_cast`, the function itself.

    Use it for the target of a thread, or for a callable that runs after the region has ended.
    """
    bound = _bound(function)
    return bound if bound is function else functools.wraps(function)(bound)


def _bound(function: Callable[..., Any]) -> Callable[..., Any]:
    return function if current_policy() is None else functools.partial(run_in_state, read_state(), function)


def with_policy_in_replicas(parallel_apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return DataParallel's `parallel_apply` with replicas that follow the policy in their threads."""

    @functools.wraps(parallel_apply)
    def run(modules: Any, *args: Any, **kwargs: Any) -> Any:
        for module in modules:
            for part in module.modules() if isinstance(module, torch.nn.Module) else ():
                rebind_forward(part)
        return parallel_apply([_bound(module) for module in modules], *args, **kwargs)

    return run


@functools.cache
def carry_policy_along() -> None:
    """Make both forms of checkpointing, DataParallel's threads and TorchScript follow the policy; once per process.

    Errors of a custom autograd Function get a hint.
    """
    bind_checkpointed_functions(bind_policy)
    wrap_parallel_apply(with_policy_in_replicas)
    wrap_function_backwards(_with_hint)
    wrap_script_calls(_run_as_written)


def _with_hint(apply: Callable[..., Any]) -> Callable[..., Any]:
    def apply_with_hint(self: Any, *args: Any) -> Any:
        try:
            return apply(self, *args)
        except RuntimeError as error:
            if "dtype" in str(error) and not hasattr(self, "_mezzo_state"):
                error.add_note(_HINT)
            raise

    return apply_with_hint


def _run_as_written(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call of a scripted function, without TorchScript's optimiser if a policy is active.

    From the second call on the optimiser uses its own formulas for gradients, which ignore a policy: the backward of
    LayerNorm at O2 would fail on unexpected dtypes, and GELU at O1 would return float32.
    """

    def run(script: Any, *args: Any, **kwargs: Any) -> Any:
        if thread_state.policy is None:
            return call(script, *args, **kwargs)
        was_optimised = scripts_are_optimised()
        optimise_scripts(False)
        try:
            return call(script, *args, **kwargs)
        finally:
            optimise_scripts(was_optimised)

    return run


def custom_fwd(
    forward: Callable[..., Any] | None = None,
    *,
    device_type: str | None = None,
    cast_inputs: torch.dtype | None = None,
) -> Callable[..., Any]:
    """Decorate the forward of a custom autograd Function, so that its backward can run under the same policy.

    Args:
        forward: The static method; leave it out to pass `cast_inputs`.
        device_type: `cuda` or `cpu`, as torch takes it; without effect: a policy holds on both.
        cast_inputs: Inside `auto_cast`, cast floating inputs to this dtype, also those in containers, and run forward and
            backward with casting off.
    """
    if device_type is not None:
        check_device_type("custom_fwd", device_type)
    _check_decorated("custom_fwd", forward)
    if cast_inputs is not None and not isinstance(cast_inputs, torch.dtype):
        raise TypeError(f"custom_fwd(cast_inputs={cast_inputs!r}): must be a torch dtype, such as torch.float32")
    if forward is None:
        return functools.partial(custom_fwd, cast_inputs=cast_inputs)

    @functools.wraps(forward)
    def run(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return _run_traced(ctx, forward, cast_inputs, args, kwargs)
        state = read_state()
        if cast_inputs is not None and state.policy is not None:
            state = state_without(state.policy.dtype)
            args, kwargs = _cast_inputs((args, kwargs), cast_inputs)
        ctx._mezzo_state = state
        return run_in_state(state, forward, ctx, *args, **kwargs)

    return run


def _check_decorated(call: str, function: Any) -> None:
    """Raise TypeError unless a decorator got a function, or nothing."""
    if function is not None and not callable(function) and not isinstance(function, staticmethod):
        raise TypeError(f"{call}({function!r}): decorates a function; write @{call}, or @{call}(device_type=...)")


def custom_bwd(backward: Callable[..., Any] | None = None, *, device_type: str | None = None) -> Callable[..., Any]:
    """Decorate the backward of a custom autograd Function whose forward has `custom_fwd`.

    Args:
        backward: The static method; leave it out to pass `device_type`.
        device_type: See `custom_fwd`.
    """
    if device_type is not None:
        check_device_type("custom_bwd", device_type)
    _check_decorated("custom_bwd", backward)
    if backward is None:
        return custom_bwd

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            if not ctx._mezzo_is_uncast:  # the backward pass is traced under the policy
                return backward(ctx, *grads)
            with torch.autocast(grads[0].device.type, enabled=False):
                return backward(ctx, *grads)
        state = getattr(ctx, "_mezzo_state", None)
        if state is None:
            raise RuntimeError("custom_bwd: the forward of this Function has no mezzo.amp.custom_fwd; decorate it too")
        return run_in_state(state, backward, ctx, *grads)

    return run


# Dynamo traces what follows. It knows torch's autocast, but no policy: both passes are traced under the
# policy that is active, and casts become operators of the graph.


def _run_traced(
    ctx: Any,
    forward: Callable[..., Any],
    cast_inputs: torch.dtype | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    kind = next((value.device.type for value in args if isinstance(value, torch.Tensor)), "cpu")
    ctx._mezzo_is_uncast = cast_inputs is not None and torch.is_autocast_enabled(kind)
    if cast_inputs is None or not ctx._mezzo_is_uncast:
        return forward(ctx, *args, **kwargs)
    args, kwargs = _cast_inputs((args, kwargs), cast_inputs)
    with torch.autocast(kind, enabled=False):
        return forward(ctx, *args, **kwargs)


def _cast_inputs(values: Any, dtype: torch.dtype) -> Any:
    """Return values with floating tensors cast, also inside lists, tuples, named tuples and mappings."""

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(dtype) if value.dtype in CASTABLE else value
        if isinstance(value, Mapping):  # tree_map does not enter every kind of mapping
            return {key: _cast_inputs(item, dtype) for key, item in value.items()}
        return value

    return tree_map(cast, values)
