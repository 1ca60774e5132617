"""Stochastic rounding of float32 to bfloat16.

A value between two bfloat16 numbers becomes one of them, the nearer one more often, so that its mean
is the value itself. A moving average that changes by less than half of its last bit would stand
still if it were rounded to nearest; rounded like this, it moves as often as it should.

The random bits come from Philox4x32-10, a counter-based generator. The counter is the element, the
step and the parameter's position in the optimizer. So there is no state to save: a resumed run, a
replayed CUDA graph and all ranks draw the numbers that belong to their element and step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mezzo._torch.sharding import global_offsets, local_shard
from mezzo._torch.step_tier import uses_triton
from mezzo.optim._shards import is_dtensor

STATE_DTYPE = torch.bfloat16
"""The dtype of half state. float16 is none: squares of gradients are often below its smallest number."""
KEY = 0x6D657A7A6F
"""Philox's key, any constant: different keys give unrelated numbers."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_PART = 2**18
"""Elements that are rounded at a time: Philox needs 64-bit temporaries."""


def philox(counter: Sequence[Tensor], key: int = KEY) -> list[Tensor]:
    """Return four 32-bit words for each counter, in int64 (Salmon and others, 2011: Philox4x32-10).

    Args:
        counter: Four int64 tensors of one shape, with numbers from 0 to 2**32 - 1.
        key: 64 bits.
    """
    a, b, c, d = counter
    low, high = key & _MASK, key >> 32
    for _ in range(_ROUNDS):
        # Products of 64 bits: int64 wraps, so all their bits are right, and masks remove the sign.
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b = ((second >> 32) & _MASK) ^ b ^ low, second & _MASK
        c, d = ((first >> 32) & _MASK) ^ d ^ high, first & _MASK
        low, high = (low + _KEY_STEPS[0]) & _MASK, (high + _KEY_STEPS[1]) & _MASK
    return [a, b, c, d]


def words_of_run(first: int, count: int, step: Tensor, index: int) -> Tensor:
    """Return 32 random bits, in int64, for each of `count` elements of a parameter from `first` on.

    Args:
        first: The first element.
        count: How many elements.
        step: Which step this is, a number on the device.
        index: The parameter's position in the optimizer.
    """
    quads = torch.arange(first >> 2, (first + count + 3) >> 2, device=step.device)
    words = torch.stack(_words_of_quads(quads, step, index), dim=1).flatten()
    return words[first & 3 : (first & 3) + count]


def words_of_elements(elements: Tensor, step: Tensor, index: int) -> Tensor:
    """Return the same words for any elements, at four times the cost."""
    words = torch.stack(_words_of_quads(elements >> 2, step, index), dim=1)
    return words.gather(1, (elements & 3).unsqueeze(1)).squeeze(1)


def _words_of_quads(quads: Tensor, step: Tensor, index: int) -> list[Tensor]:
    """Return the words of four elements each, whose positions are 4 * quad and the three after it."""
    return philox((quads & _MASK, quads >> 32, step.to(torch.int64).expand_as(quads), torch.full_like(quads, index)))


def round_by(value: Tensor, noise: Tensor) -> Tensor:
    """Round float32 to bfloat16: up in size if the bits that go, plus 16 bits of noise, carry.

    Args:
        value: float32.
        noise: Numbers from 0 to 65535, int32.
    """
    bits = (value.view(torch.int32) + noise).bitwise_right_shift_(16)
    # A NaN must not become another number by the carry
    return bits.to(torch.int16).view(STATE_DTYPE).masked_fill_(value.isnan(), torch.nan)


@torch.no_grad()
def store_rounded(stored: Sequence[Tensor], values: Sequence[Tensor], like: Tensor, step: Tensor, index: int) -> None:
    """Write the float32 state of one parameter back to its bfloat16 state.

    Values that bfloat16 holds exactly keep their bits: a skipped step changes nothing.

    Args:
        stored: One or two bfloat16 tensors (shards of this rank), dense, all of one layout.
        values: As many float32 tensors of that layout.
        like: The parameter, which may be a DTensor: it tells which elements a shard holds.
        step: Which step this is, on the device.
        index: The parameter's position in the optimizer.
    """
    count = stored[0].numel()
    targets = [tensor.as_strided((count,), (1,)) for tensor in stored]
    sources = [tensor.as_strided((count,), (1,)) for tensor in values]
    first = _first_element(like)
    if first is not None and uses_triton(targets[0].device):
        from mezzo.optim._triton_rounding import launch_rounding  # Triton is slow to import

        launch_rounding(targets, sources, step, first, index)
        return
    for begin in range(0, count, _PART):
        end = min(begin + _PART, count)
        if first is None:
            places = torch.arange(begin, end, device=step.device)
            words = words_of_elements(_elements(like, places), step, index)
        else:
            words = words_of_run(first + begin, end - begin, step, index)
        for number, (target, source) in enumerate(zip(targets, sources, strict=True)):
            noise = ((words >> (16 * number)) & 0xFFFF).to(torch.int32)
            target[begin:end] = round_by(source[begin:end], noise)


def _first_element(param: Tensor) -> int | None:
    """Return where this rank's elements begin in the whole parameter; None if they are not one run of it."""
    if not is_dtensor(param):
        return 0
    if not local_shard(param).numel():
        return 0
    if tuple(local_shard(param).shape[1:]) != tuple(param.shape[1:]):
        return None
    return global_offsets(param)[0] * math.prod(param.shape[1:])


def _elements(param: Tensor, places: Tensor) -> Tensor:
    """Return which elements of a whole DTensor are at `places` of this rank's shard."""
    shape, offsets = local_shard(param).shape, global_offsets(param)
    found = torch.zeros_like(places)
    for size, offset, whole in zip(reversed(shape), reversed(offsets), _strides(param.shape), strict=True):
        found += (places % size + offset) * whole
        places = places // size
    return found


def _strides(shape: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor, last dimension first."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return strides
