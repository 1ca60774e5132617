"""When the loss scale grows and shrinks, and which settings are allowed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from mezzo.amp._dialects import check_device_type, names_device

INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScaleRule:
    """When the scale grows and shrinks."""

    incr_ratio: float
    decr_ratio: float
    incr_every_n_steps: int
    decr_every_n_nan_or_inf: int
    min_loss_scaling: float
    max_skips_at_floor: int | None

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Return the names of the settings, in order."""
        return tuple(field.name for field in dataclasses.fields(cls))

    def changed(self, **changes: Any) -> ScaleRule:
        """Return a copy with other values, not yet checked."""
        return dataclasses.replace(self, **changes)


def check_enable(enable: Any) -> bool:
    """Return whether scaling is on.

    Raises:
        TypeError: It is not a bool.
        DeviceError: It is a device on which mezzo does not scale losses.
    """
    if isinstance(enable, bool) or (type(enable).__module__ == "numpy" and type(enable).__name__.startswith("bool")):
        return bool(enable)
    if isinstance(enable, (int, float)):
        raise TypeError(
            f"GradScaler({enable!r}): the first argument is `enable`; write GradScaler(init_loss_scaling={enable!r})"
        )
    if isinstance(enable, torch.device) or (isinstance(enable, str) and names_device(enable)):
        check_device_type("GradScaler", enable)
    raise TypeError(f"GradScaler(enable={enable!r}): must be True or False, not {type(enable).__name__}")


def check_flag(name: str, value: Any) -> bool:
    """Return a flag as a bool; 0 and 1, as Paddle saves them, are flags too.

    Raises:
        ValueError: It is anything else.
    """
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise ValueError(f"{name}={value!r}: must be True or False")


def check_rule(rule: ScaleRule) -> ScaleRule:
    """Return the rule with plain numbers.

    Raises:
        ValueError: A value is out of range.
    """
    for name in rule.field_names():
        value = getattr(rule, name)
        if not (name == "max_skips_at_floor" and value is None):
            check_number(name, value)
    if not 1 < rule.incr_ratio < math.inf:
        raise ValueError(f"incr_ratio={rule.incr_ratio!r}: must be finite and above 1")
    if not 0 < rule.decr_ratio < 1:
        raise ValueError(f"decr_ratio={rule.decr_ratio!r}: must be between 0 and 1")
    if not 0 <= rule.min_loss_scaling < math.inf:
        raise ValueError(f"min_loss_scaling={rule.min_loss_scaling!r}: must be finite and at least 0 (0: no floor)")
    limit = rule.max_skips_at_floor
    if limit is not None and (not math.isfinite(limit) or limit != int(limit) or limit < 1):
        raise ValueError(f"max_skips_at_floor={limit!r}: must be a whole number of at least 1, or None for no limit")
    return rule.changed(
        incr_ratio=float(rule.incr_ratio),
        decr_ratio=float(rule.decr_ratio),
        incr_every_n_steps=_check_count("incr_every_n_steps", rule.incr_every_n_steps),
        decr_every_n_nan_or_inf=_check_count("decr_every_n_nan_or_inf", rule.decr_every_n_nan_or_inf),
        min_loss_scaling=float(rule.min_loss_scaling),
        max_skips_at_floor=None if limit is None else int(limit),
    )


def check_number(name: str, value: Any) -> None:
    """Raise ValueError unless a value is a plain number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name}={value!r}: must be a number, not {type(value).__name__}")


def _check_count(name: str, value: float) -> int:
    if not math.isfinite(value) or value != int(value) or not 0 <= value <= INT32_MAX:
        raise ValueError(f"{name}={value!r}: must be a whole number from 0 (never) to {INT32_MAX}")
    return int(value)


def check_scale(name: str, value: float) -> float:
    """Return a scale as a float.

    Raises:
        ValueError: It is not positive and finite in float32.
    """
    check_number(name, value)
    if not 0 < value <= torch.finfo(torch.float32).max:
        raise ValueError(f"{name}={value!r}: must be positive and finite in float32")
    return float(value)
