"""Triton kernels of bilinear resizing with half-pixel centres.

Sizes are compile-time constants: dividing by a variable would cost more than the loads.
"""

import triton
import triton.language as tl


@triton.jit
def _source(place, scale, SIZE: tl.constexpr):
    """Return the two source places of a result, and the share of the second one."""
    position = tl.maximum(scale * (place.to(tl.float32) + 0.5) - 0.5, 0.0)
    first = tl.minimum(position.to(tl.int32), SIZE - 1)
    second = tl.minimum(first + 1, SIZE - 1)
    return first, second, tl.minimum(position - first.to(tl.float32), 1.0)


@triton.jit
def enlarge_kernel(
    x, result, row_scale, column_scale,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one row of one result plane: `x` is (planes, height, width, channels), dense.

    The row's numbers are scalars of the program, so that an element costs one division.
    """
    row = tl.program_id(0) % OUT_HEIGHT
    plane = (tl.program_id(0) // OUT_HEIGHT).to(tl.int64)
    upper, lower, low_share = _source(row, row_scale, HEIGHT)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = element < OUT_WIDTH * CHANNELS
    column = element // CHANNELS
    channel = element - column * CHANNELS
    left, right, right_share = _source(column, column_scale, WIDTH)
    first = x + (plane * HEIGHT + upper) * (WIDTH * CHANNELS)
    second = x + (plane * HEIGHT + lower) * (WIDTH * CHANNELS)
    at_left, at_right = left * CHANNELS + channel, right * CHANNELS + channel
    above = tl.load(first + at_left, mask=exists, other=0.0).to(tl.float32)
    above += right_share * (tl.load(first + at_right, mask=exists, other=0.0).to(tl.float32) - above)
    below = tl.load(second + at_left, mask=exists, other=0.0).to(tl.float32)
    below += right_share * (tl.load(second + at_right, mask=exists, other=0.0).to(tl.float32) - below)
    start = result + (plane * OUT_HEIGHT + row) * (OUT_WIDTH * CHANNELS)
    tl.store(start + element, above + low_share * (below - above), mask=exists)


@triton.jit
def gather_axis_kernel(
    grad, result, total, scale, stretch,
    SIZE: tl.constexpr, OUT_SIZE: tl.constexpr, INNER: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a resize along one axis: `grad` is (outer, OUT_SIZE, INNER), dense.

    Each source place sums over the results that read it; no atomics, so it is bit-exact in every
    run. `stretch` is 1 / `scale`: results of place i lie within `stretch * (i - 0.5, i + 1.5)`.
    """
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = element < total
    inner = element % INNER
    place = ((element // INNER) % SIZE).to(tl.int32)
    outer = element // (INNER * SIZE)
    begin = tl.maximum(tl.floor(stretch * (place.to(tl.float32) - 0.5) - 1.0).to(tl.int32), 0)
    begin = tl.where(place == 0, 0, begin)
    sums = tl.zeros([BLOCK], tl.float32)
    for tap in range(TAPS):
        out_place = begin + tap
        first, second, share = _source(out_place, scale, SIZE)
        weight = tl.where(first == place, 1.0 - share, 0.0) + tl.where(second == place, share, 0.0)
        reads = exists & (out_place < OUT_SIZE) & (weight != 0.0)
        values = tl.load(grad + (outer * OUT_SIZE + out_place) * INNER + inner, mask=reads, other=0.0)
        sums += weight * values.to(tl.float32)
    tl.store(result + element, sums, mask=exists)
