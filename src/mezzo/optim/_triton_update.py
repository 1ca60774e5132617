"""The Triton kernels of the update: SGD, Adam and AdamW on every tensor of a launch.

A chunk is a run of elements. If a weight has FP8 copies, a chunk is a tile, so that the update can
write the copy and its transpose from registers. SGD moves 12 bytes per parameter: gradient 2,
master 4 + 4, half weight 2, and FP8 copies another 2. A compact master, stored as half weight and
rest, saves 2 bytes. Momentum adds 8 bytes, Adam 16; bfloat16 state half of these. There is no other
pass over the weights.
"""

import triton
import triton.language as tl

from mezzo.optim._triton_rounding import random_words, rounded
from mezzo.optim._triton_table import (
    ARRIVED,
    COLUMNS,
    GRAD,
    GROUP,
    INDEX,
    LR,
    NUMEL,
    OPTIONS,
    STATE_A,
    STATE_B,
    STEP,
    address,
    inverse_of,
    read,
    write,
)
from mezzo.optim._triton_weights import (
    copies,
    finish_copies,
    half_address,
    is_whole,
    places,
    raise_newest,
    read_weight,
    target_address,
    tile,
    write_copies,
    write_weight,
)


@triton.jit
def _factor(scale, clip, HAS_SCALE: tl.constexpr, HAS_CLIP: tl.constexpr):
    factor = inverse_of(scale, HAS_SCALE)
    if HAS_CLIP:
        factor = factor * tl.load(clip)
    return factor


@triton.jit
def _gradient(pointer, offsets, inside, factor, MAXIMIZE: tl.constexpr, MASKED: tl.constexpr):
    value = read(pointer, offsets, inside, MASKED).to(tl.float32) * factor
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
def _read_state(pointer, offsets, inside, MASKED: tl.constexpr):
    return read(pointer, offsets, inside, MASKED).to(tl.float32)


@triton.jit
def _write_state(pointer, offsets, value, noise, inside, STATE_DTYPE: tl.constexpr, MASKED: tl.constexpr):
    """Write state, rounded stochastically if it is bfloat16; `noise` is not used otherwise."""
    if STATE_DTYPE == tl.bfloat16:
        write(pointer, offsets, rounded(value, noise & 0xFFFF), inside, MASKED)
    else:
        write(pointer, offsets, value, inside, MASKED)


