"""The dynamic loss-scaling state machine, as tensors on the device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mezzo.optim import COUNTERS, Verdict, rescale

_INT32_MAX = 2**31 - 1
_SMALLEST = 2.0**-149  # positive in float32


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
        """The settings, in order."""
        return tuple(field.name for field in dataclasses.fields(cls))

    def changed(self, **changes: Any) -> ScaleRule:
        """Return a copy with other values, not yet checked."""
        return dataclasses.replace(self, **changes)


def check_enable(enable: Any) -> bool:
    """Return whether scaling is on. A device, torch's first argument, is accepted: the state follows the loss anyway.

    Raises:
        TypeError: It is neither a bool nor a device.
    """
    if isinstance(enable, bool) or (type(enable).__module__ == "numpy" and type(enable).__name__.startswith("bool")):
        return bool(enable)
    if isinstance(enable, torch.device) or (isinstance(enable, str) and enable.partition(":")[0] in ("cuda", "cpu")):
        return True
    if isinstance(enable, (int, float)):
        raise TypeError(
            f"GradScaler({enable!r}): the first argument is `enable`; write GradScaler(init_loss_scaling={enable!r})"
        )
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
            _check_number(name, value)
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


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name}={value!r}: must be a number, not {type(value).__name__}")


def _check_count(name: str, value: float) -> int:
    if not math.isfinite(value) or value != int(value) or not 0 <= value <= _INT32_MAX:
        raise ValueError(f"{name}={value!r}: must be a whole number from 0 (never) to {_INT32_MAX}")
    return int(value)


def check_scale(name: str, value: float) -> float:
    """Return a scale as a float.

    Raises:
        ValueError: It is not positive and finite in float32.
    """
    _check_number(name, value)
    if not 0 < value <= torch.finfo(torch.float32).max:
        raise ValueError(f"{name}={value!r}: must be positive and finite in float32")
    return float(value)


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


def check_values(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the scale and the counters of a saved state; a counter that is missing is 0.

    Raises:
        ValueError: A value is out of range.
    """
    scale = values["scale"]
    _check_number("scale", scale)
    if not _SMALLEST <= scale <= torch.finfo(torch.float32).max:
        raise ValueError(
            f"the state of the scaler: scale={scale!r} would skip every step; must be positive and finite in float32: load "
            "another checkpoint, or start with a new GradScaler"
        )
    counts: dict[str, float] = {}
    for name in COUNTERS:
        count = values.get(name, 0)
        _check_number(name, count)
        if not math.isfinite(count) or count != int(count) or not 0 <= count <= _INT32_MAX:
            raise ValueError(
                f"the state of the scaler: {name}={count!r}; must be a whole number from 0 to {_INT32_MAX}"
            )
        counts[name] = int(count)
    return {"scale": float(scale), **counts}


class ScaleState:
    """Scale and counters; on the host until the first tensor shows which device they belong on."""

    counters = COUNTERS

    def __init__(self, scale: float) -> None:
        self._host: dict[str, float] = {"scale": scale, **dict.fromkeys(self.counters, 0)}
        self._device_scale: Tensor | None = None
        self._counts: Tensor | None = None

    @property
    def scale(self) -> Tensor:
        """The scale, 0-dim float32."""
        assert self._device_scale is not None
        return self._device_scale

    @property
    def is_placed(self) -> bool:
        """Whether the state lies on a device already."""
        return self._device_scale is not None

    @property
    def device(self) -> torch.device:
        """Where the state lies."""
        return self.scale.device

    def place(self, device: torch.device) -> None:
        """Move to the device, the first time; fills do not wait, copies from the host might."""
        if self._device_scale is not None:
            return
        self._device_scale = torch.full((), self._host["scale"], dtype=torch.float32, device=device)
        self._counts = torch.empty(len(self.counters), dtype=torch.int32, device=device)
        self._fill_counts()

    def _fill_counts(self) -> None:
        assert self._counts is not None
        for place, name in zip(self._counts.unbind(), self.counters, strict=True):
            place.fill_(int(self._host[name]))

    def scale_on(self, device: torch.device) -> Tensor:
        """The scale on another device; the live tensor itself at home."""
        return self.scale.to(device, non_blocking=True)

    def advance(self, verdict: Verdict, rule: ScaleRule, dynamic: bool) -> Tensor:
        """Count one update and, if dynamic, move the scale; return what `mezzo.optim.rescale` does."""
        assert self._counts is not None
        return rescale(verdict, self.scale, self._counts, rule, dynamic)

    def known_scale(self) -> float | None:
        """Return the scale if reading it does not wait for a device."""
        if self._device_scale is None:
            return self._host["scale"]
        return float(self._device_scale.item()) if self._device_scale.device.type == "cpu" else None

    def read(self) -> dict[str, float]:
        """Return all values as plain numbers; waits for the device."""
        if self._counts is None:
            return dict(self._host)
        counts = dict(zip(self.counters, self._counts.tolist(), strict=True))
        return {"scale": float(self.scale.item()), **counts}

    def write(self, values: Mapping[str, float]) -> None:
        """Set all values, in place where the state is on a device already."""
        self._host = dict(values)
        if self._device_scale is None:
            return
        self.scale.fill_(self._host["scale"])
        self._fill_counts()

    def set_scale(self, scale: float) -> None:
        """Set the scale alone."""
        self._host["scale"] = scale
        if self._device_scale is not None:
            self._device_scale.fill_(scale)
