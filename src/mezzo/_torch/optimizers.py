"""Private attributes of `torch.optim.Optimizer`, and how it loads the state of a parameter.

Why: mezzo's step replaces that of an optimizer object. LR schedulers look for marks that torch's own step leaves, and
torch's scaler for an attribute of optimizers that skip by themselves. Loading rounds state to the dtype of a parameter,
but the state of a half parameter with a master is float32.
Releases: 2.11 to 2.15.
Without it: LR schedulers warn of a wrong order; a resumed optimizer has lost half of the bits of its state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from mezzo._torch.patches import Around, wrap_attribute

STEP_WAS_CALLED = "_opt_called"
"""Attribute that LR schedulers look at: True after a call of `step`."""

SUPPORTS_SCALING = "_step_supports_amp_scaling"
"""Attribute of optimizers that take `grad_scale` and `found_inf`, and skip by themselves."""

STATE_DICT_HOOKS = "_optimizer_state_dict_post_hooks"
"""Attribute that every object has whose class called `Optimizer.__init__`."""

_WRAPPED_BY_SCHEDULER = "_wrapped_by_lr_sched"


def mark_as_wrapped(step: Callable[..., Any]) -> None:
    """Let LR schedulers take a step as one that they have wrapped: they wrap one without this mark, and warn if it goes."""
    setattr(step, _WRAPPED_BY_SCHEDULER, True)


def is_wrapped_by_scheduler(step: Callable[..., Any]) -> bool:
    """Whether an LR scheduler wrapped a step, or `mark_as_wrapped` says so."""
    return hasattr(step, _WRAPPED_BY_SCHEDULER)


def wrap_loading_of_state(around: Around) -> None:
    """Let `around` wrap the function that brings a loaded value to the dtype of a parameter, its first argument."""
    wrap_attribute(Optimizer, "_process_value_according_to_param_policy", around, static=True)
