"""One piece of advice: what was seen, what to do, and what it brings."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from mezzo.proof._trial import Setup

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
