"""The Triton kernels of the step. Every tensor of a launch is reached through a table of addresses.

A program works on one chunk of one tensor. A row of the table holds the addresses of a parameter's tensors, so that
hundreds of small tensors are one launch. Launched with fp fusion off, so that each operation rounds once, in float32: the
same formula in single torch operations gives the same bits.

A chunk is a run of elements; of a weight that has FP8 copies it is a tile, so that the update can write the copy and its
transpose from what it holds. Bytes that SGD's update moves a parameter: 2 gradient, 4 + 4 master, 2 half, 2 FP8 copies where there
are some: 12 or 14, and no pass over weights besides. Momentum is 8 more, Adam 16.
"""

import triton
import triton.language as tl

from mezzo.fp8 import E4M3, HEADROOM, LARGEST
from mezzo.fp8._kernels import raise_to, scale_for, to_fp8
from mezzo.fp8._weights import AMAX, INVERSE, NEWEST, UNKNOWN_AMAX

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

# What the check leaves, float32 each.
FOUND = tl.constexpr(0)
FIRST_BAD = tl.constexpr(1)
NORM = tl.constexpr(2)
CLIP = tl.constexpr(3)

# What the check needs to remember between its programs, int32 each.
ARRIVED = tl.constexpr(0)
BAD_KEY = tl.constexpr(1)

_SUM_BLOCK = tl.constexpr(2048)

# What stands in the state of FP8 copies, float32 each.
_INVERSE = tl.constexpr(INVERSE)
_AMAX = tl.constexpr(AMAX)
_NEWEST = tl.constexpr(NEWEST)
_UNKNOWN_AMAX = tl.constexpr(UNKNOWN_AMAX)
_FP8 = tl.constexpr(tl.float8e4nv)
_LARGEST = tl.constexpr(LARGEST[E4M3])
_HEADROOM = tl.constexpr(HEADROOM)


