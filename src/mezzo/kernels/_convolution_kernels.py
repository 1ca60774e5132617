"""Triton kernels of convolutions and their gradients in channels-last.

Sizes are compile-time constants: dividing by a variable would cost more than the loads.
"""

import triton
import triton.language as tl


@triton.jit
def depthwise_conv_kernel(
    x, weight, bias, result, total,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a depthwise convolution: each pixel sums over its taps.

    `x` and `result` are channels-last, `weight` is (taps, channels), sums are float32. Taps that meet
    only padding, as those of a dilation wider than the image, are not in the kernel at all.
    """
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = element < total
    channel = element % CHANNELS
    pixel = element // CHANNELS
    first_column = (pixel % OUT_WIDTH) * STRIDE_W - PAD_W
    first_row = ((pixel // OUT_WIDTH) % OUT_HEIGHT) * STRIDE_H - PAD_H
    image = pixel // (OUT_WIDTH * OUT_HEIGHT)
    sums = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        sums += tl.load(bias + channel).to(tl.float32)
    for i in tl.static_range(KERNEL_H):
        if i * DILATION_H - PAD_H < HEIGHT and (OUT_HEIGHT - 1) * STRIDE_H + i * DILATION_H >= PAD_H:
            row = first_row + i * DILATION_H
            row_fits = exists & (row >= 0) & (row < HEIGHT)
            for j in tl.static_range(KERNEL_W):
                if j * DILATION_W - PAD_W < WIDTH and (OUT_WIDTH - 1) * STRIDE_W + j * DILATION_W >= PAD_W:
                    column = first_column + j * DILATION_W
                    fits = row_fits & (column >= 0) & (column < WIDTH)
                    source = ((image * HEIGHT + row) * WIDTH + column) * CHANNELS + channel
                    values = tl.load(x + source, mask=fits, other=0.0)
                    factors = tl.load(weight + (i * KERNEL_W + j) * CHANNELS + channel)
                    sums += values.to(tl.float32) * factors.to(tl.float32)
    tl.store(result + element, sums, mask=exists)


@triton.jit
def depthwise_input_grad_kernel(
    grad, weight, result, total,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the input gradient of a depthwise convolution: each pixel sums over its taps.

    `grad` and `result` are channels-last, `weight` is (taps, channels), sums are float32. The same
    taps reach all pixels whose coordinates have the same remainders modulo the strides. A program
    works on one such class of pixels and loops only over its taps. There is one multiplication per
    tap, so Tensor Cores would not help.
    """
    rows: tl.constexpr = (HEIGHT + STRIDE_H - 1) // STRIDE_H
    columns: tl.constexpr = (WIDTH + STRIDE_W - 1) // STRIDE_W
    first_row = tl.program_id(1) // STRIDE_W
    first_column = tl.program_id(1) % STRIDE_W
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = element % CHANNELS
    pixel = element // CHANNELS
    column = (pixel % columns) * STRIDE_W + first_column
    row = ((pixel // columns) % rows) * STRIDE_H + first_row
    image = pixel // (columns * rows)
    exists = (element < total) & (row < HEIGHT) & (column < WIDTH)
    sums = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(KERNEL_H):
        if PAD_H - i * DILATION_H < OUT_HEIGHT * STRIDE_H and HEIGHT + PAD_H - i * DILATION_H > 0:
            if (first_row + PAD_H - i * DILATION_H) % STRIDE_H == 0:
                above = row + PAD_H - i * DILATION_H
                out_row = above // STRIDE_H
                row_fits = exists & (above >= 0) & (out_row < OUT_HEIGHT)
                for j in tl.static_range(KERNEL_W):
                    if PAD_W - j * DILATION_W < OUT_WIDTH * STRIDE_W and WIDTH + PAD_W - j * DILATION_W > 0:
                        if (first_column + PAD_W - j * DILATION_W) % STRIDE_W == 0:
                            before = column + PAD_W - j * DILATION_W
                            out_column = before // STRIDE_W
                            fits = row_fits & (before >= 0) & (out_column < OUT_WIDTH)
                            source = ((image * OUT_HEIGHT + out_row) * OUT_WIDTH + out_column) * CHANNELS + channel
                            values = tl.load(grad + source, mask=fits, other=0.0)
                            factors = tl.load(weight + (i * KERNEL_W + j) * CHANNELS + channel)
                            sums += values.to(tl.float32) * factors.to(tl.float32)
    tl.store(result + ((image * HEIGHT + row) * WIDTH + column) * CHANNELS + channel, sums, mask=exists)


@triton.jit
def depthwise_weight_grad_kernel(
    grad, x, parts, pixels,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    STEPS: tl.constexpr, STAGES: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one tap of a depthwise weight over a share of the pixels.

    `grad` and `x` are channels-last, `parts` is (programs, taps, channels) in float32. The taps of a
    share run side by side, so they read the same pixels from the cache.
    """
    tap = tl.program_id(0) // COLUMNS
    down = tap // KERNEL_W * DILATION_H - PAD_H
    right = tap % KERNEL_W * DILATION_W - PAD_W
    column = tl.program_id(0) % COLUMNS * BLOCK + tl.arange(0, BLOCK)
    is_column = column < CHANNELS
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    first = tl.program_id(1) * (STEPS * ROWS)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        pixel = first + step * ROWS + tl.arange(0, ROWS)
        in_row = (pixel // OUT_WIDTH) % OUT_HEIGHT * STRIDE_H + down
        in_column = pixel % OUT_WIDTH * STRIDE_W + right
        image = pixel // (OUT_WIDTH * OUT_HEIGHT)
        inside = (in_row >= 0) & (in_row < HEIGHT) & (in_column >= 0) & (in_column < WIDTH)
        fits = ((pixel < pixels) & inside)[:, None] & is_column[None, :]
        given = tl.load(grad + pixel[:, None] * CHANNELS + column[None, :], mask=fits, other=0.0)
        source = ((image * HEIGHT + in_row) * WIDTH + in_column) * CHANNELS
        values = tl.load(x + source[:, None] + column[None, :], mask=fits, other=0.0)
        sums += given.to(tl.float32) * values.to(tl.float32)
    at = (tl.program_id(1) * (KERNEL_H * KERNEL_W) + tap) * CHANNELS + column
    tl.store(parts + at, tl.sum(sums, 0), mask=is_column)


@triton.jit
def narrow_weight_grad_kernel(
    grad, x, sums, pixels,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    OUT_CHANNELS: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, ROWS: tl.constexpr, TAPS: tl.constexpr, SHARE: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Write a program's partial sum of a weight's gradient, over its share of the pixels.

    It is the product of gradients (out channels, pixels) and inputs (pixels, taps). `grad` and `x`
    are channels-last; `sums` is (programs, ROWS, TAPS) in float32; a tap is a (row, column,
    channel).
    """
    tap = tl.arange(0, TAPS)
    tap_row = tap // (KERNEL_W * CHANNELS)
    tap_column = (tap // CHANNELS) % KERNEL_W
    channel = tap % CHANNELS
    is_tap = tap < KERNEL_H * KERNEL_W * CHANNELS
    out_channel = tl.arange(0, ROWS)
    is_out_channel = out_channel < OUT_CHANNELS
    part = tl.zeros([ROWS, TAPS], tl.float32)
    first = tl.program_id(0) * SHARE
    for start in range(0, SHARE, PIXELS):
        pixel = first + start + tl.arange(0, PIXELS)
        exists = pixel < pixels
        out_column = pixel % OUT_WIDTH
        out_row = (pixel // OUT_WIDTH) % OUT_HEIGHT
        image = pixel // (OUT_WIDTH * OUT_HEIGHT)
        given = grad + pixel[None, :] * OUT_CHANNELS + out_channel[:, None]
        gradients = tl.load(given, mask=exists[None, :] & is_out_channel[:, None], other=0.0)
        row = out_row[:, None] * STRIDE_H - PAD_H + tap_row[None, :]
        column = out_column[:, None] * STRIDE_W - PAD_W + tap_column[None, :]
        fits = exists[:, None] & is_tap[None, :] & (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH)
        source = x + ((image[:, None] * HEIGHT + row) * WIDTH + column) * CHANNELS + channel[None, :]
        values = tl.load(source, mask=fits, other=0.0)
        part = tl.dot(gradients, values, part)
    tl.store(sums + (tl.program_id(0) * ROWS + out_channel[:, None]) * TAPS + tap[None, :], part)
