"""Loads and stores of weights in the Triton update.

Full or compact masters, half copies, FP8 copies.
"""

import triton
import triton.language as tl

from mezzo.fp8 import AMAX, E4M3, HEADROOM, INVERSE, LARGEST, NEWEST, UNKNOWN_AMAX
from mezzo.fp8.triton_numbers import raise_to, scale_for, to_fp8
from mezzo.optim import _compact
from mezzo.optim._triton_table import COLUMNS, COPY_STATE, HALF, TARGET, TRANSPOSED, VALUES, WIDTH, address, read, write

# Places in the state of FP8 copies, float32 each.
_INVERSE = tl.constexpr(INVERSE)
_AMAX = tl.constexpr(AMAX)
_NEWEST = tl.constexpr(NEWEST)
_UNKNOWN_AMAX = tl.constexpr(UNKNOWN_AMAX)
_FP8 = tl.constexpr(tl.float8e4nv)
_LARGEST = tl.constexpr(LARGEST[E4M3])
_HEADROOM = tl.constexpr(HEADROOM)

# Constants of compact masters (`mezzo.optim._compact`).
_SMALLEST = tl.constexpr(_compact.SMALLEST)
_STEPS_PER_UNIT = tl.constexpr(_compact.STEPS_PER_UNIT)
_STEP = tl.constexpr(1 / _compact.STEPS_PER_UNIT)
_TIE = tl.constexpr(_compact.TIE)
_BFLOAT16_NAN = tl.constexpr(0x7FC0)


