"""The Triton kernels of the update: SGD, Adam and AdamW on every tensor of a launch.

A chunk is a run of elements. If a weight has FP8 copies, a chunk is a tile, so that the update can
write the copy and its transpose from registers. SGD moves 12 bytes per parameter: gradient 2,
master 4 + 4, half weight 2, and FP8 copies another 2. A compact master, stored as half weight and
rest, saves 2 bytes. Momentum adds 8 bytes, Adam 16. There is no other pass over the weights.
"""

import triton
import triton.language as tl

from mezzo.optim._triton_table import (
    ARRIVED,
    COLUMNS,
    GRAD,
    GROUP,
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
def _sgd_block(
    grad,
    target,
    half,
    buffer_at,
    offsets,
    inside,
    factor,
    lr,
    decay,
    momentum,
    undamped,
    HALF_DTYPE: tl.constexpr,
    COMPACT: tl.constexpr,
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
        buffer = read(buffer_at, offsets, inside, MASKED) * momentum + value * undamped
        write(buffer_at, offsets, buffer, inside, MASKED)
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
    buffer_at = address(row, STATE_A, tl.float32, ALIGNED)
    half = half_address(row, HALF_DTYPE, ALIGNED)
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
            weight = _sgd_block(grad, target, half, buffer_at, offsets, inside, factor, lr, decay, momentum, undamped, HALF_DTYPE, COMPACT, DECAYS, HAS_MOMENTUM, NESTEROV, MAXIMIZE, MASKED)  # fmt: skip
            largest = write_copies(values, offsets, transposed, turned, inside, weight, scale, largest, MASKED)
        raise_newest(row, largest)
    else:
        for block in range(BLOCKS):
            offsets = number * (BLOCK * BLOCKS) + block * BLOCK + tl.arange(0, BLOCK)
            inside = offsets < numel
            _sgd_block(grad, target, half, buffer_at, offsets, inside, factor, lr, decay, momentum, undamped, HALF_DTYPE, COMPACT, DECAYS, HAS_MOMENTUM, NESTEROV, MAXIMIZE, MASKED)  # fmt: skip


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

    The last program of a launch with FP8 copies stores their scales.
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
        _sgd_chunk(row, options, number, numel, factor, GRAD_DTYPE, HALF_DTYPE, COMPACT, DECAYS, HAS_MOMENTUM, NESTEROV, MAXIMIZE, ALIGNED, FP8, ROWS, BLOCK, BLOCKS, False)  # fmt: skip
    else:
        _sgd_chunk(row, options, number, numel, factor, GRAD_DTYPE, HALF_DTYPE, COMPACT, DECAYS, HAS_MOMENTUM, NESTEROV, MAXIMIZE, ALIGNED, FP8, ROWS, BLOCK, BLOCKS, True)  # fmt: skip
    if FP8:
        tl.debug_barrier()  # every warp has read its scale
        arrived = tl.atomic_add(between + ARRIVED, 1, sem="acq_rel")
        if arrived == programs - 1:
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
    mean = read(mean_at, offsets, inside, MASKED)
    away = value - mean
    # As torch's lerp: from the nearer end.
    mean = tl.where(new_mean < 0.5, mean + away * new_mean, value - away * (1.0 - new_mean))
    square = read(square_at, offsets, inside, MASKED) * old_square + value * value * new_square
    spread_out = tl.div_rn(tl.sqrt_rn(square), spread) + eps
    weight = weight - tl.div_rn(rate * mean, spread_out)
    write(mean_at, offsets, mean, inside, MASKED)
    write(square_at, offsets, square, inside, MASKED)
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
    mean_at = address(row, STATE_A, tl.float32, ALIGNED)
    square_at = address(row, STATE_B, tl.float32, ALIGNED)
    half = half_address(row, HALF_DTYPE, ALIGNED)
    step = tl.load(address(row, STEP, tl.float32, False)).to(tl.float64) + 1.0
    lr = _learning_rate(row, options)
    wide_decay = tl.load(options + 1)
    decay = wide_decay.to(tl.float32)
    kept = (1.0 - lr * wide_decay).to(tl.float32)
    new_mean = tl.load(options + 2).to(tl.float32)
    old_square = tl.load(options + 3).to(tl.float32)
    new_square = tl.load(options + 4).to(tl.float32)
    eps = tl.load(options + 5).to(tl.float32)
    # In float64, once per program: 1 - beta ** step.
    rate = (lr / (1.0 - tl.exp(step * tl.load(options + 6)))).to(tl.float32)
    spread = tl.sqrt(1.0 - tl.exp(step * tl.load(options + 7))).to(tl.float32)
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
            weight = _adam_block(grad, target, half, mean_at, square_at, offsets, inside, factor, decay, kept, new_mean, old_square, new_square, eps, rate, spread, HALF_DTYPE, COMPACT, DECAYS, DECOUPLED, MAXIMIZE, MASKED)  # fmt: skip
            largest = write_copies(values, offsets, transposed, turned, inside, weight, scale, largest, MASKED)
        raise_newest(row, largest)
    else:
        for block in range(BLOCKS):
            offsets = number * (BLOCK * BLOCKS) + block * BLOCK + tl.arange(0, BLOCK)
            inside = offsets < numel
            _adam_block(grad, target, half, mean_at, square_at, offsets, inside, factor, decay, kept, new_mean, old_square, new_square, eps, rate, spread, HALF_DTYPE, COMPACT, DECAYS, DECOUPLED, MAXIMIZE, MASKED)  # fmt: skip


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
        _adam_chunk(row, options, number, numel, factor, GRAD_DTYPE, HALF_DTYPE, COMPACT, DECAYS, DECOUPLED, MAXIMIZE, ALIGNED, FP8, ROWS, BLOCK, BLOCKS, False)  # fmt: skip
    else:
        _adam_chunk(row, options, number, numel, factor, GRAD_DTYPE, HALF_DTYPE, COMPACT, DECAYS, DECOUPLED, MAXIMIZE, ALIGNED, FP8, ROWS, BLOCK, BLOCKS, True)  # fmt: skip
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
            finish_copies(table, rows)
        tl.store(between + ARRIVED, 0)
