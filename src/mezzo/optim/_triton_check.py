"""Triton kernels before and after the update: the check of all gradients, and the loss scale."""

import triton
import triton.language as tl

from mezzo.optim._triton_table import (
    ARRIVED,
    BAD_KEY,
    CLIP,
    COLUMNS,
    FIRST_BAD,
    FOUND,
    GRAD,
    INDEX,
    NORM,
    NUMEL,
    address,
    inverse_of,
    read,
)

_SUM_BLOCK = tl.constexpr(2048)


@triton.jit
def _check_chunk(grad, start, numel, inverse, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr):
    """Return, per lane, whether an element of the chunk is not finite, and the sum of squares."""
    bad = tl.zeros([BLOCK], tl.int32)
    squares = tl.zeros([BLOCK], tl.float32)
    for block in tl.static_range(BLOCKS):  # unrolled: several loads are in flight at a time
        offsets = start + block * BLOCK + tl.arange(0, BLOCK)
        value = read(grad, offsets, offsets < numel, MASKED).to(tl.float32)
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
    """Find gradients that are not finite and, if asked, sum squares.

    The last program writes the verdict.

    Several launches (one a dtype) can share a verdict: `programs` counts all of them,
    `first_program` those before.
    """
    program = tl.program_id(0)
    row = table + tl.load(chunk_rows + program).to(tl.int64) * COLUMNS
    start = tl.load(chunk_numbers + program).to(tl.int64) * (BLOCK * BLOCKS)
    grad = address(row, GRAD, GRAD_DTYPE, ALIGNED)
    numel = tl.load(row + NUMEL)
    inverse = inverse_of(scale, HAS_SCALE)
    if start + BLOCK * BLOCKS <= numel:
        bad, squares = _check_chunk(grad, start, numel, inverse, BLOCK, BLOCKS, False)
    else:
        bad, squares = _check_chunk(grad, start, numel, inverse, BLOCK, BLOCKS, True)
    is_bad = tl.max(bad, 0)
    if HAS_NORM:
        total = tl.sum(squares, 0)
        # Squares of large float32 numbers may overflow: then there is no norm, and the step is
        # skipped.
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
    """One update of the loss-scaling state machine.

    Counts: good, bad, skipped steps, bad in a row at the floor.
    """
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
