"""Triton kernels of batch norm with an activation, in channels-last: half in memory, float32 in registers.

A channels-last image is a matrix of pixels and channels. A program loads the numbers of its channels
once and uses them for a tile of pixels. Inductor's kernels load them again for each element, which
costs more than the pixels themselves (EfficientNet-B0 on an H200: 37 to 60 % of the memory's rate).
Programs that share pixels are neighbours, so that a line of memory is read once.
"""

import triton
import triton.language as tl

NONE, RELU, RELU6, HARDSWISH, SILU = (tl.constexpr(number) for number in range(5))


@triton.jit
def _activate(y, ACTIVATION: tl.constexpr):
    """Return the activation of float32 numbers."""
    if ACTIVATION == RELU:
        y = tl.where(y <= 0.0, 0.0, y)  # tl.maximum would turn a NaN into zero
    elif ACTIVATION == RELU6:
        y = tl.where(y <= 0.0, 0.0, tl.where(y >= 6.0, 6.0, y))
    elif ACTIVATION == HARDSWISH:
        y = y * tl.minimum(tl.maximum(y + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    elif ACTIVATION == SILU:
        y = y / (1.0 + tl.exp(-y))
    return y


@triton.jit
def _differentiate(given, y, ACTIVATION: tl.constexpr):
    """Return the gradient of the activation's input `y` for the gradient of its result, as torch does.

    Where the activation is flat it is zero, also for an infinite gradient.
    """
    if ACTIVATION == RELU:
        given = tl.where(y <= 0.0, 0.0, given)
    elif ACTIVATION == RELU6:
        given = tl.where((y <= 0.0) | (y >= 6.0), 0.0, given)
    elif ACTIVATION == HARDSWISH:
        given = tl.where(y <= -3.0, 0.0, tl.where(y < 3.0, given * (y * (1.0 / 3.0) + 0.5), given))
    else:
        share = 1.0 / (1.0 + tl.exp(-y))
        given = given * share * (1.0 + y * (1.0 - share))
    return given


@triton.jit
def batch_statistics_kernel(
    x, parts, pixels,
    STEPS: tl.constexpr, STAGES: tl.constexpr,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write mean and sum of squared deviations of each channel over a share of the pixels.

    A share is STEPS tiles; `parts` is (programs, 2, CHANNELS) in float32. Each place of the tile keeps
    a running mean (Welford), so a mean that is large against the deviation costs no precision.
    """
    program = (tl.program_id(0) // COLUMNS).to(tl.int64)
    column = tl.program_id(0) % COLUMNS * BLOCK + tl.arange(0, BLOCK)
    is_column = column < CHANNELS
    first = program * (STEPS * ROWS)
    row = tl.arange(0, ROWS)
    at = row[:, None] * CHANNELS + column[None, :]
    mean = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        start = first + step * ROWS
        exists = (start + row < pixels)[:, None] & is_column[None, :]
        values = tl.load(x + start * CHANNELS + at, mask=exists, other=0.0).to(tl.float32)
        change = tl.where(exists, values - mean, 0.0)
        mean += change * (1.0 / (step + 1))
        squares += change * tl.where(exists, values - mean, 0.0)
    left = tl.maximum(pixels - first - row, 0)
    seen = tl.minimum((left + ROWS - 1) // ROWS, STEPS).to(tl.float32)
    count = tl.sum(seen, 0)
    total = tl.sum(mean * seen[:, None], 0) / tl.maximum(count, 1.0)
    apart = mean - total[None, :]
    spread = tl.sum(squares + apart * apart * seen[:, None], 0)
    tl.store(parts + program * 2 * CHANNELS + column, total, mask=is_column)
    tl.store(parts + program * 2 * CHANNELS + CHANNELS + column, spread, mask=is_column)


@triton.jit
def join_statistics_kernel(
    parts, statistics, programs, pixels, share, eps,
    CHANNELS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Join the parts of all programs; write mean, inverse deviation and unbiased variance, (3, CHANNELS)."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < CHANNELS
    row = tl.arange(0, PARTS)
    exists = (row < programs)[:, None] & is_column[None, :]
    at = parts + row[:, None] * (2 * CHANNELS) + column[None, :]
    means = tl.load(at, mask=exists, other=0.0)
    squares = tl.load(at + CHANNELS, mask=exists, other=0.0)
    count = tl.minimum(share, tl.maximum(pixels - row.to(tl.int64) * share, 0)).to(tl.float32)
    mean = tl.sum(means * count[:, None], 0) / pixels
    apart = tl.where(exists, means - mean[None, :], 0.0)
    spread = tl.sum(squares + apart * apart * count[:, None], 0)
    tl.store(statistics + column, mean, mask=is_column)
    tl.store(statistics + CHANNELS + column, 1.0 / tl.sqrt_rn(spread / pixels + eps), mask=is_column)
    tl.store(statistics + 2 * CHANNELS + column, spread / (pixels - 1), mask=is_column)


@triton.jit
def batch_norm_kernel(
    x, residual, weight, bias, statistics, result, pixels,
    ACTIVATION: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write `activation((x - mean) * inverse deviation * weight + bias + residual)` of a tile."""
    column = tl.program_id(0) % COLUMNS * BLOCK + tl.arange(0, BLOCK)
    is_column = column < CHANNELS
    first = (tl.program_id(0) // COLUMNS).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    exists = (first + row < pixels)[:, None] & is_column[None, :]
    start = first * CHANNELS
    at = row[:, None] * CHANNELS + column[None, :]
    mean = tl.load(statistics + column, mask=is_column, other=0.0)
    factor = tl.load(statistics + CHANNELS + column, mask=is_column, other=0.0)
    if HAS_WEIGHT:
        factor = factor * tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    y = (tl.load(x + start + at, mask=exists, other=0.0).to(tl.float32) - mean[None, :]) * factor[None, :]
    if HAS_BIAS:
        y += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        y += tl.load(residual + start + at, mask=exists, other=0.0).to(tl.float32)
    tl.store(result + start + at, _activate(y, ACTIVATION), mask=exists)


@triton.jit
def _gradient_before_activation(
    grad, x, result, start, at, exists, mean, scale, weight, bias,
    ACTIVATION: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Return the gradient of the activation's input, and the normalised input, of a tile.

    Elements that do not exist have the gradient zero.
    """
    given = tl.load(grad + start + at, mask=exists, other=0.0).to(tl.float32)
    normed = (tl.load(x + start + at, mask=exists, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
    if ACTIVATION != NONE:
        if HAS_RESIDUAL:  # ReLU only: its result is stored anyway, as the input of the next layer
            y = tl.load(result + start + at, mask=exists, other=0.0).to(tl.float32)
        else:
            y = normed
            if HAS_WEIGHT:
                y = y * weight[None, :]
            if HAS_BIAS:
                y = y + bias[None, :]
        given = _differentiate(given, y, ACTIVATION)
    return given, normed


@triton.jit
def batch_norm_sums_kernel(
    grad, x, result, weight, bias, statistics, parts, pixels,
    ACTIVATION: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    STEPS: tl.constexpr, STAGES: tl.constexpr,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of bias and weight over a share of the pixels: (programs, 2, CHANNELS), float32."""
    program = (tl.program_id(0) // COLUMNS).to(tl.int64)
    column = tl.program_id(0) % COLUMNS * BLOCK + tl.arange(0, BLOCK)
    is_column = column < CHANNELS
    mean = tl.load(statistics + column, mask=is_column, other=0.0)
    scale = tl.load(statistics + CHANNELS + column, mask=is_column, other=0.0)
    factor, shift = scale, scale
    if HAS_WEIGHT:
        factor = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    if HAS_BIAS:
        shift = tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
    first = program * (STEPS * ROWS)
    row = tl.arange(0, ROWS)
    at = row[:, None] * CHANNELS + column[None, :]
    of_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    of_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        start = first + step * ROWS
        exists = (start + row < pixels)[:, None] & is_column[None, :]
        given, normed = _gradient_before_activation(
            grad, x, result, start * CHANNELS, at, exists, mean, scale, factor, shift,
            ACTIVATION=ACTIVATION, HAS_RESIDUAL=HAS_RESIDUAL, HAS_WEIGHT=HAS_WEIGHT, HAS_BIAS=HAS_BIAS,
        )  # fmt: skip
        of_bias += given
        of_weight += given * normed
    tl.store(parts + program * 2 * CHANNELS + column, tl.sum(of_bias, 0), mask=is_column)
    tl.store(parts + program * 2 * CHANNELS + CHANNELS + column, tl.sum(of_weight, 0), mask=is_column)


@triton.jit
def batch_norm_backward_kernel(
    grad, x, result, weight, bias, statistics, sums, grad_x, grad_residual, pixels,
    ACTIVATION: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the input of a tile; with a residual behind ReLU, also that of the residual.

    `sums` holds the gradients of bias and weight, (2, CHANNELS) in float32.
    """
    column = tl.program_id(0) % COLUMNS * BLOCK + tl.arange(0, BLOCK)
    is_column = column < CHANNELS
    first = (tl.program_id(0) // COLUMNS).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    exists = (first + row < pixels)[:, None] & is_column[None, :]
    start = first * CHANNELS
    at = row[:, None] * CHANNELS + column[None, :]
    mean = tl.load(statistics + column, mask=is_column, other=0.0)
    scale = tl.load(statistics + CHANNELS + column, mask=is_column, other=0.0)
    factor, shift = scale, scale
    if HAS_WEIGHT:
        factor = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    if HAS_BIAS:
        shift = tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
    given, normed = _gradient_before_activation(
        grad, x, result, start, at, exists, mean, scale, factor, shift,
        ACTIVATION=ACTIVATION, HAS_RESIDUAL=HAS_RESIDUAL, HAS_WEIGHT=HAS_WEIGHT, HAS_BIAS=HAS_BIAS,
    )  # fmt: skip
    of_bias = tl.load(sums + column, mask=is_column, other=0.0) / pixels
    of_weight = tl.load(sums + CHANNELS + column, mask=is_column, other=0.0) / pixels
    change = given - of_bias[None, :] - normed * of_weight[None, :]
    whole = scale
    if HAS_WEIGHT:
        whole = scale * factor
    tl.store(grad_x + start + at, change * whole[None, :], mask=exists)
    if HAS_RESIDUAL and ACTIVATION != NONE:
        tl.store(grad_residual + start + at, given, mask=exists)
