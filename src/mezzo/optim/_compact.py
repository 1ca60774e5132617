"""Compact masters.

A float32 value as the half weight plus a 16-bit rest, which is what rounding removed.

bfloat16: the weight is the upper half of the float32 bits, the rest the lower half, so nothing is
lost. Rounding is half away from zero, not half to even: then every weight has exactly 2^16 possible
rests.

float16: the rest counts float32 numbers between the rounded weight and the master. There are at
most 2^12 of them, and up to 2^15 below 2^-14, where float16 has fewer bits. Below 2^-16 the rest
counts steps of 2^-39, the finest step of a master that small; float32 itself has finer ones. Above
65504 a float16 weight is infinite, and so is its master.
"""

from __future__ import annotations

import torch
from torch import Tensor

REST_DTYPE = torch.int16

SMALLEST = 2.0**-16
"""float16: above it the rest counts float32 numbers, and a master can be any of them."""
STEPS_PER_UNIT = 2.0**39
"""float16: steps per 1.0 of masters below SMALLEST.

Float32 numbers just above it are also a step apart.
"""
TIE = 0x8000
"""bfloat16: half of its last bit, counted in float32 numbers."""


def join(half: Tensor, rest: Tensor) -> Tensor:
    """Return the float32 values of half weights and rests, in a new tensor of their layout."""
    if half.dtype is torch.bfloat16:
        bits = half.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
        # A negative rest would turn zero into NaN: if the weight was set to zero without our
        # knowledge, the rest is of an older value.
        rest = torch.where(half == 0, rest.clamp_min(0), rest)
        return bits.add_(rest).view(torch.float32)
    wide = half.float()
    near = (wide.view(torch.int32) + rest).view(torch.float32)
    return torch.where(wide.abs() >= SMALLEST, near, wide + rest.float().mul_(1 / STEPS_PER_UNIT))


def split(value: Tensor, half_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split float32 values into half weights and rests of the same layout.

    Infinity and NaN have a rest of 0.
    """
    if half_dtype is torch.bfloat16:
        bits = value.view(torch.int32)
        upper = (bits + TIE).bitwise_right_shift_(16)
        half = upper.to(torch.int16).view(torch.bfloat16)
        rest = (bits - upper.bitwise_left_shift_(16)).to(REST_DTYPE)
        is_nan = value.isnan()  # adding TIE may change its bits to another value
        return half.masked_fill_(is_nan, torch.nan), rest.masked_fill_(is_nan, 0)
    size = value.abs()
    # Rounds: float32 numbers from SMALLEST to twice that are one step apart
    steps = (size + SMALLEST).sub_(SMALLEST)
    value = torch.where(size < SMALLEST, torch.where(value < 0, -steps, steps), value)
    half = value.to(half_dtype)
    wide = half.float()
    small = ((value - wide) * STEPS_PER_UNIT).to(torch.int32)
    rest = torch.where(wide.abs() >= SMALLEST, value.view(torch.int32) - wide.view(torch.int32), small)
    return half, rest.masked_fill_(~wide.isfinite(), 0).to(REST_DTYPE)
