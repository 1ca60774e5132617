"""Triton kernels of layer norm and RMS norm: half in memory, float32 in registers.

A program holds whole rows, so each tensor is read once. `CENTER` subtracts the mean: layer norm does,
RMS norm does not.
"""

import triton
import triton.language as tl


@triton.jit
def norm_kernel(
    x, residual, weight, bias, result, total, means, scales, rows, size, eps,
    CENTER: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise rows; write the result, and mean and inverse deviation of each row in float32.

    With a residual, the sum of both is written too. What is normalised is the sum as it is rounded,
    which the backward reads.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    is_row, is_column = row < rows, column < size
    exists = is_row[:, None] & is_column[None, :]
    at = row[:, None] * size + column[None, :]
    values = tl.load(x + at, mask=exists, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values = values + tl.load(residual + at, mask=exists, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=exists)
        values = rounded.to(tl.float32)
    if CENTER:
        mean = tl.sum(values, 1) / size
        values = tl.where(exists, values - mean[:, None], 0.0)
        tl.store(means + row, mean, mask=is_row)
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values, 1) / size + eps)
    tl.store(scales + row, scale, mask=is_row)
    values = values * scale[:, None]
    if HAS_WEIGHT:
        values = values * tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        values = values + tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    tl.store(result + at, values, mask=exists)


@triton.jit
def norm_backward_kernel(
    grad, grad_total, total, weight, means, scales, grad_x, weight_sums, bias_sums, grad_sums, rows, size,
    CENTER: tl.constexpr, HAS_GRAD_TOTAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, WEIGHT_GRAD: tl.constexpr,
    BIAS_GRAD: tl.constexpr, ADDS_UP: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the input's gradient of STEPS tiles of rows, and the tiles' sums for weight and bias.

    `grad_total` is a gradient that reaches the input by another way: it is added. `grad_sums` are the
    sums of the input's gradient. All sums are (programs, size) in float32. Each program has its own,
    so there are no atomics, and the result is the same in every run.
    """
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_column = column < size
    weight_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    bias_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    grad_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    if HAS_WEIGHT:
        factor = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    for step in tl.range(0, STEPS, num_stages=STAGES):
        row = (program * STEPS + step) * ROWS + tl.arange(0, ROWS)
        is_row = row < rows
        exists = is_row[:, None] & is_column[None, :]
        at = row[:, None] * size + column[None, :]
        given = tl.load(grad + at, mask=exists, other=0.0).to(tl.float32)
        normed = tl.load(total + at, mask=exists, other=0.0).to(tl.float32)
        scale = tl.load(scales + row, mask=is_row, other=0.0)
        if CENTER:
            normed = normed - tl.load(means + row, mask=is_row, other=0.0)[:, None]
        normed = tl.where(exists, normed * scale[:, None], 0.0)
        if BIAS_GRAD:
            bias_sum += given
        if WEIGHT_GRAD:
            weight_sum += given * normed
        if HAS_WEIGHT:
            given = given * factor
        change = given - normed * (tl.sum(given * normed, 1) / size)[:, None]
        if CENTER:
            change = change - (tl.sum(given, 1) / size)[:, None]
        change = change * scale[:, None]
        if HAS_GRAD_TOTAL:
            change = change + tl.load(grad_total + at, mask=exists, other=0.0).to(tl.float32)
        if ADDS_UP:
            grad_sum += change
        tl.store(grad_x + at, change, mask=exists)
    if WEIGHT_GRAD:
        tl.store(weight_sums + program * size + column, tl.sum(weight_sum, 0), mask=is_column)
    if BIAS_GRAD:
        tl.store(bias_sums + program * size + column, tl.sum(bias_sum, 0), mask=is_column)
    if ADDS_UP:
        tl.store(grad_sums + program * size + column, tl.sum(grad_sum, 0), mask=is_column)


@triton.jit
def column_sums_kernel(parts, first, second, third, count, size, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the rows of up to three matrices, each `count` rows of float32, and round once.

    The order is always the same. `parts` holds the matrices one after another; axis 1 of the grid tells them apart.
    """
    matrix = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    start = matrix * 0
    while start < count:
        row = start + tl.arange(0, ROWS)
        exists = (row < count)[:, None] & (column < size)[None, :]
        sums += tl.load(parts + (matrix * count + row[:, None]) * size + column[None, :], mask=exists, other=0.0)
        start += ROWS
    total = tl.sum(sums, 0)
    if matrix == 0:
        tl.store(first + column, total, mask=column < size)
    elif matrix == 1:
        tl.store(second + column, total, mask=column < size)
    else:
        tl.store(third + column, total, mask=column < size)
