"""FP8 numbers: how large they get, the scale that fits a tensor into them, and a tensor rounded to them."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
LARGEST = {E4M3: 448.0, E5M2: 57344.0}

MOST_SCALE = 2.0**126
"""Its inverse is still a normal float32."""
EXPONENT_BITS = 0x7F800000
"""Of a float32: what is left under it is the power of two below a number."""


def amax_of(x: Tensor, dim: int | None = None) -> Tensor:
    """Return the largest absolute value as float32, of all or along a dimension, which is then kept with size 1."""
    if x.numel() == 0:
        shape = (
            () if dim is None else tuple(1 if place == dim % x.dim() else size for place, size in enumerate(x.shape))
        )
        return torch.zeros(shape, dtype=torch.float32, device=x.device)
    amax: Tensor = torch.linalg.vector_norm(x, float("inf"), dim=dim, keepdim=dim is not None, dtype=torch.float32)
    return amax


def scale_for(amax: Tensor, dtype: torch.dtype, headroom: float = 1.0) -> Tensor:
    """Return the largest power of two that brings numbers up to `amax * headroom` into the range of an FP8 dtype.

    A power of two moves numbers without rounding them, so that two scales give the same numbers but for the smallest; nothing
    is lost by not filling the range, since FP8 numbers float. 1 for an amax of 0; for an infinite one 0, which makes infinite
    numbers NaN. Not a number stays so.
    """
    ratio = torch.clamp(LARGEST[dtype] / (amax * headroom), max=MOST_SCALE)
    power = (ratio.view(torch.int32) & EXPONENT_BITS).view(torch.float32)
    return torch.where(amax == 0, 1.0, torch.where(amax.isnan(), amax, power))


def round_to(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x * scale` as FP8, to nearest even; what is too large becomes the largest, what is not finite NaN."""
    largest = LARGEST[dtype]
    fitted = torch.clamp(x.float() * scale, -largest, largest)
    return (fitted + (x - x)).to(dtype)  # x - x: 0, or NaN where x is not finite
