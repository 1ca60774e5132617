"""Rows of a comparison: two tensors, how much of their difference was added here, and how bad that is."""

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
class Row:
    """One tensor of both runs; `_a` is the reference, `_b` what is judged."""

    kind: Kind
    name: str
    """Path of the module or parameter; `#2` is its second call, `[0]` or `.x` the place in what it returned."""
    module: str
    """Class of the module that it belongs to."""
    order: int
    """Position in its phase, from 1: outputs as the forward made them, gradients as the backward did."""
    depth: int
    """Position of the module's output in the forward, from 1; 0 where it has none."""
    shape: tuple[int, ...]
    dtype_a: str
    """Empty where the run has no such tensor."""
    dtype_b: str
    rounding: str
    """The coarsest dtype that either run used up to here."""
    error: float
    """L2 norm of the difference over that of the reference, of the elements that are finite in both; 1 where the reference
    is zero and b is not."""
    max_abs_error: float
    max_ulps: float
    """Largest difference in units in the last place of `rounding`."""
    cosine: float
    max_abs_a: float
    """Of the finite elements."""
    max_abs_b: float
    nan_a: int
    nan_b: int
    inf_a: int
    inf_b: int
    overflows: bool
    """Whether b is float16, and the reference (a gradient: times the loss scale of b) is larger than float16 holds."""
    underflow: float
    """Share of the elements that are zero in b and not in a."""
    inflow: float
    """Largest error of what the tensor was computed from."""
    limit: float
    """Largest error that rounding explains."""
    harm: float
    """inf for new NaN or inf and for what cannot be compared; else error and underflow that were added here."""
    diverges: bool
    """Whether there is more of a difference than rounding explains."""
    is_inherited: bool
    """Whether new NaN or inf were in what the tensor was computed from."""
    note: str
    """Why it cannot be compared, or why it is excused."""

    @property
    def is_bad(self) -> bool:
        """Whether b has NaN or inf that a has not."""
        return self.nan_b + self.inf_b > self.nan_a + self.inf_a

    @property
    def added(self) -> float:
        """Error beyond that of what the tensor was computed from."""
        return _beyond(self.error, self.inflow)

    @property
    def state(self) -> State:
        """The colour: red for overflow, NaN and inf, orange for a difference beyond rounding, yellow for a half tensor."""
        if self.is_bad or self.overflows:
            return "red"
        if self.diverges:
            return "orange"
        return "yellow" if self.dtype_b in GRIDS and GRIDS[self.dtype_b][0] <= GRIDS["float16"][0] else ""

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain types; numbers that are not finite are the texts `inf` and `nan`."""
        whole = {**asdict(self), "shape": list(self.shape), "added": self.added, "state": self.state}
        return {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in whole.items()
        }


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row stands."""

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
    """Something that a tensor was computed from, in both runs."""

    a: TensorRecord
    b: TensorRecord
    difference: Difference

    @property
    def is_bad(self) -> bool:
        """Whether b has NaN or inf that a has not."""
        return self.b.num_bad > self.a.num_bad


def compared_row(place: Place, own: Flow, flows: Sequence[Flow]) -> Row:
    """Return the row of two tensors of one shape."""
    a, b, apart = own.a, own.b, own.difference
    inflow = max((flow.difference.error for flow in flows), default=0.0)
    zeros = max((flow.difference.underflow for flow in flows), default=0.0)
    added = _beyond(apart.error, inflow) + _beyond(apart.underflow, zeros)
    return Row(
        kind=place.kind,
        name=place.name,
        module=place.module,
        order=place.order,
        depth=place.depth,
        shape=a.shape,
        dtype_a=a.dtype,
        dtype_b=b.dtype,
        rounding=place.rounding,
        error=apart.error,
        max_abs_error=apart.max_abs_error,
        max_ulps=max_ulps(a, b, place.rounding, place.ulp_scale),
        cosine=apart.cosine,
        max_abs_a=a.max_abs,
        max_abs_b=b.max_abs,
        nan_a=a.num_nan,
        nan_b=b.num_nan,
        inf_a=a.num_inf,
        inf_b=b.num_inf,
        overflows=b.dtype == "float16" and a.max_abs * place.scale_b > FLOAT16_MAX,
        underflow=apart.underflow,
        inflow=inflow,
        limit=place.limit,
        harm=math.inf if own.is_bad else added,
        diverges=own.is_bad or apart.error > place.limit,
        is_inherited=own.is_bad and any(flow.is_bad for flow in flows),
        note="",
    )


def uncompared_row(place: Place, a: TensorRecord | None, b: TensorRecord | None, note: str) -> Row:
    """Return the row of a tensor that one run has not, or that has another shape there."""
    some = a or b
    return Row(
        kind=place.kind,
        name=place.name,
        module=place.module,
        order=place.order,
        depth=place.depth,
        shape=some.shape if some else (),
        dtype_a=a.dtype if a else "",
        dtype_b=b.dtype if b else "",
        rounding=place.rounding,
        error=math.nan,
        max_abs_error=math.nan,
        max_ulps=math.nan,
        cosine=math.nan,
        max_abs_a=a.max_abs if a else math.nan,
        max_abs_b=b.max_abs if b else math.nan,
        nan_a=a.num_nan if a else 0,
        nan_b=b.num_nan if b else 0,
        inf_a=a.num_inf if a else 0,
        inf_b=b.num_inf if b else 0,
        overflows=False,
        underflow=math.nan,
        inflow=math.nan,
        limit=place.limit,
        harm=math.inf,
        diverges=True,
        is_inherited=False,
        note=note,
    )


def by_harm(row: Row) -> tuple[bool, bool, float, bool, int]:
    """Return the key that sorts rows: who makes NaN or inf, who inherits them, then by harm; ties as they ran."""
    return (row.harm < math.inf, row.is_inherited, -row.harm, row.kind != "output", row.order)


def as_computed(row: Row) -> tuple[bool, int]:
    """Return the key that sorts rows as they were computed: outputs forward, then gradients backward."""
    return (row.kind != "output", row.order)


def _beyond(value: float, inflow: float) -> float:
    return 0.0 if math.isinf(inflow) else max(0.0, value - inflow)
