"""A float32 master in two parts: the half weight that is there anyway, and in 16 bits what rounding took from it.

bfloat16 is the upper half of a float32 number and the rest is the lower one: nothing is lost. It is rounded half away from
zero, not half to even: 2^16 rests belong to each weight then, and not one more to every other.

float16 keeps ten bits of a fraction: the rest counts the float32 numbers from the rounded value to the master, of which there
are at most 2^12, and below 2^-14, where float16 has fewer bits, up to 2^15. Below 2^-16 it counts steps of 2^-39: a master that
small has that for its finest step, where float32 alone would go on halving it. Above 65504 a float16 weight is infinite, and so
is its master.
"""

from __future__ import annotations

import torch
from torch import Tensor

REST_DTYPE = torch.int16

SMALLEST = 2.0**-16
"""float16: from here on the rest counts float32 numbers, and a master is any of them."""
STEPS_PER_UNIT = 2.0**39
"""float16: how many steps of smaller masters are 1; float32 numbers above SMALLEST are a step apart, too."""
TIE = 0x8000
"""bfloat16: half of what its last bit is worth, in float32 numbers."""


def join(half: Tensor, rest: Tensor) -> Tensor:
    """Return the float32 values of half weights and their rests, as a new tensor in their layout."""
    if half.dtype is torch.bfloat16:
        bits = half.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
        # Below zero there is nothing but numbers of the other sign, the last of them not-a-number: a weight that was set to
        # zero behind our back must not become one.
        rest = torch.where(half == 0, rest.clamp_min(0), rest)
        return bits.add_(rest).view(torch.float32)
    wide = half.float()
    near = (wide.view(torch.int32) + rest).view(torch.float32)
    return torch.where(wide.abs() >= SMALLEST, near, wide + rest.float().mul_(1 / STEPS_PER_UNIT))


def split(value: Tensor, half_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return float32 values as half weights and rests, in their layout; what is not finite has a rest of zero."""
    if half_dtype is torch.bfloat16:
        bits = value.view(torch.int32)
        upper = (bits + TIE).bitwise_right_shift_(16)
        half = upper.to(torch.int16).view(torch.bfloat16)
        rest = (bits - upper.bitwise_left_shift_(16)).to(REST_DTYPE)
        is_nan = value.isnan()  # the sum above runs over its bits
        return half.masked_fill_(is_nan, torch.nan), rest.masked_fill_(is_nan, 0)
    size = value.abs()
    steps = (size + SMALLEST).sub_(SMALLEST)  # float32 numbers from SMALLEST to twice that are so many steps apart
    value = torch.where(size < SMALLEST, torch.where(value < 0, -steps, steps), value)
    half = value.to(half_dtype)
    wide = half.float()
    small = ((value - wide) * STEPS_PER_UNIT).to(torch.int32)
    rest = torch.where(wide.abs() >= SMALLEST, value.view(torch.int32) - wide.view(torch.int32), small)
    return half, rest.masked_fill_(~wide.isfinite(), 0).to(REST_DTYPE)
