"""Private attributes of `torch.optim.Optimizer`, its step hooks, and loading of state.

Why: mezzo's step replaces that of an optimizer object. LR schedulers look for marks that torch's
own step leaves, and torch's scaler for an attribute of optimizers that skip by themselves.
`Optimizer.profile_hook_step` runs the hooks around a function that takes the arguments of the user;
mezzo's update also takes a request, and wrapping another function in each step would cost 4
microseconds. Loading rounds state to the dtype of a parameter, but the state of a half parameter
with a master is float32.
Releases: 2.11 to 2.15.
Without it: LR schedulers warn of a wrong order; step hooks and the profiler miss mezzo's steps; a
resumed optimizer has lost half of the bits of its state.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar

from torch.autograd.profiler import record_function
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from mezzo._torch.patches import Around, wrap_attribute

T = TypeVar("T")
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

STEP_WAS_CALLED = "_opt_called"
"""Attribute that LR schedulers look at: True after a call of `step`."""

SUPPORTS_SCALING = "_step_supports_amp_scaling"
"""Attribute of optimizers that take `grad_scale` and `found_inf`, and skip by themselves."""

STATE_DICT_HOOKS = "_optimizer_state_dict_post_hooks"
"""Attribute that every object has whose class called `Optimizer.__init__`."""

_WRAPPED_BY_SCHEDULER = "_wrapped_by_lr_sched"


def mark_as_wrapped(step: Callable[..., Any]) -> None:
    """Mark a step as wrapped by an LR scheduler.

    Schedulers wrap a step without this mark, and warn if the mark disappears.
    """
    setattr(step, _WRAPPED_BY_SCHEDULER, True)


def is_wrapped_by_scheduler(step: Callable[..., Any]) -> bool:
    """Whether a step has the mark of LR schedulers and `mark_as_wrapped`."""
    return hasattr(step, _WRAPPED_BY_SCHEDULER)


def call_between_step_hooks(
    optimizer: Any, update: Callable[[T, Args, Kwargs], Any], request: T, args: Args, kwargs: Kwargs
) -> Any:
    """Call `update(request, args, kwargs)` between the hooks, as `Optimizer.profile_hook_step`.

    A pre-hook may replace `args` and `kwargs`; as in torch, hooks see the optimizer as the first of
    `args`.
    """
    args = (optimizer, *args)
    with record_function(f"Optimizer.step#{type(optimizer).__name__}.step"):
        for pre_hook in chain(_global_optimizer_pre_hooks.values(), optimizer._optimizer_step_pre_hooks.values()):
            changed = pre_hook(optimizer, args, kwargs)
            if changed is not None:
                if not isinstance(changed, tuple) or len(changed) != 2:
                    raise RuntimeError(
                        f"{pre_hook} must return None or a tuple of (new_args, new_kwargs), but got {changed}."
                    )
                args, kwargs = changed
        result = update(request, args[1:], kwargs)
        # An empty method, by which torch's profiler finds the optimizer
        optimizer._optimizer_step_code()
        for post_hook in chain(optimizer._optimizer_step_post_hooks.values(), _global_optimizer_post_hooks.values()):
            post_hook(optimizer, args, kwargs)
        return result


def wrap_loading_of_state(around: Around) -> None:
    """Let `around` wrap the function `(param, value, ...)` that converts loaded state."""
    wrap_attribute(Optimizer, "_process_value_according_to_param_policy", around, static=True)
