"""Triton kernels of the cross entropy over a large vocabulary: the logits are read once in each direction.

A row of an odd vocabulary (GPT-2's 50257) begins at any address. So a program first takes the few
elements before an aligned address, then whole blocks without a mask, which are wide loads, and last
the rest.
"""

import triton
import triton.language as tl


@triton.jit
def _include(values, largest, total):
    """Return the largest value, and the sum of exponentials relative to it, with more values."""
    new = tl.maximum(largest, tl.max(values, 0))
    base = tl.where(new == float("-inf"), 0.0, new)  # nothing finite so far: inf - inf would be NaN
    return new, total * tl.exp(largest - base) + tl.sum(tl.exp(values - base), 0)


@triton.jit
def cross_entropy_kernel(
    logits, target, losses, sums, stride, size, ignored, smoothing,
    SMOOTHED: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the loss and the log-sum-exp of a row. A row with an ignored target is not read."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(target + row)
    if label == ignored:
        tl.store(losses + row, 0.0)
        tl.store(sums + row, 0.0)
        return
    begin = row * stride
    end = begin + size
    aligned = (begin + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    head = begin + tl.arange(0, ALIGNMENT)
    in_head = (head < aligned) & (head < end)
    first = tl.load(logits + head, mask=in_head, other=float("-inf")).to(tl.float32)
    largest, total = _include(first, float("-inf"), 0.0)
    added = tl.sum(tl.where(in_head, first, 0.0), 0)
    blocks = tl.maximum(end - aligned, 0) // BLOCK
    block = blocks * 0
    while block < blocks:
        values = tl.load(logits + aligned + block * BLOCK + tl.arange(0, BLOCK)).to(tl.float32)
        largest, total = _include(values, largest, total)
        if SMOOTHED:
            added += tl.sum(values, 0)
        block += 1
    tail = aligned + blocks * BLOCK + tl.arange(0, BLOCK)
    last = tl.load(logits + tail, mask=tail < end, other=float("-inf")).to(tl.float32)
    largest, total = _include(last, largest, total)
    if SMOOTHED:
        added += tl.sum(tl.where(tail < end, last, 0.0), 0)
    log_sum = largest + tl.log(total)
    is_class = (label >= 0) & (label < size)
    chosen = tl.load(logits + begin + label, mask=is_class, other=float("nan")).to(tl.float32)
    loss = log_sum - chosen
    if SMOOTHED:
        loss = (1.0 - smoothing) * loss + smoothing * (log_sum - added / size)
    tl.store(losses + row, tl.where(is_class, loss, float("nan")))
    tl.store(sums + row, log_sum)


@triton.jit
def _gradient(values, at, chosen, log_sum, counts, factor, smoothing, size):
    """Return the gradient of logits: probability less the smoothed target, times the row's factor."""
    wanted = tl.where(at == chosen, 1.0 - smoothing, 0.0) + smoothing / size
    return tl.where(counts, (tl.exp(values - log_sum) - wanted) * factor, 0.0)


@triton.jit
def cross_entropy_backward_kernel(
    grad, logits, target, sums, result, stride, result_stride, size, ignored, smoothing,
    PACKED: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a row of logits: zeros for an ignored target, NaN for a target that is not a class."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(target + row)
    log_sum = tl.load(sums + row)
    counts = label != ignored
    factor = tl.where((label >= 0) & (label < size), tl.load(grad + row), float("nan"))
    begin = row * result_stride
    end = begin + size
    chosen = begin + label
    aligned = (begin + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    blocks = tl.maximum(end - aligned, 0) // BLOCK
    if not PACKED:  # otherwise the loads are as aligned as the stores
        logits += row * (stride - result_stride)
    head = begin + tl.arange(0, ALIGNMENT)
    in_head = (head < aligned) & (head < end)
    first = tl.load(logits + head, mask=in_head, other=0.0).to(tl.float32)
    change = _gradient(first, head, chosen, log_sum, counts, factor, smoothing, size)
    tl.store(result + head, change, mask=in_head)
    block = blocks * 0
    while block < blocks:
        at = aligned + block * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(logits + at).to(tl.float32)
        tl.store(result + at, _gradient(values, at, chosen, log_sum, counts, factor, smoothing, size))
        block += 1
    tail = aligned + blocks * BLOCK + tl.arange(0, BLOCK)
    last = tl.load(logits + tail, mask=tail < end, other=0.0).to(tl.float32)
    rest = _gradient(last, tail, chosen, log_sum, counts, factor, smoothing, size)
    tl.store(result + tail, rest, mask=tail < end)