@triton.jit
def half_address(row, HALF_DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the address of the half copy of a master.

    If it has none, an address that is not used.
    """
    return address(row, HALF, tl.float16 if HALF_DTYPE is None else HALF_DTYPE, ALIGNED)


@triton.jit
def target_address(row, COMPACT: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the address of the master, or of the rest of a compact one."""
    return address(row, TARGET, tl.int16 if COMPACT else tl.float32, ALIGNED)


@triton.jit
def _join(half, rest, HALF_DTYPE: tl.constexpr):
    """Return compact masters in float32; see `mezzo.optim._compact.join`."""
    if HALF_DTYPE == tl.bfloat16:
        bits = half.to(tl.int16, bitcast=True).to(tl.int32) << 16
        rest = tl.where((bits << 1) == 0, tl.maximum(rest, 0), rest)
        weight = (bits + rest).to(tl.float32, bitcast=True)
    else:
        wide = half.to(tl.float32)
        near = (wide.to(tl.int32, bitcast=True) + rest).to(tl.float32, bitcast=True)
        weight = tl.where(tl.abs(wide) >= _SMALLEST, near, wide + rest.to(tl.float32) * _STEP)
    return weight


@triton.jit
def _split(weight, HALF_DTYPE: tl.constexpr):
    """Return the half weights and the rests of float32 values; see `mezzo.optim._compact.split`."""
    if HALF_DTYPE == tl.bfloat16:
        bits = weight.to(tl.int32, bitcast=True)
        upper = (bits + _TIE) >> 16
        rest = bits - (upper << 16)
        is_nan = weight != weight
        half = tl.where(is_nan, _BFLOAT16_NAN, upper).to(tl.int16).to(tl.bfloat16, bitcast=True)
        rest = tl.where(is_nan, 0, rest)
    else:
        size = tl.abs(weight)
        steps = (size + _SMALLEST) - _SMALLEST
        weight = tl.where(size < _SMALLEST, tl.where(weight < 0, -steps, steps), weight)
        half = weight.to(HALF_DTYPE)
        wide = half.to(tl.float32)
        near = weight.to(tl.int32, bitcast=True) - wide.to(tl.int32, bitcast=True)
        small = ((weight - wide) * _STEPS_PER_UNIT).to(tl.int32)
        rest = tl.where(tl.abs(wide) >= _SMALLEST, near, small)
        rest = tl.where(tl.abs(wide) < float("inf"), rest, 0)
    return half, rest.to(tl.int16)


@triton.jit
def read_weight(target, half, offsets, inside, HALF_DTYPE: tl.constexpr, COMPACT: tl.constexpr, MASKED: tl.constexpr):
    """Return the float32 masters."""
    weight = read(target, offsets, inside, MASKED)
    if COMPACT:
        weight = _join(read(half, offsets, inside, MASKED), weight.to(tl.int32), HALF_DTYPE)
    return weight


@triton.jit
def write_weight(
    target, half, offsets, inside, weight, HALF_DTYPE: tl.constexpr, COMPACT: tl.constexpr, MASKED: tl.constexpr
):
    """Write the masters and, if they have any, their half copies.

    Return the weights in half, if half.
    """
    if COMPACT:
        weight, rest = _split(weight, HALF_DTYPE)
        write(target, offsets, rest, inside, MASKED)
    else:
        write(target, offsets, weight, inside, MASKED)
        if HALF_DTYPE is not None:
            weight = weight.to(HALF_DTYPE)
    if HALF_DTYPE is not None:
        write(half, offsets, weight, inside, MASKED)
    return weight


@triton.jit
def tile(row, number, numel, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the size of a matrix, and the first row and column of one of its tiles."""
    width = tl.multiple_of(tl.load(row + WIDTH), 16)  # as every dimension of an FP8 product
    height = tl.multiple_of(numel // width, 16)
    across = tl.cdiv(width, BLOCK)
    return height, width, number // across * ROWS, number % across * BLOCK


@triton.jit
def is_whole(row, number, numel, FP8: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Whether a whole chunk is inside its tensor."""
    if FP8:
        height, width, top, left = tile(row, number, numel, ROWS * BLOCKS, BLOCK)
        whole = (top + ROWS * BLOCKS <= height) & (left + BLOCK <= width)
    else:
        whole = number * (BLOCK * BLOCKS) + BLOCK * BLOCKS <= numel
    return whole


@triton.jit
def places(block, height, width, top, left, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the offsets of a block in its matrix and in the transpose, and a mask of those inside.

    Offsets count from the first element of the tile, in 32 bits: 64 bits need too many registers.
    """
    rows, columns = block * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    offsets = rows[:, None] * width.to(tl.int32) + columns[None, :]
    turned = columns[None, :] * height.to(tl.int32) + rows[:, None]
    return offsets, turned, (rows < height - top)[:, None] & (columns < width - left)[None, :]


@triton.jit
def copies(row, first, first_turned, ALIGNED: tl.constexpr):
    """Return the addresses of the FP8 copies of a tile, and their scale."""
    values = address(row, VALUES, _FP8, ALIGNED) + first
    transposed = address(row, TRANSPOSED, _FP8, ALIGNED) + first_turned
    scale = scale_for(tl.load(address(row, COPY_STATE, tl.float32, False) + _AMAX), _LARGEST, _HEADROOM)
    return values, transposed, scale


@triton.jit
def write_copies(values, offsets, transposed, turned, inside, weight, scale, largest, MASKED: tl.constexpr):
    """Write half weights in FP8, plain and transposed.

    Return the largest value of each lane, as bits.

    Absolute values compare as their bits do; infinity and NaN are the largest.
    """
    value = weight.to(tl.float32)
    small = to_fp8(value, scale, _LARGEST, _FP8)
    write(values, offsets, small, inside, MASKED)
    write(transposed, turned, small, inside, MASKED)
    bits = tl.abs(value).to(tl.int32, bitcast=True)
    if MASKED:
        bits = tl.where(inside, bits, 0)
    return tl.maximum(bits, largest)


@triton.jit
def raise_newest(row, largest):
    """Raise the newest amax to the largest value of a tile.

    Most tiles skip the atomic, as theirs is smaller.
    """
    newest_at = address(row, COPY_STATE, tl.float32, False) + _NEWEST
    bits = tl.max(tl.max(largest, 1), 0)
    if bits > tl.load(newest_at.to(tl.pointer_type(tl.int32)), volatile=True):
        raise_to(newest_at, bits.to(tl.float32, bitcast=True))


@triton.jit
def finish_copies(table, rows):
    """Store the inverse scale of the copies of all rows, and their amax for the next scale."""
    first = 0
    while first < rows:
        numbers = first + tl.arange(0, 128)
        inside = numbers < rows
        states = tl.load(table + numbers.to(tl.int64) * COLUMNS + COPY_STATE, mask=inside, other=0)
        states = states.to(tl.pointer_type(tl.float32))
        scale = scale_for(tl.load(states + _AMAX, mask=inside, other=0.0), _LARGEST, _HEADROOM)
        newest = tl.load(states + _NEWEST, mask=inside, other=0.0, volatile=True)
        tl.store(states + _INVERSE, tl.div_rn(1.0, scale), mask=inside)
        tl.store(states + _AMAX, tl.where(newest == 0.0, _UNKNOWN_AMAX, newest), mask=inside)
        tl.store(states + _NEWEST, 0.0, mask=inside)
        first += 128
