"""Shared by the Triton kernels of the step: the table of addresses, and loads and stores.

A program works on one chunk of one tensor. A row of the table holds the addresses of a parameter's
tensors, so that hundreds of small tensors need one launch. Kernels are launched with fp fusion off,
so that each operation rounds once, in float32: the same formula in torch operations gives the same
bits.
"""

import triton
import triton.language as tl

# Columns of the table, int64 each.
GRAD = tl.constexpr(0)
TARGET = tl.constexpr(1)
HALF = tl.constexpr(2)
STATE_A = tl.constexpr(3)
STATE_B = tl.constexpr(4)
STEP = tl.constexpr(5)
LR = tl.constexpr(6)
NUMEL = tl.constexpr(7)
GROUP = tl.constexpr(8)
INDEX = tl.constexpr(9)
WIDTH = tl.constexpr(10)
VALUES = tl.constexpr(11)
TRANSPOSED = tl.constexpr(12)
COPY_STATE = tl.constexpr(13)
COLUMNS = tl.constexpr(14)

# Columns of the options of a parameter group, float64 each.
OPTIONS = tl.constexpr(8)

# Results of the check, float32 each.
FOUND = tl.constexpr(0)
FIRST_BAD = tl.constexpr(1)
NORM = tl.constexpr(2)
CLIP = tl.constexpr(3)

# Counters that the programs of a launch share, int32 each.
ARRIVED = tl.constexpr(0)
BAD_KEY = tl.constexpr(1)


@triton.jit
def address(row, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(row + COLUMN).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def read(pointer, offsets, inside, MASKED: tl.constexpr):
    if MASKED:
        value = tl.load(pointer + offsets, mask=inside, other=0.0)
    else:
        value = tl.load(pointer + offsets)
    return value


@triton.jit
def write(pointer, offsets, value, inside, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer + offsets, value, mask=inside)
    else:
        tl.store(pointer + offsets, value)


@triton.jit
def inverse_of(scale, HAS_SCALE: tl.constexpr):
    if HAS_SCALE:
        inverse = tl.div_rn(1.0, tl.load(scale))
    else:
        inverse = tl.full([], 1.0, tl.float32)
    return inverse
