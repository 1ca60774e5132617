"""Rows of a comparison: two tensors, how much of their difference this layer added, and how bad that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mezzo.proof._accuracy_numbers import Difference, max_ulps
from mezzo.proof._accuracy_run import GRIDS, TensorRecord

Kind = Literal["output", "output gradient", "parameter gradient"]
State = Literal["red", "orange", "yellow", ""]

FLOAT16_MAX = 65504.0


@dataclass(frozen=True, slots=True)
class AccuracyRow:
    """One tensor in both runs; `_a` is the reference, `_b` the run under test."""

    kind: Kind
    name: str
    """Path of the module or parameter; `#2` is its second call, `[0]` or `.x` the position in its result."""
    module: str
    """Class of the module."""
    order: int
    """Position from 1: outputs in the order of the forward pass, gradients in that of the backward pass."""
    depth: int
    """Position of the module's output in the forward pass, from 1; 0 if it has none."""
    shape: tuple[int, ...]
    dtype_a: str
    """Empty if the run has no such tensor."""
    dtype_b: str
    rounding: str
    """The coarsest dtype that either run used up to here."""
    error: float
    """L2 norm of the difference divided by that of the reference, over elements that are finite in both runs; 1 if
    only the reference is zero."""
    max_abs_error: float
    max_ulps: float
    """Largest difference in units in the last place of `rounding`."""
    cosine: float
    max_abs_a: float
    """Over the finite elements."""
    max_abs_b: float
    nan_a: int
    nan_b: int
    inf_a: int
    inf_b: int
    overflows: bool
    """Whether b is float16 and the reference exceeds its range; a gradient is multiplied by b's loss scale."""
    underflow: float
    """Share of the elements that are zero only in b."""
    inflow: float
    """Largest error of the tensors that it was computed from."""
    limit: float
    """Largest error that rounding explains."""
    harm: float
    """inf for new NaN or inf and for tensors that cannot be compared; otherwise the added error and underflow."""
    diverges: bool
    """Whether the difference is larger than rounding explains."""
    is_inherited: bool
    """Whether new NaN or inf were already in the tensors that it was computed from."""
    note: str
    """Why it cannot be compared, or why it is excused."""

    @property
    def is_bad(self) -> bool:
        """Whether b has more NaN and inf than a."""
        return self.nan_b + self.inf_b > self.nan_a + self.inf_a

    @property
    def added(self) -> float:
        """Error beyond `inflow`."""
        return _beyond(self.error, self.inflow)

    @property
    def state(self) -> State:
        """Colour: red for overflow, NaN and inf; orange for a difference beyond rounding; yellow for a half tensor."""
        if self.is_bad or self.overflows:
            return "red"
        if self.diverges:
            return "orange"
        return "yellow" if self.dtype_b in GRIDS and GRIDS[self.dtype_b][0] <= GRIDS["float16"][0] else ""

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain types; non-finite numbers become the strings `inf` and `nan`."""
        whole = {**asdict(self), "shape": list(self.shape), "added": self.added, "state": self.state}
        return {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in whole.items()
        }


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Name and position of a row."""

    kind: Kind
    name: str
    module: str
    order: int
    depth: int
    rounding: str
    limit: float
    scale_b: float = 1.0
    """Loss scale of the second run, for a gradient."""
    ulp_scale: float = 1.0
    """Loss scale of the run whose dtype is `rounding`, for a gradient."""


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """A tensor in both runs, and its difference."""

    a: TensorRecord
    b: TensorRecord
    difference: Difference

    @property
    def is_bad(self) -> bool:
        """Whether b has more NaN and inf than a."""
        return self.b.num_bad > self.a.num_bad


def compared_row(place: RowPlace, own: Flow, flows: Sequence[Flow]) -> AccuracyRow:
    """Return the row of two tensors of the same shape; `flows` are what they were computed from."""
    a, b, apart = own.a, own.b, own.difference
    inflow = max((flow.difference.error for flow in flows), default=0.0)
    zeros = max((flow.difference.underflow for flow in flows), default=0.0)
    return _row(
        place,
        a,
        b,
        error=apart.error,
        max_abs_error=apart.max_abs_error,
        max_ulps=max_ulps(a, b, place.rounding, place.ulp_scale),
        cosine=apart.cosine,
        overflows=b.dtype == "float16" and a.max_abs * place.scale_b > FLOAT16_MAX,
        underflow=apart.underflow,
        inflow=inflow,
        harm=math.inf if own.is_bad else _beyond(apart.error, inflow) + _beyond(apart.underflow, zeros),
        diverges=own.is_bad or apart.error > place.limit,
        is_inherited=own.is_bad and any(flow.is_bad for flow in flows),
    )


def uncompared_row(place: RowPlace, a: TensorRecord | None, b: TensorRecord | None, note: str) -> AccuracyRow:
    """Return the row of a tensor that one run lacks or that has different shapes."""
    unknown = dict.fromkeys(("error", "max_abs_error", "max_ulps", "cosine", "underflow", "inflow"), math.nan)
    return _row(place, a, b, **unknown, overflows=False, harm=math.inf, diverges=True, is_inherited=False, note=note)


def _row(
    place: RowPlace, a: TensorRecord | None, b: TensorRecord | None, *, note: str = "", **figures: Any
) -> AccuracyRow:
    some = a or b
    return AccuracyRow(
        kind=place.kind,
        name=place.name,
        module=place.module,
        order=place.order,
        depth=place.depth,
        shape=some.shape if some else (),
        dtype_a=a.dtype if a else "",
        dtype_b=b.dtype if b else "",
        rounding=place.rounding,
        max_abs_a=a.max_abs if a else math.nan,
        max_abs_b=b.max_abs if b else math.nan,
        nan_a=a.num_nan if a else 0,
        nan_b=b.num_nan if b else 0,
        inf_a=a.num_inf if a else 0,
        inf_b=b.num_inf if b else 0,
        limit=place.limit,
        note=note,
        **figures,
    )


def by_harm(row: AccuracyRow) -> tuple[bool, bool, float, bool, int]:
    """Return the sort key: rows that create NaN or inf, rows that inherit them, then by harm; ties in execution order."""
    return (row.harm < math.inf, row.is_inherited, -row.harm, row.kind != "output", row.order)


def as_computed(row: AccuracyRow) -> tuple[bool, int]:
    """Return the sort key of execution order: outputs forward, then gradients backward."""
    return (row.kind != "output", row.order)


def _beyond(value: float, inflow: float) -> float:
    return 0.0 if math.isinf(inflow) else max(0.0, value - inflow)
