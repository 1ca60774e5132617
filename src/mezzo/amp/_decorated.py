"""What a decorated model remembers about `decorate`, and the checks at each call.

They find two mistakes: a call outside `auto_cast`, where torch's error does not mention `auto_cast`, and a region with
another level or dtype than `decorate`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mezzo._torch.autocast_state import is_any_autocast_enabled
from mezzo._torch.module_calls import wrap_calls_of_class
from mezzo.amp._policy import Policy
from mezzo.amp._state import thread_state
from mezzo.amp.user_lines import level_of_user
from mezzo.dtypes import HALF_DTYPES, dtype_name

_HOME = "_mezzo_decoration"
_OURS = "_mezzo_looks_at_calls"
_ABOUT_DTYPES = ("dtype", "scalar type", "Input type", "same type", "data type", "Type promoting")

_is_compiling = torch.compiler.is_compiling


class Decoration:
    """Level and half dtype of a decorated model; all of its modules share it."""

    __slots__ = ("half", "has_warned", "has_warned_of_conversion", "level", "looked_at")

    def __init__(self, level: str, half: torch.dtype) -> None:
        self.level = level
        self.half = half
        self.looked_at: Policy | None = None
        """The policy of the last call, which needs no second check."""
        self.has_warned = self.has_warned_of_conversion = False

    def __setstate__(self, state: Any) -> None:
        """Restore from a pickle: this process may never have called `decorate`."""
        from mezzo.amp._decorate import watch_decorated_models  # which imports this file

        for name, value in state[1].items():
            setattr(self, name, value)
        watch_decorated_models()

    def compare(self, policy: Policy, model: nn.Module) -> None:
        """Warn, once per model, if a region's level or dtype is not that of `decorate`; float32 models fit every region."""
        self.looked_at = policy
        # FP8 products are optional for an O3 model; a policy without a white list is `Policy.in_float32()` of another.
        levels = ("O3", "O2") if self.level == "O3" else (self.level,)
        if self.has_warned or not policy.white or (policy.level in levels and policy.dtype is self.half):
            return
        if not any(param.dtype in HALF_DTYPES for param in model.parameters()):
            return
        self.has_warned = True
        warnings.warn(
            f"decorate(level={self.level!r}, dtype={dtype_name(self.half)!r}) but auto_cast(level={policy.level!r}, "
            f"dtype={dtype_name(policy.dtype)!r}): give both the same level and dtype",
            UserWarning,
            stacklevel=level_of_user(),
        )


def decoration_of(module: nn.Module) -> Decoration | None:
    """Return the decoration of a module, None if it is not decorated."""
    decoration: Decoration | None = module.__dict__.get(_HOME)
    return decoration


def forget_decoration(model: nn.Module) -> None:
    """Forget that a model was decorated; its tensors stay as they are."""
    for module in model.modules():
        module.__dict__.pop(_HOME, None)


def note_decoration(model: nn.Module, level: str, half: torch.dtype) -> None:
    """Note how a model was decorated, and check its calls from now on."""
    decoration = Decoration(level, half)
    for module in model.modules():
        module.__dict__[_HOME] = decoration
    kind = type(model)
    if kind is not nn.Module and (
        next(model.children(), None) is not None or not kind.__module__.startswith("torch.nn.")
    ):
        _check_calls(kind)


def _check_calls(kind: type[nn.Module]) -> None:
    """Check calls of decorated models of a class.

    The class is wrapped, because hooks cost a microsecond per call and TorchScript refuses them, and an attribute of the
    model would be copied into shallow copies and replicas, which would then call the wrong module. Single layers of torch
    are not wrapped, because every other model contains them. `nn.Module` is not wrapped, because it is the base class of
    every model. Its own objects only hold other modules, as in static programs.
    """
    wrap_calls_of_class(kind, _checking, _OURS)


def _checking(call: Callable[..., Any]) -> Callable[..., Any]:
    def check_and_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _is_compiling():
            return call(module, *args, **kwargs)
        policy = thread_state.policy
        if policy is not None:
            decoration = module.__dict__.get(_HOME)
            if decoration is not None and decoration.looked_at is not policy:
                decoration.compare(policy, module)
        try:
            return call(module, *args, **kwargs)
        except (RuntimeError, ValueError) as error:  # ValueError: recurrent layers
            if policy is None and _HOME in module.__dict__:
                _add_note(module, error)
            raise

    return check_and_call


def _add_note(model: nn.Module, error: Exception) -> None:
    decoration = decoration_of(model)
    halves = [(name, param.dtype) for name, param in model.named_parameters() if param.dtype in HALF_DTYPES]
    if decoration is None or not halves or is_any_autocast_enabled():
        return
    if getattr(error, "__notes__", None) or not any(words in str(error) for words in _ABOUT_DTYPES):
        return
    name, half = halves[0][0], dtype_name(halves[0][1])
    error.add_note(
        f"mezzo: {name!r} of this {type(model).__name__} is {half}, and no autocast region is open; call the model "
        f"inside `with precision.autocast():` of the Precision that prepared it, or inside "
        f"`with mezzo.amp.auto_cast(level={decoration.level!r}, dtype={half!r}):`"
    )
