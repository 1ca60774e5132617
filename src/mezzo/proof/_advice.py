"""One piece of advice: what was seen, what to do, and what it brings."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from mezzo.proof._trial import Setup
from mezzo.report import duration

Kind = Literal[
    "hardware",
    "amp-off",
    "amp-idle",
    "amdahl",
    "launch-bound",
    "layout",
    "shape",
    "casts",
    "leak",
    "loss-scale",
    "fp8",
    "fp8-numbers",
    "loader",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What to change, and why."""

    kind: Kind
    where: str
    """Layer, operator or part that it is about; empty for the whole step."""
    seen: str
    """What was measured."""
    todo: str
    """What to do; empty where there is nothing to do but to know it."""
    gain: float | None = None
    """How many times as fast a step becomes, predicted; None where it is not known."""
    is_bound: bool = False
    """Whether `gain` is the most that could be won, not what a change brings."""
    measured_gain: float | None = None
    """The same, measured with the change made."""
    setup: Setup | None = None
    """The step with the change made, where it can be made from here."""

    @property
    def benefit(self) -> str:
        """The gain in words."""
        if self.kind == "amp-off":
            return f"float32 is {self.gain:.2f}x as fast" if self.gain is not None and self.gain > 1 else ""
        parts = []
        if self.gain is not None:
            parts.append(f"at most {self.gain:.2f}x" if self.is_bound else f"{self.gain:.2f}x predicted")
        if self.measured_gain is not None:
            parts.append(f"{self.measured_gain:.2f}x measured")
        return ", ".join(parts)

    def __str__(self) -> str:
        head = f"{self.kind}: {self.where}" if self.where else self.kind
        benefit = f" [{self.benefit}]" if self.benefit else ""
        return f"{head}{benefit}\n    {self.seen}" + (f"\n    -> {self.todo}" if self.todo else "")

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        data = asdict(self)
        setup = data.pop("setup")
        return {
            **data,
            "setup": None
            if setup is None or self.setup is None
            else {**setup, "changes": self.setup.changes.to_dict()},
        }


def time_text(seconds: float) -> str:
    """Return a time with three digits, never with an exponent.

    >>> time_text(0.0000123), time_text(0.00123), time_text(0.25), time_text(1.5)
    ('12.3 µs', '1.23 ms', '250 ms', '1.50 s')
    """
    if seconds >= 60:
        return duration(seconds)
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 0.9995 or unit == "µs":
            break
    value = seconds * factor
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
