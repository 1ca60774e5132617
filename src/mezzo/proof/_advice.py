"""One piece of advice: what was measured, what to do, and the gain."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from mezzo.trial import TrialSetup

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
    """One piece of advice."""

    kind: Kind
    where: str
    """Layer, operator or part; empty for the whole step."""
    seen: str
    """What was measured."""
    todo: str
    """What to do; empty if the advice is only information."""
    gain: float | None = None
    """Predicted speed-up of a step; None if unknown."""
    is_bound: bool = False
    """Whether `gain` is an upper bound, not a prediction."""
    measured_gain: float | None = None
    """Measured speed-up with the change."""
    setup: TrialSetup | None = None
    """The setup with the change; None if the doctor cannot apply it."""

    @property
    def benefit(self) -> str:
        """The gain as text."""
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
        """Return plain data for JSON."""
        data = asdict(self)
        if self.setup is not None:
            data["setup"]["changes"] = self.setup.changes.to_dict()
        return data
