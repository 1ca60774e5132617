"""The difference of a tensor from its reference, in float64, over elements that are finite in both."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mezzo.proof._accuracy_run import GRIDS, TensorRecord


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of a tensor from its reference."""

    error: float = 0.0
    """L2 norm of the difference divided by that of the reference; 1 if only the reference is zero."""
    max_abs_error: float = 0.0
    cosine: float = 1.0
    underflow: float = 0.0
    """Share of the elements that are zero, but not in the reference."""
    distance: float = 0.0
    """L2 norm of the difference; extrapolated from a sample to the whole tensor."""


def difference(a: TensorRecord, b: TensorRecord) -> Difference:
    """Return the difference of b from the reference a of the same shape."""
    x, y = _finite(a, b)
    if x.numel() == 0:
        return Difference(error=math.inf if b.num_bad > a.num_bad else 0.0)
    apart = y - x
    distance, norm_a, norm_b = (float(each.norm()) for each in (apart, x, y))
    return Difference(
        error=0.0 if distance == 0 else distance / norm_a if norm_a > 0 else 1.0,
        max_abs_error=float(apart.abs().max()),
        cosine=min(1.0, float(x @ y) / (norm_a * norm_b)) if norm_a > 0 and norm_b > 0 else float(norm_a == norm_b),
        underflow=float(((y == 0) & (x != 0)).double().mean()),
        distance=distance * _share(a),
    )


def max_ulps(a: TensorRecord, b: TensorRecord, dtype: str, scale: float = 1.0) -> float:
    """Return the largest difference in units in the last place of a dtype, at the larger of the two magnitudes.

    Args:
        a: The reference.
        b: Of the same shape.
        dtype: The dtype that defines the units.
        scale: Factor of the numbers when they were rounded: the loss scale of a gradient.
    """
    x, y = _finite(a, b)
    if x.numel() == 0:
        return 0.0
    return float(((y - x).abs() / ulps(torch.maximum(x.abs(), y.abs()), dtype, scale)).max())


def ulps(magnitudes: Tensor, dtype: str, scale: float = 1.0) -> Tensor:
    """Return the distance to the next number of a dtype for float64 magnitudes that were rounded after scaling.

    >>> ulps(torch.tensor([1.0, 3.0, 0.0], dtype=torch.float64), "float16").log2().tolist()
    [-10.0, -9.0, -24.0]
    """
    bits, smallest = GRIDS.get(dtype, GRIDS["float32"])
    _, exponents = torch.frexp(magnitudes * scale)  # magnitude = m * 2^exponent, m in [0.5, 1)
    places = torch.where(magnitudes == 0, smallest, exponents - bits).clamp(min=smallest)
    return torch.exp2(places.double()) / scale


def norm(record: TensorRecord) -> float:
    """Return the L2 norm of the finite elements; extrapolated from a sample to the whole tensor."""
    values = record.values.double()
    return float(values[values.isfinite()].norm()) * _share(record)


def _finite(a: TensorRecord, b: TensorRecord) -> tuple[Tensor, Tensor]:
    x, y = a.values.double(), b.values.double()
    finite = x.isfinite() & y.isfinite()
    return x[finite], y[finite]


def _share(record: TensorRecord) -> float:
    """Return the factor from the norm of a sample to the norm of the whole tensor."""
    return math.sqrt(math.prod(record.shape) / max(record.values.numel(), 1))
