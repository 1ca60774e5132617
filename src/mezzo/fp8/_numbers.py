"""FP8 numbers: their range, the scale that fits a tensor into it, and rounding."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
LARGEST = {E4M3: 448.0, E5M2: 57344.0}

MOST_SCALE = 2.0**126
"""The largest scale: its inverse is still a normal float32."""
EXPONENT_BITS = 0x7F800000
"""Mask of a float32: leaves the power of two below a number."""


def amax_of(x: Tensor, dim: int | None = None) -> Tensor:
    """Return the largest absolute value as float32, of all or along `dim` (kept as size 1)."""
    if x.numel() == 0:
        shape = (
            () if dim is None else tuple(1 if place == dim % x.dim() else size for place, size in enumerate(x.shape))
        )
        return torch.zeros(shape, dtype=torch.float32, device=x.device)
    amax: Tensor = torch.linalg.vector_norm(x, float("inf"), dim=dim, keepdim=dim is not None, dtype=torch.float32)
    return amax


def scale_for(amax: Tensor, dtype: torch.dtype, headroom: float = 1.0) -> Tensor:
    """Return the largest power of two that fits `amax * headroom` into an FP8 dtype.

    Multiplying by a power of two does not round, so only the smallest numbers depend on the scale;
    as FP8 is a floating-point format, not filling its range loses nothing. The scale is 1 for an
    amax of 0, and 0 for an infinite one, which turns infinite numbers into NaN. NaN stays NaN.
    """
    ratio = torch.clamp(LARGEST[dtype] / (amax * headroom), max=MOST_SCALE)
    power = (ratio.view(torch.int32) & EXPONENT_BITS).view(torch.float32)
    return torch.where(amax == 0, 1.0, torch.where(amax.isnan(), amax, power))


def round_to(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x * scale` in FP8, rounded to nearest even and clamped to its range.

    Infinity becomes NaN.
    """
    largest = LARGEST[dtype]
    fitted = torch.clamp(x.float() * scale, -largest, largest)
    return (fitted + (x - x)).to(dtype)  # x - x: 0, or NaN where x is not finite
