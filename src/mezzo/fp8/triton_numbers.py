"""Functions that Triton kernels share.

The scale of FP8 numbers, rounding to FP8, and a maximum over programs.

Imports Triton; `mezzo.fp8` does not.
"""

import triton
import triton.language as tl

from mezzo.fp8._numbers import EXPONENT_BITS, MOST_SCALE

_EXPONENT_BITS = tl.constexpr(EXPONENT_BITS)
_MOST_SCALE = tl.constexpr(MOST_SCALE)


@triton.jit
def scale_for(amax, LARGEST: tl.constexpr, HEADROOM: tl.constexpr):
    """Return the power of two that brings numbers up to `amax * HEADROOM` into range.

    See `_numbers.scale_for`.
    """
    ratio = tl.div_rn(tl.full([], LARGEST, tl.float32), amax * HEADROOM)
    ratio = tl.where(ratio > _MOST_SCALE, _MOST_SCALE, ratio)
    power = (ratio.to(tl.int32, bitcast=True) & _EXPONENT_BITS).to(tl.float32, bitcast=True)
    power = tl.where(amax == amax, power, amax)  # the exponent of NaN is that of infinity
    return tl.where(amax == 0.0, 1.0, power)


@triton.jit
def to_fp8(value, scale, LARGEST: tl.constexpr, DTYPE: tl.constexpr):
    """Return float32 numbers times a scale as FP8.

    Too large ones become the largest, infinity and NaN become NaN.
    """
    fitted = value * scale
    fitted = tl.where(fitted > LARGEST, LARGEST, tl.where(fitted < -LARGEST, -LARGEST, fitted))
    return (fitted + (value - value)).to(DTYPE)


@triton.jit
def raise_to(at, value):
    """Raise a float32 in memory to a value of at least 0, atomically.

    Floats of one sign compare as their bits do.
    """
    tl.atomic_max(at.to(tl.pointer_type(tl.int32)), value.to(tl.int32, bitcast=True), sem="relaxed")
