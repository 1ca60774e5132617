"""Learning rates as functions of the step, under the names and arguments of Paddle's schedulers."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mezzo._arguments import check_flag, check_increasing, check_integer, check_number, check_numbers


class Curve(Protocol):
    """The learning rate at each position: steps or epochs since the end of the warm-up."""

    @property
    def peak(self) -> float:
        """The nominal (first) rate."""
        ...

    def at(self, position: int) -> float:
        """Return the rate at a position of 0 or more."""
        ...


@dataclass(frozen=True, kw_only=True)
class _Scaled:
    """A curve that starts with a given rate."""

    learning_rate: float

    def __post_init__(self) -> None:
        check_number("learning_rate", self.learning_rate, above=0)
        self._check()

    def _check(self) -> None:
        """Raise ValueError if an argument is out of range."""

    @property
    def peak(self) -> float:
        """The first rate."""
        return float(self.learning_rate)


@dataclass(frozen=True, kw_only=True)
class PolynomialDecay(_Scaled):
    """From the first rate to `end_lr` in `decay_steps`, as (1 - t) ** power; then constant, or again with `cycle`.

    With a power of 0 the first rate stays.
    """

    decay_steps: int
    end_lr: float = 0.0
    power: float = 0.9
    cycle: bool = False

    def _check(self) -> None:
        check_integer("decay_steps", self.decay_steps, at_least=1)
        check_number("end_lr", self.end_lr, at_least=0)
        check_number("power", self.power, at_least=0)
        check_flag("cycle", self.cycle)

    def at(self, position: int) -> float:
        """Return the rate."""
        length = self.decay_steps
        if self.cycle:
            length *= max(1, math.ceil(position / self.decay_steps))  # each round is longer by one length
        left = 1 - min(position, length) / length
        return float((self.learning_rate - self.end_lr) * left**self.power + self.end_lr)


@dataclass(frozen=True, kw_only=True)
class LinearDecay(_Scaled):
    """Linear over `decay_steps` from the first rate to `end_lr`."""

    decay_steps: int
    end_lr: float = 0.0

    def _check(self) -> None:
        check_integer("decay_steps", self.decay_steps, at_least=1)
        check_number("end_lr", self.end_lr, at_least=0)

    def at(self, position: int) -> float:
        """Return the rate."""
        return _line(self.learning_rate, self.end_lr, position / self.decay_steps)


@dataclass(frozen=True, kw_only=True)
class LinearWarmup(_Scaled):
    """Linear over `warmup_steps` from `start_lr` to `end_lr`, then `learning_rate`."""

    warmup_steps: int
    start_lr: float
    end_lr: float

    def _check(self) -> None:
        check_integer("warmup_steps", self.warmup_steps, at_least=1)
        check_number("start_lr", self.start_lr, at_least=0)
        check_number("end_lr", self.end_lr, at_least=0)

    def at(self, position: int) -> float:
        """Return the rate."""
        if position >= self.warmup_steps:
            return self.peak
        return _line(self.start_lr, self.end_lr, position / self.warmup_steps)


@dataclass(frozen=True, kw_only=True)
class LinearLR(_Scaled):
    """The rate times a factor that is linear over `total_steps` from `start_factor` to `end_factor`."""

    total_steps: int
    start_factor: float = 1 / 3
    end_factor: float = 1.0

    def _check(self) -> None:
        check_integer("total_steps", self.total_steps, at_least=1)
        check_number("start_factor", self.start_factor, above=0, at_most=1)
        check_number("end_factor", self.end_factor, at_least=0, at_most=1)

    def at(self, position: int) -> float:
        """Return the rate."""
        return self.learning_rate * _line(self.start_factor, self.end_factor, position / self.total_steps)


@dataclass(frozen=True, kw_only=True)
class StepDecay(_Scaled):
    """Multiplied by `gamma` every `step_size` positions."""

    step_size: int
    gamma: float = 0.1

    def _check(self) -> None:
        check_integer("step_size", self.step_size, at_least=1)
        check_number("gamma", self.gamma, above=0, at_most=1)

    def at(self, position: int) -> float:
        """Return the rate."""
        return float(self.learning_rate * self.gamma ** (position // self.step_size))


@dataclass(frozen=True, kw_only=True)
class MultiStepDecay(_Scaled):
    """Multiplied by `gamma` at every milestone."""

    milestones: tuple[int, ...]
    gamma: float = 0.1

    def _check(self) -> None:
        object.__setattr__(self, "milestones", check_increasing("milestones", self.milestones))
        check_number("gamma", self.gamma, above=0, at_most=1)

    def at(self, position: int) -> float:
        """Return the rate."""
        return float(self.learning_rate * self.gamma ** bisect.bisect_right(self.milestones, position))


@dataclass(frozen=True, kw_only=True)
class CosineAnnealingDecay(_Scaled):
    """Half a cosine from the first rate to `eta_min` over `T_max`, then back up."""

    T_max: int
    eta_min: float = 0.0

    def _check(self) -> None:
        check_integer("T_max", self.T_max, at_least=1)
        check_number("eta_min", self.eta_min, at_least=0)

    def at(self, position: int) -> float:
        """Return the rate."""
        return _cosine(self.learning_rate, self.eta_min, position / self.T_max)


@dataclass(frozen=True, kw_only=True)
class CosineAnnealingWarmRestarts(_Scaled):
    """Half a cosine over `T_0`, then restarts, each `T_mult` times as long as the one before."""

    T_0: int
    T_mult: int = 1
    eta_min: float = 0.0

    def _check(self) -> None:
        check_integer("T_0", self.T_0, at_least=1)
        check_integer("T_mult", self.T_mult, at_least=1)
        check_number("eta_min", self.eta_min, at_least=0)

    def at(self, position: int) -> float:
        """Return the rate."""
        length = self.T_0
        if self.T_mult == 1:
            position %= length
        while position >= length:  # doubles at least, so this ends soon
            position, length = position - length, length * self.T_mult
        return _cosine(self.learning_rate, self.eta_min, position / length)


@dataclass(frozen=True, kw_only=True)
class ExponentialDecay(_Scaled):
    """Multiplied by `gamma` at every position."""

    gamma: float

    def _check(self) -> None:
        check_number("gamma", self.gamma, above=0, at_most=1)

    def at(self, position: int) -> float:
        """Return the rate."""
        return float(self.learning_rate * self.gamma**position)


@dataclass(frozen=True, kw_only=True)
class NaturalExpDecay(_Scaled):
    """The rate times exp(-gamma * position)."""

    gamma: float

    def _check(self) -> None:
        check_number("gamma", self.gamma, above=0)

    def at(self, position: int) -> float:
        """Return the rate."""
        return float(self.learning_rate * math.exp(-self.gamma * position))


@dataclass(frozen=True, kw_only=True)
class InverseTimeDecay(_Scaled):
    """The rate divided by (1 + gamma * position)."""

    gamma: float

    def _check(self) -> None:
        check_number("gamma", self.gamma, above=0)

    def at(self, position: int) -> float:
        """Return the rate."""
        return float(self.learning_rate / (1 + self.gamma * position))


@dataclass(frozen=True, kw_only=True)
class PiecewiseDecay:
    """`values[i]` before `boundaries[i]`, then the last value."""

    boundaries: tuple[int, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        rates = check_numbers("values", self.values, at_least=0)
        object.__setattr__(self, "boundaries", check_increasing("boundaries", self.boundaries))
        object.__setattr__(self, "values", rates)
        if len(rates) != len(self.boundaries) + 1:
            raise ValueError(
                f"values: {len(rates)} rates for {len(self.boundaries)} boundaries; must be one more rate than boundaries"
            )

    @property
    def peak(self) -> float:
        """The first rate."""
        return float(self.values[0])

    def at(self, position: int) -> float:
        """Return the rate."""
        return float(self.values[bisect.bisect_right(self.boundaries, position)])


def _line(start: float, end: float, share: float) -> float:
    return float(start + (end - start) * min(share, 1))


def _cosine(top: float, bottom: float, share: float) -> float:
    return float(bottom + (top - bottom) * (1 + math.cos(math.pi * share)) / 2)


CURVES: dict[str, Callable[..., Curve]] = {
    "PolynomialDecay": PolynomialDecay,
    "PiecewiseDecay": PiecewiseDecay,
    "StepDecay": StepDecay,
    "MultiStepDecay": MultiStepDecay,
    "CosineAnnealingDecay": CosineAnnealingDecay,
    "CosineAnnealingWarmRestarts": CosineAnnealingWarmRestarts,
    "ExponentialDecay": ExponentialDecay,
    "NaturalExpDecay": NaturalExpDecay,
    "InverseTimeDecay": InverseTimeDecay,
    "LinearDecay": LinearDecay,
    "LinearLR": LinearLR,
    "LinearWarmup": LinearWarmup,
}
