"""The check: are all gradients finite, and what is their norm. One reading, no waiting for the device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mezzo._torch.foreach import foreach_norm, norm_takes_dtype
from mezzo.optim._grads import Slot, buckets, inverse_of
from mezzo.optim._shards import is_dtensor

_INF = float("inf")
_CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the check found, all on the device."""

    found_inf: Tensor
    """0-dim float32: 1 if any gradient is not finite, else 0."""
    first_bad: Tensor
    """0-dim int64: index of the first parameter with such a gradient, counted over all groups; -1 if none."""
    total_norm: Tensor | None = None
    """L2 norm of the true (unscaled) gradients, where asked for."""
    clip_coef: Tensor | None = None
    """What the update multiplies true gradients with, where asked for."""
    packed: Tensor | None = None
    """`found_inf` and `first_bad` side by side, float32, where one launch wrote both."""


def check(
    slots: Sequence[Slot], count: int, device: torch.device, scale: Tensor | None, max_norm: float | None
) -> Verdict:
    """Look at the gradients of one optimizer.

    Args:
        slots: Its parameters with gradients.
        count: How many parameters it has.
        device: Where the answer lies.
        scale: Loss scale that the gradients carry; None if they are true.
        max_norm: Compute the norm, and the coefficient that clips it to this.
    """
    inverse = None if scale is None else inverse_of(scale)
    full = buckets((s for s in slots if s.values.numel()), _kind)
    # The norms that clipping needs are finite just where the gradients are: one reading gives both answers.
    norms = [torch.stack(_l2_norms(batch) if max_norm is not None else _largest_values(batch)) for batch in full]
    keys = [
        _first_bad_key(batch, size, count, inverse).to(device, non_blocking=True)
        for batch, size in zip(full, norms, strict=True)
    ]
    key = _largest(keys) if keys else torch.zeros((), dtype=torch.int64, device=device)
    sharded = (
        any(not s.is_plain and _is_sharded(s.grad) for s in slots) and dist.is_available() and dist.is_initialized()
    )
    if sharded:
        dist.all_reduce(key, dist.ReduceOp.MAX)
    found = key > 0
    found_inf = found.float()
    first_bad = (count + 1 - key) * found - 1
    if max_norm is None:
        return Verdict(found_inf, first_bad)
    total_norm = _total_norm(full, norms, device, sharded)
    if inverse is not None:
        total_norm = total_norm * inverse.to(device, non_blocking=True)
    total_norm = total_norm.float()
    clip_coef = (max_norm / (total_norm + _CLIP_EPSILON)).clamp(max=1.0)
    return Verdict(found_inf, first_bad, total_norm, clip_coef)


def _largest(keys: list[Tensor]) -> Tensor:
    return keys[0] if len(keys) == 1 else torch.stack(keys).amax()


def _kind(slot: Slot) -> tuple[Any, ...]:
    return slot.kind if slot.is_plain else (*slot.kind, _replicas(slot.grad))


def _largest_values(batch: Sequence[Slot]) -> tuple[Tensor, ...] | list[Tensor]:
    """Return the largest magnitude of each gradient: unlike a sum of squares it cannot overflow."""
    return foreach_norm(_reals(batch), _INF)


def _reals(batch: Sequence[Slot]) -> list[Tensor]:
    """Return the gradients of one dtype; of complex ones the real and imaginary parts side by side."""
    values = [s.values for s in batch]
    return [torch.view_as_real(v.resolve_conj()) for v in values] if values[0].is_complex() else values


def _first_bad_key(batch: Sequence[Slot], sizes: Tensor, count: int, inverse: Tensor | None) -> Tensor:
    """Return `count - index` of the first bad one, 0 if all are finite: so that a maximum finds the first."""
    if inverse is not None:
        # A scale far below 1 can push a finite gradient over the top; a scale of 0 makes all of them NaN.
        wide = sizes if sizes.dtype == torch.float64 else sizes.float()
        sizes = (wide * inverse.to(sizes.device, non_blocking=True)).to(wide.dtype)
    if batch[0].values.dtype not in (torch.float64, torch.complex128):
        sizes = sizes.float()
    keys = _keys(tuple(s.index for s in batch), count, sizes.device)
    return (keys * ~sizes.isfinite()).amax()


@functools.lru_cache(maxsize=64)
def _keys(indices: tuple[int, ...], count: int, device: torch.device) -> Tensor:
    keys = torch.tensor([count - i for i in indices], dtype=torch.int64)
    # Pinned, so that the copy does not wait.
    return keys.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else keys.to(device)


def _total_norm(
    batches: Sequence[Sequence[Slot]], norms: Sequence[Tensor], device: torch.device, sharded: bool
) -> Tensor:
    """Return the L2 norm over all gradients, in float32 at least, over all ranks where they are sharded."""
    whole: list[Tensor] = []
    shards: list[Tensor] = []
    for batch, sizes in zip(batches, norms, strict=True):
        norm = torch.linalg.vector_norm(sizes).to(device, non_blocking=True)
        if sharded and _is_sharded(batch[0].grad):
            shards.append(norm.square() / _replicas(batch[0].grad))
        else:
            whole.append(norm)
    if sharded:
        square = torch.stack([shard.double() for shard in shards]).sum() if shards else _zero(device)
        dist.all_reduce(square)
        whole.append(square.sqrt())
    return torch.linalg.vector_norm(torch.stack([norm.double() for norm in whole])) if whole else _zero(device)


def _zero(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=device)


def _l2_norms(batch: Sequence[Slot]) -> tuple[Tensor, ...] | list[Tensor]:
    """Return the L2 norm of each gradient.

    Squares of bfloat16 and float32 numbers may not fit into float32, and long sums lose digits there: on the CPU they are
    float64. A GPU is not asked for that: there a norm above 1e19 counts as not finite.
    """
    values = _reals(batch)
    is_wide = values[0].device.type == "cpu" or values[0].dtype == torch.float64
    wide = torch.float64 if is_wide else torch.float32
    if norm_takes_dtype():
        return foreach_norm(values, 2, dtype=wide)
    return foreach_norm([v.to(wide) for v in values], 2)


def _is_sharded(grad: Any) -> bool:
    return is_dtensor(grad) and any(p.is_shard() for p in grad.placements)


def _replicas(grad: Any) -> float:
    """How often each number of a DTensor exists over its mesh; 0 marks a gradient that is not sharded."""
    if not _is_sharded(grad):
        return 0.0
    sizes = zip(grad.placements, grad.device_mesh.shape, strict=True)
    copies = 1.0
    for placement, size in sizes:
        copies *= 1 if placement.is_shard() else size
    return copies