@triton.jit
def _noise_of_run(row, step, first, offsets, STATE_DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Return 32 random bits per element of a block that begins at `first`; something else for float32 state."""
    if STATE_DTYPE == tl.bfloat16:
        noise = random_words(first // 4 + tl.arange(0, BLOCK // 4), step, tl.load(row + INDEX), [BLOCK])
    else:
        noise = offsets
    return noise


@triton.jit
def _noise_of_tile(
    row, step, first, block, width, offsets, STATE_DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the same for a block of a tile that begins at `first`: width and `first` are multiples of four."""
    if STATE_DTYPE == tl.bfloat16:
        starts = first + (block * ROWS + tl.arange(0, ROWS)).to(tl.int64) * width
        quads = (starts // 4)[:, None] + tl.arange(0, BLOCK // 4)[None, :]
        noise = random_words(quads, step, tl.load(row + INDEX), [ROWS, BLOCK])
    else:
        noise = offsets
    return noise


@triton.jit
def _count_steps(table, rows):
    """Add one to the step counts of all rows that have one."""
    first = 0
    while first < rows:
        numbers = first + tl.arange(0, 128)
        here = numbers < rows
        steps = tl.load(table + numbers.to(tl.int64) * COLUMNS + STEP, mask=here, other=0)
        here = here & (steps != 0)
        steps = steps.to(tl.pointer_type(tl.float32))
        tl.store(steps, tl.load(steps, mask=here, other=0.0) + 1.0, mask=here)
        first += 128


@triton.jit
def _sgd_block(
    grad,
    target,
    half,
    buffer_at,
    offsets,
    inside,
    noise,
    factor,
    lr,
    decay,
    momentum,
    undamped,
    HALF_DTYPE: tl.constexpr,
    COMPACT: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    DECAYS: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    MASKED: tl.constexpr,
):
    value = _gradient(grad, offsets, inside, factor, MAXIMIZE, MASKED)
    weight = read_weight(target, half, offsets, inside, HALF_DTYPE, COMPACT, MASKED)
    if DECAYS:
        value = value + weight * decay
    if HAS_MOMENTUM:
        buffer = _read_state(buffer_at, offsets, inside, MASKED) * momentum + value * undamped
        _write_state(buffer_at, offsets, buffer, noise, inside, STATE_DTYPE, MASKED)
        if NESTEROV:
            value = value + buffer * momentum
        else:
            value = buffer
    return write_weight(target, half, offsets, inside, weight - value * lr, HALF_DTYPE, COMPACT, MASKED)


@triton.jit
def _sgd_chunk(
    row,
    options,
    number,
    numel,
    factor,
    GRAD_DTYPE: tl.constexpr,
    HALF_DTYPE: tl.constexpr,
    COMPACT: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
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
    grad = address(row, GRAD, GRAD_DTYPE, ALIGNED)
    target = target_address(row, COMPACT, ALIGNED)
    buffer_at = address(row, STATE_A, STATE_DTYPE, ALIGNED)
    half = half_address(row, HALF_DTYPE, ALIGNED)
    step = tl.full([], 0, tl.int32)
    if HAS_MOMENTUM and STATE_DTYPE == tl.bfloat16:
        step = tl.load(address(row, STEP, tl.float32, False)).to(tl.int32) + 1
    lr = _learning_rate(row, options).to(tl.float32)
    decay = tl.load(options + 1).to(tl.float32)
    momentum = tl.load(options + 2).to(tl.float32)
    undamped = tl.load(options + 3).to(tl.float32)
    if FP8:
        height, width, top, left = tile(row, number, numel, ROWS * BLOCKS, BLOCK)
        first = top * width + left
        grad += first
        target += first
        buffer_at += first
        half += first
        values, transposed, scale = copies(row, first, left * height + top, ALIGNED)
        largest = tl.zeros([ROWS, BLOCK], tl.int32)
        for block in range(BLOCKS):
            offsets, turned, inside = places(block, height, width, top, left, ROWS, BLOCK)
            noise = _noise_of_tile(row, step, first, block, width, offsets, STATE_DTYPE, ROWS, BLOCK)
            weight = _sgd_block(grad, target, half, buffer_at, offsets, inside, noise, factor, lr, decay, momentum, undamped, HALF_DTYPE, COMPACT, STATE_DTYPE, DECAYS, HAS_MOMENTUM, NESTEROV, MAXIMIZE, MASKED)  # fmt: skip
            largest = write_copies(values, offsets, transposed, turned, inside, weight, scale, largest, MASKED)
        raise_newest(row, largest)
    else:
        for block in range(BLOCKS):
            begin = number * (BLOCK * BLOCKS) + block * BLOCK
            offsets = begin + tl.arange(0, BLOCK)
            inside = offsets < numel
            noise = _noise_of_run(row, step, begin, offsets, STATE_DTYPE, BLOCK)
            _sgd_block(grad, target, half, buffer_at, offsets, inside, noise, factor, lr, decay, momentum, undamped, HALF_DTYPE, COMPACT, STATE_DTYPE, DECAYS, HAS_MOMENTUM, NESTEROV, MAXIMIZE, MASKED)  # fmt: skip


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
    COMPACT: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
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
    """SGD on float32 masters and their half copies.

    Options: lr, weight decay, momentum, 1 - dampening.

    The last program of a launch counts the step, if the momentum is bfloat16, and stores the scales
    of FP8 copies.
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
    if is_whole(row, number, numel, FP8, ROWS, BLOCK, BLOCKS):
        _sgd_chunk(row, options, number, numel, factor, GRAD_DTYPE, HALF_DTYPE, COMPACT, STATE_DTYPE, DECAYS, HAS_MOMENTUM, NESTEROV, MAXIMIZE, ALIGNED, FP8, ROWS, BLOCK, BLOCKS, False)  # fmt: skip
    else:
        _sgd_chunk(row, options, number, numel, factor, GRAD_DTYPE, HALF_DTYPE, COMPACT, STATE_DTYPE, DECAYS, HAS_MOMENTUM, NESTEROV, MAXIMIZE, ALIGNED, FP8, ROWS, BLOCK, BLOCKS, True)  # fmt: skip
    COUNTS: tl.constexpr = HAS_MOMENTUM and STATE_DTYPE == tl.bfloat16
    if FP8 or COUNTS:
        tl.debug_barrier()  # every warp has read its scale and step count
        arrived = tl.atomic_add(between + ARRIVED, 1, sem="acq_rel")
        if arrived == programs - 1:
            if COUNTS:
                _count_steps(table, rows)
            if FP8:
                finish_copies(table, rows)
            tl.store(between + ARRIVED, 0)


@triton.jit
def _adam_block(
    grad,
    target,
    half,
    mean_at,
    square_at,
    offsets,
    inside,
    noise,
    factor,
    decay,
    kept,
    new_mean,
    old_square,
    new_square,
    eps,
    rate,
    spread,
    HALF_DTYPE: tl.constexpr,
    COMPACT: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    DECAYS: tl.constexpr,
    DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    MASKED: tl.constexpr,
):
    value = _gradient(grad, offsets, inside, factor, MAXIMIZE, MASKED)
    weight = read_weight(target, half, offsets, inside, HALF_DTYPE, COMPACT, MASKED)
    if DECAYS:
        if DECOUPLED:
            weight = weight * kept
        else:
            value = value + weight * decay
    mean = _read_state(mean_at, offsets, inside, MASKED)
    away = value - mean
    # As torch's lerp: from the nearer end.
    mean = tl.where(new_mean < 0.5, mean + away * new_mean, value - away * (1.0 - new_mean))
    square = _read_state(square_at, offsets, inside, MASKED) * old_square + value * value * new_square
    spread_out = tl.div_rn(tl.sqrt_rn(square), spread) + eps
    weight = weight - tl.div_rn(rate * mean, spread_out)
    _write_state(mean_at, offsets, mean, noise, inside, STATE_DTYPE, MASKED)
    _write_state(square_at, offsets, square, noise >> 16, inside, STATE_DTYPE, MASKED)
    return write_weight(target, half, offsets, inside, weight, HALF_DTYPE, COMPACT, MASKED)


@triton.jit
def _adam_chunk(
    row,
    options,
    number,
    numel,
    factor,
    GRAD_DTYPE: tl.constexpr,
    HALF_DTYPE: tl.constexpr,
    COMPACT: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
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
    grad = address(row, GRAD, GRAD_DTYPE, ALIGNED)
    target = target_address(row, COMPACT, ALIGNED)
    mean_at = address(row, STATE_A, STATE_DTYPE, ALIGNED)
    square_at = address(row, STATE_B, STATE_DTYPE, ALIGNED)
    half = half_address(row, HALF_DTYPE, ALIGNED)
    count = tl.load(address(row, STEP, tl.float32, False)) + 1.0
    step = count.to(tl.int32)
    count = count.to(tl.float64)
    lr = _learning_rate(row, options)
    wide_decay = tl.load(options + 1)
    decay = wide_decay.to(tl.float32)
    kept = (1.0 - lr * wide_decay).to(tl.float32)
    new_mean = tl.load(options + 2).to(tl.float32)
    old_square = tl.load(options + 3).to(tl.float32)
    new_square = tl.load(options + 4).to(tl.float32)
    eps = tl.load(options + 5).to(tl.float32)
    # In float64, once per program: 1 - beta ** step.
    rate = (lr / (1.0 - tl.exp(count * tl.load(options + 6)))).to(tl.float32)
    spread = tl.sqrt(1.0 - tl.exp(count * tl.load(options + 7))).to(tl.float32)
    if FP8:
        height, width, top, left = tile(row, number, numel, ROWS * BLOCKS, BLOCK)
        first = top * width + left
        grad += first
        target += first
        mean_at += first
        square_at += first
        half += first
        values, transposed, scale = copies(row, first, left * height + top, ALIGNED)
        largest = tl.zeros([ROWS, BLOCK], tl.int32)
        for block in range(BLOCKS):
            offsets, turned, inside = places(block, height, width, top, left, ROWS, BLOCK)
            noise = _noise_of_tile(row, step, first, block, width, offsets, STATE_DTYPE, ROWS, BLOCK)
            weight = _adam_block(grad, target, half, mean_at, square_at, offsets, inside, noise, factor, decay, kept, new_mean, old_square, new_square, eps, rate, spread, HALF_DTYPE, COMPACT, STATE_DTYPE, DECAYS, DECOUPLED, MAXIMIZE, MASKED)  # fmt: skip
            largest = write_copies(values, offsets, transposed, turned, inside, weight, scale, largest, MASKED)
        raise_newest(row, largest)
    else:
        for block in range(BLOCKS):
            begin = number * (BLOCK * BLOCKS) + block * BLOCK
            offsets = begin + tl.arange(0, BLOCK)
            inside = offsets < numel
            noise = _noise_of_run(row, step, begin, offsets, STATE_DTYPE, BLOCK)
            _adam_block(grad, target, half, mean_at, square_at, offsets, inside, noise, factor, decay, kept, new_mean, old_square, new_square, eps, rate, spread, HALF_DTYPE, COMPACT, STATE_DTYPE, DECAYS, DECOUPLED, MAXIMIZE, MASKED)  # fmt: skip


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
    COMPACT: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
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
    """Adam and AdamW on float32 masters and their half copies.

    Options: lr, weight decay, 1 - beta1, beta2, 1 - beta2, eps, log(beta1), log(beta2). The last
    program counts the step and stores the scales of FP8 copies.
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
    if is_whole(row, number, numel, FP8, ROWS, BLOCK, BLOCKS):
        _adam_chunk(row, options, number, numel, factor, GRAD_DTYPE, HALF_DTYPE, COMPACT, STATE_DTYPE, DECAYS, DECOUPLED, MAXIMIZE, ALIGNED, FP8, ROWS, BLOCK, BLOCKS, False)  # fmt: skip
    else:
        _adam_chunk(row, options, number, numel, factor, GRAD_DTYPE, HALF_DTYPE, COMPACT, STATE_DTYPE, DECAYS, DECOUPLED, MAXIMIZE, ALIGNED, FP8, ROWS, BLOCK, BLOCKS, True)  # fmt: skip
    tl.debug_barrier()  # every warp has read its step count and scale
    arrived = tl.atomic_add(between + ARRIVED, 1, sem="acq_rel")
    if arrived == programs - 1:
        _count_steps(table, rows)
        if FP8:
            finish_copies(table, rows)
        tl.store(between + ARRIVED, 0)
