"""Stochastic rounding to bfloat16 in Triton; see `mezzo.optim._rounding`."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from mezzo.optim._rounding import KEY
from mezzo.optim._triton_launch import launch

_KEY = tl.constexpr(KEY)
_BFLOAT16_NAN = tl.constexpr(0x7FC0)
_BLOCK, _WARPS = 512, 4


@triton.jit
def _philox(quads, step, index):
    low = (quads & 0xFFFFFFFF).to(tl.uint32)
    high = (quads >> 32).to(tl.uint32)
    return tl.philox(_KEY, low, high, tl.zeros_like(low) + step.to(tl.uint32), tl.zeros_like(low) + index.to(tl.uint32))


@triton.jit
def random_words(quads, step, index, SHAPE: tl.constexpr):
    """Return 32 random bits for each element of a block: four for each number in `quads`, side by side."""
    a, b, c, d = _philox(quads, step, index)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), SHAPE)


@triton.jit
def rounded(value, noise):
    """Round float32 to bfloat16 with 16 bits of noise; see `mezzo.optim._rounding.round_by`."""
    upper = (value.to(tl.int32, bitcast=True) + noise.to(tl.int32)) >> 16
    upper = tl.where(value != value, _BFLOAT16_NAN, upper)
    return upper.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit(do_not_specialize=["first", "index", "numel"])
def _round_kernel(target, source, step_at, first, index, numel, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Round one tensor. It may begin anywhere in its parameter, so each element computes its own words."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < numel
    elements = places + first
    step = tl.load(step_at).to(tl.int32)
    a, b, c, d = _philox(elements >> 2, step, tl.zeros([1], tl.int32) + index)
    word = elements & 3
    words = tl.where(word == 0, a, tl.where(word == 1, b, tl.where(word == 2, c, d)))
    value = tl.load(source + places, mask=inside, other=0.0)
    tl.store(target + places, rounded(value, (words >> SHIFT) & 0xFFFF), mask=inside)


def launch_rounding(targets: Sequence[Tensor], sources: Sequence[Tensor], step: Tensor, first: int, index: int) -> None:
    """Round flat float32 tensors of one parameter into bfloat16 ones; see `_rounding.store_rounded`."""
    for number, (target, source) in enumerate(zip(targets, sources, strict=True)):
        programs = -(-target.numel() // _BLOCK)
        launch(
            _round_kernel,
            programs,
            target.device,
            target,
            source,
            step,
            first,
            index,
            target.numel(),
            SHIFT=16 * number,
            BLOCK=_BLOCK,
            warps=_WARPS,
        )
