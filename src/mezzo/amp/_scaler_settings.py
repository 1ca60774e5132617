"""The accessors of a loss scaler's settings, by Paddle's names and by torch's."""

from __future__ import annotations

from typing import Any

from mezzo.amp._scaler_rule import ScaleRule, check_rule, check_scale
from mezzo.amp._scaler_state import ScaleState


class ScalerSettings:
    """Reads and changes the rule and the state that the scaler owns."""

    _enable: bool
    _dynamic: bool
    _rule: ScaleRule
    _init_scale: float
    _state: ScaleState

    def is_enable(self) -> bool:
        """Whether scaling is on."""
        return self._enable

    def is_use_dynamic_loss_scaling(self) -> bool:
        """Whether the scale follows what the steps find."""
        return self._dynamic

    def get_scale(self) -> float:
        """Return the scale; waits for the device. 1.0 if not enabled."""
        if not self._enable:
            return 1.0
        return float(self._state.read()["scale"])

    def get_init_loss_scaling(self) -> float:
        """Return the first scale, or the one last set or loaded."""
        return self._init_scale

    def set_init_loss_scaling(self, value: float) -> None:
        """Set the first scale and, at once, the live one."""
        self._init_scale = check_scale("init_loss_scaling", value)
        self._state.set_scale(self._init_scale)

    def get_incr_ratio(self) -> float:
        """Return the growth factor."""
        return self._rule.incr_ratio

    def set_incr_ratio(self, value: float) -> None:
        """Set the growth factor, above 1."""
        self._change(incr_ratio=value)

    def get_decr_ratio(self) -> float:
        """Return the shrink factor."""
        return self._rule.decr_ratio

    def set_decr_ratio(self, value: float) -> None:
        """Set the shrink factor, between 0 and 1."""
        self._change(decr_ratio=value)

    def get_incr_every_n_steps(self) -> int:
        """Return the number of good steps in a row before growth."""
        return self._rule.incr_every_n_steps

    def set_incr_every_n_steps(self, value: int) -> None:
        """Set the number of good steps in a row before growth; 0: never."""
        self._change(incr_every_n_steps=value)

    def get_decr_every_n_nan_or_inf(self) -> int:
        """Return the number of bad steps in a row before shrinking."""
        return self._rule.decr_every_n_nan_or_inf

    def set_decr_every_n_nan_or_inf(self, value: int) -> None:
        """Set the number of bad steps in a row before shrinking; 0: never."""
        self._change(decr_every_n_nan_or_inf=value)

    # torch's names for the same

    def is_enabled(self) -> bool:
        """The same as `is_enable`; torch's name."""
        return self.is_enable()

    def get_growth_factor(self) -> float:
        """The same as `get_incr_ratio`; torch's name."""
        return self.get_incr_ratio()

    def set_growth_factor(self, new_factor: float) -> None:
        """The same as `set_incr_ratio`; torch's name."""
        self.set_incr_ratio(new_factor)

    def get_backoff_factor(self) -> float:
        """The same as `get_decr_ratio`; torch's name."""
        return self.get_decr_ratio()

    def set_backoff_factor(self, new_factor: float) -> None:
        """The same as `set_decr_ratio`; torch's name."""
        self.set_decr_ratio(new_factor)

    def get_growth_interval(self) -> int:
        """The same as `get_incr_every_n_steps`; torch's name."""
        return self.get_incr_every_n_steps()

    def set_growth_interval(self, new_interval: int) -> None:
        """The same as `set_incr_every_n_steps`; torch's name."""
        self.set_incr_every_n_steps(new_interval)

    def _change(self, **changes: Any) -> None:
        self._rule = check_rule(self._rule.changed(**changes))
