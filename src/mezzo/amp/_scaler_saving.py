"""States of a scaler in files: its own, a Paddle scaler's and that of torch.amp.GradScaler."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from mezzo.amp._scaler_rule import INT32_MAX, ScaleRule, check_flag, check_number, check_rule
from mezzo.optim import COUNTERS

_SMALLEST = 2.0**-149  # positive in float32
_RULE_KEYS = ("incr_ratio", "decr_ratio", "incr_every_n_steps", "decr_every_n_nan_or_inf")


class SavedState(NamedTuple):
    """A state that was read and checked."""

    rule: ScaleRule
    dynamic: bool
    values: dict[str, float]
    """The scale and the counters."""


def pack_state(rule: ScaleRule, dynamic: bool, values: Mapping[str, float]) -> dict[str, Any]:
    """Return what a file holds: plain numbers."""
    return {
        "incr_ratio": rule.incr_ratio,
        "decr_ratio": rule.decr_ratio,
        "incr_every_n_steps": rule.incr_every_n_steps,
        "decr_every_n_nan_or_inf": rule.decr_every_n_nan_or_inf,
        "use_dynamic_loss_scaling": dynamic,
        "min_loss_scaling": rule.min_loss_scaling,
        "max_skips_at_floor": rule.max_skips_at_floor,
        **values,
    }


def unpack_state(state_dict: Mapping[str, Any], rule: ScaleRule, dynamic: bool) -> SavedState:
    """Return the state in a dictionary.

    Settings that it lacks (`max_skips_at_floor`) are those given.

    Raises:
        RuntimeError: The dictionary is empty.
        ValueError: A key is missing, or a value is out of range.
    """
    if not state_dict:
        raise RuntimeError("the state dict is empty: it was saved by a GradScaler with enable=False")
    values = _from_torch({key: plain_number(key, value) for key, value in state_dict.items()})
    missing = [key for key in ("scale", *_RULE_KEYS, "incr_count", "decr_count") if key not in values]
    if missing:
        raise ValueError(f"the state dict of the scaler lacks {', '.join(missing)}")
    saved_rule = ScaleRule(**{key: values.get(key, getattr(rule, key)) for key in ScaleRule.field_names()})
    saved_dynamic = check_flag("use_dynamic_loss_scaling", values.get("use_dynamic_loss_scaling", dynamic))
    return SavedState(check_rule(saved_rule), saved_dynamic, _check_values(values))


def _from_torch(values: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a torch.amp.GradScaler under mezzo's names; any other state unchanged."""
    if "growth_factor" not in values:
        return values
    names = {
        "scale": "scale",
        "growth_factor": "incr_ratio",
        "backoff_factor": "decr_ratio",
        "growth_interval": "incr_every_n_steps",
        "_growth_tracker": "incr_count",
    }
    known = {ours: values[theirs] for theirs, ours in names.items() if theirs in values}
    # torch shrinks at every bad step
    return {**known, "decr_every_n_nan_or_inf": 1, "decr_count": 0}


def plain_number(name: str, value: Any) -> Any:
    """Return the number in a one-element array or tensor; anything else as it is.

    Raises:
        ValueError: The array has another number of elements.
    """
    if not (hasattr(value, "reshape") and hasattr(value, "tolist")):
        return value
    numbers = value.reshape(-1).tolist()
    if len(numbers) != 1:
        raise ValueError(f"the state of the scaler: {name} has {len(numbers)} elements; must be one number")
    return numbers[0]


def _check_values(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the scale and the counters of a saved state; a counter that is missing is 0.

    Raises:
        ValueError: A value is out of range.
    """
    scale = values["scale"]
    check_number("scale", scale)
    if not _SMALLEST <= scale <= torch.finfo(torch.float32).max:
        raise ValueError(
            f"the state of the scaler: scale={scale!r} would skip every step; must be positive and finite in float32: load "
            "another checkpoint, or start with a new GradScaler"
        )
    counts: dict[str, float] = {}
    for name in COUNTERS:
        count = values.get(name, 0)
        check_number(name, count)
        if not math.isfinite(count) or count != int(count) or not 0 <= count <= INT32_MAX:
            raise ValueError(f"the state of the scaler: {name}={count!r}; must be a whole number from 0 to {INT32_MAX}")
        counts[name] = int(count)
    return {"scale": float(scale), **counts}