@triton.jit
def _address(row, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(row + COLUMN).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _read(pointer, offsets, inside, MASKED: tl.constexpr):
    if MASKED:
        value = tl.load(pointer + offsets, mask=inside, other=0.0)
    else:
        value = tl.load(pointer + offsets)
    return value


@triton.jit
def _write(pointer, offsets, value, inside, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer + offsets, value, mask=inside)
    else:
        tl.store(pointer + offsets, value)


@triton.jit
def _inverse_of(scale, HAS_SCALE: tl.constexpr):
    if HAS_SCALE:
        inverse = tl.div_rn(1.0, tl.load(scale))
    else:
        inverse = tl.full([], 1.0, tl.float32)
    return inverse


@triton.jit
def _look_at(grad, start, numel, inverse, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr):
    """Return, per lane, whether a gradient of the chunk is not finite, and the sum of their squares."""
    bad = tl.zeros([BLOCK], tl.int32)
    squares = tl.zeros([BLOCK], tl.float32)
    for block in tl.static_range(BLOCKS):  # unrolled: several loads are on their way at a time
        offsets = start + block * BLOCK + tl.arange(0, BLOCK)
        value = _read(grad, offsets, offsets < numel, MASKED).to(tl.float32)
        finite = tl.abs(value * inverse) < float("inf")  # not so for NaN
        bad |= tl.where(finite, 0, 1)
        squares += value * value
    return bad, squares


@triton.jit(do_not_specialize=["programs", "first_program", "count"])
def check_kernel(
    table,
    chunk_rows,
    chunk_numbers,
    partial_sums,
    between,
    verdict,
    scale,
    max_norm,
    programs,
    first_program,
    count,
    GRAD_DTYPE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Look for gradients that are not finite and, if asked, sum their squares. The last program says the verdict.

    Several launches (one a dtype) can share a verdict: `programs` counts all of them, `first_program` those before.
    """
    program = tl.program_id(0)
    row = table + tl.load(chunk_rows + program).to(tl.int64) * COLUMNS
    start = tl.load(chunk_numbers + program).to(tl.int64) * (BLOCK * BLOCKS)
    grad = _address(row, GRAD, GRAD_DTYPE, ALIGNED)
    numel = tl.load(row + NUMEL)
    inverse = _inverse_of(scale, HAS_SCALE)
    if start + BLOCK * BLOCKS <= numel:
        bad, squares = _look_at(grad, start, numel, inverse, BLOCK, BLOCKS, False)
    else:
        bad, squares = _look_at(grad, start, numel, inverse, BLOCK, BLOCKS, True)
    is_bad = tl.max(bad, 0)
    if HAS_NORM:
        total = tl.sum(squares, 0)
        # Squares of large float32 numbers may overflow: then the norm is useless, and the step is skipped.
        is_bad = tl.where(total < float("inf"), is_bad, 1)
        tl.store(partial_sums + first_program + program, total.to(tl.float64))
    if is_bad > 0:
        key = count - tl.load(row + INDEX).to(tl.int32)  # so that a maximum finds the first
        tl.atomic_max(between + BAD_KEY, key, sem="relaxed")
    arrived = tl.atomic_add(between + ARRIVED, 1, sem="acq_rel")
    if arrived == programs - 1:
        key = tl.load(between + BAD_KEY, volatile=True)
        found = tl.where(key > 0, 1.0, 0.0)
        tl.store(verdict + FOUND, found)
        tl.store(verdict + FIRST_BAD, tl.where(key > 0, count - key, -1).to(tl.float32))
        if HAS_NORM:
            sums = tl.zeros([_SUM_BLOCK], tl.float64)
            first = 0
            while first < programs:
                places = first + tl.arange(0, _SUM_BLOCK)
                sums += tl.load(partial_sums + places, mask=places < programs, other=0.0, volatile=True)
                first += _SUM_BLOCK
            norm = (tl.sqrt(tl.sum(sums, 0)) * inverse.to(tl.float64)).to(tl.float32)
            clip = tl.div_rn(max_norm, norm + 1e-6)
            tl.store(verdict + NORM, norm)
            tl.store(verdict + CLIP, tl.where(clip < 1.0, clip, tl.where(clip == clip, 1.0, clip)))
        tl.store(between + BAD_KEY, 0)
        tl.store(between + ARRIVED, 0)


@triton.jit
def _factor(scale, clip, HAS_SCALE: tl.constexpr, HAS_CLIP: tl.constexpr):
    factor = _inverse_of(scale, HAS_SCALE)
    if HAS_CLIP:
        factor = factor * tl.load(clip)
    return factor


@triton.jit
def _gradient(pointer, offsets, inside, factor, MAXIMIZE: tl.constexpr, MASKED: tl.constexpr):
    value = _read(pointer, offsets, inside, MASKED).to(tl.float32) * factor
    if MAXIMIZE:
        value = -value
    return value


@triton.jit
def _learning_rate(row, options):
    pointer = tl.load(row + LR)
    if pointer == 0:
        rate = tl.load(options)
    else:
        rate = tl.load(pointer.to(tl.pointer_type(tl.float32))).to(tl.float64)
    return rate


@triton.jit
def _tile(row, number, numel, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the size of a matrix, and the first row and column of one of its tiles."""
    width = tl.multiple_of(tl.load(row + WIDTH), 16)  # as every dimension of an FP8 product
    height = tl.multiple_of(numel // width, 16)
    across = tl.cdiv(width, BLOCK)
    return height, width, number // across * ROWS, number % across * BLOCK


@triton.jit
def _is_whole(row, number, numel, FP8: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Whether all of a chunk is inside its tensor."""
    if FP8:
        height, width, top, left = _tile(row, number, numel, ROWS * BLOCKS, BLOCK)
        whole = (top + ROWS * BLOCKS <= height) & (left + BLOCK <= width)
    else:
        whole = number * (BLOCK * BLOCKS) + BLOCK * BLOCKS <= numel
    return whole


@triton.jit
def _places(block, height, width, top, left, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return where a block of a tile is in its matrix and in the transposed one, and which of its places are inside.

    Counted from the tile's first place, in 32 bits: 64 take too many registers.
    """
    rows, columns = block * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    offsets = rows[:, None] * width.to(tl.int32) + columns[None, :]
    turned = columns[None, :] * height.to(tl.int32) + rows[:, None]
    return offsets, turned, (rows < height - top)[:, None] & (columns < width - left)[None, :]


@triton.jit
def _copies(row, first, first_turned, ALIGNED: tl.constexpr):
    """Return where the FP8 copies of a tile go, and by which scale: that of the weights as they were before the update."""
    values = _address(row, VALUES, _FP8, ALIGNED) + first
    transposed = _address(row, TRANSPOSED, _FP8, ALIGNED) + first_turned
    scale = scale_for(tl.load(_address(row, COPY_STATE, tl.float32, False) + _AMAX), _LARGEST, _HEADROOM)
    return values, transposed, scale


@triton.jit
def _half_address(row, HALF_DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return where the half copy of a master is; where there is none, some address that nobody uses."""
    return _address(row, HALF, tl.float16 if HALF_DTYPE is None else HALF_DTYPE, ALIGNED)


@triton.jit
def _write_half(half, offsets, inside, weight, HALF_DTYPE: tl.constexpr, MASKED: tl.constexpr):
    """Write the half copy of a master, if there is one; return what the weight is now."""
    if HALF_DTYPE is not None:
        weight = weight.to(HALF_DTYPE)
        _write(half, offsets, weight, inside, MASKED)
    return weight


@triton.jit
def _write_copies(values, offsets, transposed, turned, inside, weight, scale, largest, MASKED: tl.constexpr):
    """Write half weights in FP8, as they are and transposed; return the largest of each lane so far, as bits.

    Numbers without a sign compare as their bits do, and so infinity and what is not a number are the largest.
    """
    value = weight.to(tl.float32)
    small = to_fp8(value, scale, _LARGEST, _FP8)
    _write(values, offsets, small, inside, MASKED)
    _write(transposed, turned, small, inside, MASKED)
    bits = tl.abs(value).to(tl.int32, bitcast=True)
    if MASKED:
        bits = tl.where(inside, bits, 0)
    return tl.maximum(bits, largest)


@triton.jit
def _raise_newest(row, largest):
    """Make known what was the largest in a tile. Most are no larger than what others found, and then nobody waits in line."""
    newest_at = _address(row, COPY_STATE, tl.float32, False) + _NEWEST
    bits = tl.max(tl.max(largest, 1), 0)
    if bits > tl.load(newest_at.to(tl.pointer_type(tl.int32)), volatile=True):
        raise_to(newest_at, bits.to(tl.float32, bitcast=True))


@triton.jit
def _finish_copies(table, rows):
    """Note the scale that the copies of all rows were written with; what was the largest makes the next one."""
    first = 0
    while first < rows:
        numbers = first + tl.arange(0, 128)
        here = numbers < rows
        states = tl.load(table + numbers.to(tl.int64) * COLUMNS + COPY_STATE, mask=here, other=0)
        states = states.to(tl.pointer_type(tl.float32))
        scale = scale_for(tl.load(states + _AMAX, mask=here, other=0.0), _LARGEST, _HEADROOM)
        newest = tl.load(states + _NEWEST, mask=here, other=0.0, volatile=True)
        tl.store(states + _INVERSE, tl.div_rn(1.0, scale), mask=here)
        tl.store(states + _AMAX, tl.where(newest == 0.0, _UNKNOWN_AMAX, newest), mask=here)
        tl.store(states + _NEWEST, 0.0, mask=here)
        first += 128


@triton.jit
def _sgd_block(
    grad,
    target,
    buffer_at,
    offsets,
    inside,
    factor,
    lr,
    decay,
    momentum,
    undamped,
    DECAYS: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    MASKED: tl.constexpr,
):
    value = _gradient(grad, offsets, inside, factor, MAXIMIZE, MASKED)
    weight = _read(target, offsets, inside, MASKED)
    if DECAYS:
        value = value + weight * decay
    if HAS_MOMENTUM:
        buffer = _read(buffer_at, offsets, inside, MASKED) * momentum + value * undamped
        _write(buffer_at, offsets, buffer, inside, MASKED)
        if NESTEROV:
            value = value + buffer * momentum
        else:
            value = buffer
    weight = weight - value * lr
    _write(target, offsets, weight, inside, MASKED)
    return weight


@triton.jit
def _sgd_chunk(
    row,
    options,
    number,
    numel,
    factor,
    GRAD_DTYPE: tl.constexpr,
    HALF_DTYPE: tl.constexpr,
    DECAYS: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    FP8: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    MASKED: tl.constexpr,
):
    grad = _address(row, GRAD, GRAD_DTYPE, ALIGNED)
    target = _address(row, TARGET, tl.float32, ALIGNED)
    buffer_at = _address(row, STATE_A, tl.float32, ALIGNED)
    half = _half_address(row, HALF_DTYPE, ALIGNED)
    lr = _learning_rate(row, options).to(tl.float32)
    decay = tl.load(options + 1).to(tl.float32)
    momentum = tl.load(options + 2).to(tl.float32)
    undamped = tl.load(options + 3).to(tl.float32)
    if FP8:
        height, width, top, left = _tile(row, number, numel, ROWS * BLOCKS, BLOCK)
        first = top * width + left
        grad += first
        target += first
        buffer_at += first
        half += first
        values, transposed, scale = _copies(row, first, left * height + top, ALIGNED)
        largest = tl.zeros([ROWS, BLOCK], tl.int32)
        for block in range(BLOCKS):
            offsets, turned, inside = _places(block, height, width, top, left, ROWS, BLOCK)
            weight = _sgd_block(grad, target, buffer_at, offsets, inside, factor, lr, decay, momentum, undamped, DECAYS, HAS_MOMENTUM, NESTEROV, MAXIMIZE, MASKED)  # fmt: skip
            weight = _write_half(half, offsets, inside, weight, HALF_DTYPE, MASKED)
            largest = _write_copies(values, offsets, transposed, turned, inside, weight, scale, largest, MASKED)
        _raise_newest(row, largest)
    else:
        for block in range(BLOCKS):
            offsets = number * (BLOCK * BLOCKS) + block * BLOCK + tl.arange(0, BLOCK)
            inside = offsets < numel
            weight = _sgd_block(grad, target, buffer_at, offsets, inside, factor, lr, decay, momentum, undamped, DECAYS, HAS_MOMENTUM, NESTEROV, MAXIMIZE, MASKED)  # fmt: skip
            _write_half(half, offsets, inside, weight, HALF_DTYPE, MASKED)


@triton.jit(do_not_specialize=["rows", "programs"])
def sgd_kernel(
    table,
    chunk_rows,
    chunk_numbers,
    group_options,
    between,
    found,
    scale,
    clip,
    rows,
    programs,
    GRAD_DTYPE: tl.constexpr,
    HALF_DTYPE: tl.constexpr,
    HAS_FOUND: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_CLIP: tl.constexpr,
    DECAYS: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    FP8: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """SGD on float32 masters, and their half copies. Options: lr, weight decay, momentum, 1 - dampening.

    The last program of a launch with FP8 copies notes their scales.
    """
    program = tl.program_id(0)
    row = table + tl.load(chunk_rows + program).to(tl.int64) * COLUMNS
    number = tl.load(chunk_numbers + program).to(tl.int64)
    if HAS_FOUND:
        if tl.load(found) > 0.0:
            return
    options = group_options + tl.load(row + GROUP) * OPTIONS
    numel = tl.load(row + NUMEL)
    factor = _factor(scale, clip, HAS_SCALE, HAS_CLIP)
    if _is_whole(row, number, numel, FP8, ROWS, BLOCK, BLOCKS):
        _sgd_chunk(row, options, number, numel, factor, GRAD_DTYPE, HALF_DTYPE, DECAYS, HAS_MOMENTUM, NESTEROV, MAXIMIZE, ALIGNED, FP8, ROWS, BLOCK, BLOCKS, False)  # fmt: skip
    else:
        _sgd_chunk(row, options, number, numel, factor, GRAD_DTYPE, HALF_DTYPE, DECAYS, HAS_MOMENTUM, NESTEROV, MAXIMIZE, ALIGNED, FP8, ROWS, BLOCK, BLOCKS, True)  # fmt: skip
    if FP8:
        tl.debug_barrier()  # every warp has read its scale
        arrived = tl.atomic_add(between + ARRIVED, 1, sem="acq_rel")
        if arrived == programs - 1:
            _finish_copies(table, rows)
            tl.store(between + ARRIVED, 0)


@triton.jit
def _adam_block(
    grad,
    target,
    mean_at,
    square_at,
    offsets,
    inside,
    factor,
    decay,
    kept,
    new_mean,
    old_square,
    new_square,
    eps,
    rate,
    spread,
    DECAYS: tl.constexpr,
    DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    MASKED: tl.constexpr,
):
    value = _gradient(grad, offsets, inside, factor, MAXIMIZE, MASKED)
    weight = _read(target, offsets, inside, MASKED)
    if DECAYS:
        if DECOUPLED:
            weight = weight * kept
        else:
            value = value + weight * decay
    mean = _read(mean_at, offsets, inside, MASKED)
    away = value - mean
    # As torch's lerp: from the nearer end.
    mean = tl.where(new_mean < 0.5, mean + away * new_mean, value - away * (1.0 - new_mean))
    square = _read(square_at, offsets, inside, MASKED) * old_square + value * value * new_square
    spread_out = tl.div_rn(tl.sqrt_rn(square), spread) + eps
    weight = weight - tl.div_rn(rate * mean, spread_out)
    _write(mean_at, offsets, mean, inside, MASKED)
    _write(square_at, offsets, square, inside, MASKED)
    _write(target, offsets, weight, inside, MASKED)
    return weight


@triton.jit
def _adam_chunk(
    row,
    options,
    number,
    numel,
    factor,
    GRAD_DTYPE: tl.constexpr,
    HALF_DTYPE: tl.constexpr,
    DECAYS: tl.constexpr,
    DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    FP8: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    MASKED: tl.constexpr,
):
    grad = _address(row, GRAD, GRAD_DTYPE, ALIGNED)
    target = _address(row, TARGET, tl.float32, ALIGNED)
    mean_at = _address(row, STATE_A, tl.float32, ALIGNED)
    square_at = _address(row, STATE_B, tl.float32, ALIGNED)
    half = _half_address(row, HALF_DTYPE, ALIGNED)
    step = tl.load(_address(row, STEP, tl.float32, False)).to(tl.float64) + 1.0
    lr = _learning_rate(row, options)
    wide_decay = tl.load(options + 1)
    decay = wide_decay.to(tl.float32)
    kept = (1.0 - lr * wide_decay).to(tl.float32)
    new_mean = tl.load(options + 2).to(tl.float32)
    old_square = tl.load(options + 3).to(tl.float32)
    new_square = tl.load(options + 4).to(tl.float32)
    eps = tl.load(options + 5).to(tl.float32)
    # In float64 and once a program: 1 - beta ** step.
    rate = (lr / (1.0 - tl.exp(step * tl.load(options + 6)))).to(tl.float32)
    spread = tl.sqrt(1.0 - tl.exp(step * tl.load(options + 7))).to(tl.float32)
    if FP8:
        height, width, top, left = _tile(row, number, numel, ROWS * BLOCKS, BLOCK)
        first = top * width + left
        grad += first
        target += first
        mean_at += first
        square_at += first
        half += first
        values, transposed, scale = _copies(row, first, left * height + top, ALIGNED)
        largest = tl.zeros([ROWS, BLOCK], tl.int32)
        for block in range(BLOCKS):
            offsets, turned, inside = _places(block, height, width, top, left, ROWS, BLOCK)
            weight = _adam_block(grad, target, mean_at, square_at, offsets, inside, factor, decay, kept, new_mean, old_square, new_square, eps, rate, spread, DECAYS, DECOUPLED, MAXIMIZE, MASKED)  # fmt: skip
            weight = _write_half(half, offsets, inside, weight, HALF_DTYPE, MASKED)
            largest = _write_copies(values, offsets, transposed, turned, inside, weight, scale, largest, MASKED)
        _raise_newest(row, largest)
    else:
        for block in range(BLOCKS):
            offsets = number * (BLOCK * BLOCKS) + block * BLOCK + tl.arange(0, BLOCK)
            inside = offsets < numel
            weight = _adam_block(grad, target, mean_at, square_at, offsets, inside, factor, decay, kept, new_mean, old_square, new_square, eps, rate, spread, DECAYS, DECOUPLED, MAXIMIZE, MASKED)  # fmt: skip
            _write_half(half, offsets, inside, weight, HALF_DTYPE, MASKED)


@triton.jit(do_not_specialize=["rows", "programs"])
def adam_kernel(
    table,
    chunk_rows,
    chunk_numbers,
    group_options,
    between,
    found,
    scale,
    clip,
    rows,
    programs,
    GRAD_DTYPE: tl.constexpr,
    HALF_DTYPE: tl.constexpr,
    HAS_FOUND: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_CLIP: tl.constexpr,
    DECAYS: tl.constexpr,
    DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    FP8: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Adam and AdamW on float32 masters, and their half copies.

    Options: lr, weight decay, 1 - beta1, beta2, 1 - beta2, eps, log(beta1), log(beta2). The last program counts the step,
    and notes the scales of FP8 copies.
    """
    program = tl.program_id(0)
    row = table + tl.load(chunk_rows + program).to(tl.int64) * COLUMNS
    number = tl.load(chunk_numbers + program).to(tl.int64)
    if HAS_FOUND:
        if tl.load(found) > 0.0:
            return
    options = group_options + tl.load(row + GROUP) * OPTIONS
    numel = tl.load(row + NUMEL)
    factor = _factor(scale, clip, HAS_SCALE, HAS_CLIP)
    if _is_whole(row, number, numel, FP8, ROWS, BLOCK, BLOCKS):
        _adam_chunk(row, options, number, numel, factor, GRAD_DTYPE, HALF_DTYPE, DECAYS, DECOUPLED, MAXIMIZE, ALIGNED, FP8, ROWS, BLOCK, BLOCKS, False)  # fmt: skip
    else:
        _adam_chunk(row, options, number, numel, factor, GRAD_DTYPE, HALF_DTYPE, DECAYS, DECOUPLED, MAXIMIZE, ALIGNED, FP8, ROWS, BLOCK, BLOCKS, True)  # fmt: skip
    tl.debug_barrier()  # every warp has read its step count and scale
    arrived = tl.atomic_add(between + ARRIVED, 1, sem="acq_rel")
    if arrived == programs - 1:
        first = 0
        while first < rows:
            numbers = first + tl.arange(0, 128)
            here = numbers < rows
            steps = tl.load(table + numbers.to(tl.int64) * COLUMNS + STEP, mask=here, other=0)
            steps = steps.to(tl.pointer_type(tl.float32))
            tl.store(steps, tl.load(steps, mask=here, other=0.0) + 1.0, mask=here)
            first += 128
        if FP8:
            _finish_copies(table, rows)
        tl.store(between + ARRIVED, 0)


@triton.jit(do_not_specialize=["grow_after", "shrink_after"])
def rescale_kernel(
    verdict,
    scale_at,
    counts,
    report,
    grow_by,
    shrink_by,
    floor,
    grow_after,
    shrink_after,
    DYNAMIC: tl.constexpr,
):
    """One update of the loss-scaling state machine. Counts: good, bad, skipped steps, bad in a row at the floor."""
    bad = tl.load(verdict + FOUND) > 0.0
    scale = tl.load(scale_at)
    skipped = tl.load(counts + 2) + tl.where(bad, 1, 0)
    at_floor = tl.where(bad & (scale <= floor), tl.load(counts + 3) + 1, 0)
    if DYNAMIC:
        goods = tl.where(bad, 0, tl.load(counts) + 1)
        bads = tl.where(bad, tl.load(counts + 1) + 1, 0)
        # A threshold of 0 never fires: the counter of the running kind is at least 1.
        shrinks = bad & (bads == shrink_after)
        grows = (goods == grow_after) & (goods > 0)
        smaller = scale * shrink_by
        smaller = tl.where(smaller < floor, floor, smaller)
        larger = scale * grow_by
        scale = tl.where(shrinks, smaller, tl.where(grows & (larger < float("inf")), larger, scale))
        tl.store(scale_at, scale)
        tl.store(counts, tl.where(grows, 0, goods))
        tl.store(counts + 1, tl.where(shrinks, 0, bads))
    tl.store(counts + 2, skipped)
    tl.store(counts + 3, at_floor)
    tl.store(report, tl.where(bad, 1.0, 0.0))
    tl.store(report + 1, scale)
    tl.store(report + 2, at_floor.to(tl.float32))
    tl.store(report + 3, tl.load(verdict + FIRST_BAD))
