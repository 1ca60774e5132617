"""Learning-rate schedules: a warm-up followed by a curve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mezzo._arguments import check_integer, check_number
from mezzo.files import SourceMark, YamlNode
from mezzo.vision.recipes._check import attempt, check_arguments, find_type
from mezzo.vision.recipes._curves import CURVES, Curve
from mezzo.vision.recipes._errors import FaultLog

_WARMUP = ("warmup_iters", "warmup_start_lr")


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The learning rate of every step, without state: a resumed run needs only the step.

    >>> from mezzo.vision.recipes._curves import StepDecay
    >>> schedule = Schedule(curve=StepDecay(learning_rate=0.1, step_size=30), unit="epoch")
    >>> schedule.lr(0, 100), round(schedule.lr(3000, 100), 6)
    (0.1, 0.01)
    """

    curve: Curve
    unit: Literal["step", "epoch"] = "step"
    """Unit of the positions of the curve."""
    warmup_steps: int = 0
    """Number of steps of the linear warm-up; the curve starts after them."""
    warmup_start: float = 0.0
    """Rate of the first warm-up step."""

    def __post_init__(self) -> None:
        check_integer("warmup_iters", self.warmup_steps)
        check_number("warmup_start_lr", self.warmup_start, at_least=0)

    @property
    def peak(self) -> float:
        """The nominal rate, with which the optimizer is created."""
        return self.curve.peak

    def lr(self, step: int, steps_per_epoch: int | None = None) -> float:
        """Return the rate of a step, counted from 0 over the whole run.

        Raises:
            ValueError: The step is negative, or the curve counts epochs and their length is not given.
        """
        check_integer("step", step)
        if step < self.warmup_steps:
            return self.warmup_start + (self.peak - self.warmup_start) * step / self.warmup_steps
        position = step - self.warmup_steps
        if self.unit == "epoch":
            position //= check_integer("steps_per_epoch", steps_per_epoch, at_least=1)
        return self.curve.at(position)


def read_schedule(tree: YamlNode, faults: FaultLog) -> Schedule | None:
    """Return the schedule of the `lr_scheduler` block of a configuration, or None after adding faults."""
    if "lr_scheduler" not in tree.block:
        text = "lr_scheduler is missing, as in {type: PolynomialDecay, learning_rate: 0.01}"
        faults.add(SourceMark(tree.mark.file), text)
        return None
    node = tree.block["lr_scheduler"]
    factory = find_type(node, "schedule", CURVES, faults)
    if factory is None or not check_arguments(node.without(*_WARMUP), factory, faults):
        return None
    arguments = node.without("type", *_WARMUP).plain()
    curve = attempt(node, faults, factory, **arguments)
    if curve is None or not _has_both(node, faults):
        return None
    steps, start = node.get("warmup_iters") or 0, node.get("warmup_start_lr") or 0.0
    return attempt(node, faults, Schedule, curve=curve, warmup_steps=steps, warmup_start=start)


def _has_both(node: YamlNode, faults: FaultLog) -> bool:
    """Return whether the warm-up has both length and first rate, or neither; a length of 0 needs no rate."""
    given = [key for key in _WARMUP if key in node.block]
    if given == ["warmup_iters"] and _is_zero(node.get("warmup_iters")):
        return True
    if len(given) == 1:
        (other,) = set(_WARMUP) - set(given)
        faults.add(node.mark_of(given[0]), f"{given[0]} needs {other} beside it")
    return len(given) != 1


def _is_zero(value: object) -> bool:
    return type(value) is int and value == 0
