"""The check: whether all gradients are finite, and their norm.

One pass, no host synchronisation.
"""

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
    """Result of the check, on the device."""

    found_inf: Tensor
    """0-dim float32: 1 if any gradient is not finite, else 0."""
    first_bad: Tensor
    """0-dim int64: index of the first parameter with such a gradient, counted over all groups.

    -1 if none.
    """
    total_norm: Tensor | None = None
    """L2 norm of the unscaled gradients, if asked for."""
    clip_coef: Tensor | None = None
    """The update multiplies unscaled gradients by it; None unless asked for."""
    packed: Tensor | None = None
    """`found_inf` and `first_bad` in one float32 tensor, if one launch wrote both."""


def check(
    slots: Sequence[Slot], count: int, device: torch.device, scale: Tensor | None, max_norm: float | None
) -> Verdict:
    """Check the gradients of one optimizer.

    Args:
        slots: Its parameters with gradients.
        count: How many parameters it has.
        device: Device of the result.
        scale: Loss scale of the gradients; None if they are not scaled.
        max_norm: If given, also compute the norm, and the coefficient that clips it to this.
    """
    inverse = None if scale is None else inverse_of(scale)
    full = buckets((s for s in slots if s.values.numel()), _kind)
    # A norm is finite if and only if its gradients are: one pass gives both answers.
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
    """Return the gradients; complex ones as pairs of real and imaginary parts."""
    values = [s.values for s in batch]
    return [torch.view_as_real(v.resolve_conj()) for v in values] if values[0].is_complex() else values


def _first_bad_key(batch: Sequence[Slot], sizes: Tensor, count: int, inverse: Tensor | None) -> Tensor:
    """Return `count - index` of the first bad gradient, 0 if all are finite.

    A maximum finds the first.
    """
    if inverse is not None:
        # A scale far below 1 makes finite gradients overflow; a scale of 0 makes all of them NaN.
        wide = sizes if sizes.dtype == torch.float64 else sizes.float()
        sizes = (wide * inverse.to(sizes.device, non_blocking=True)).to(wide.dtype)
    if batch[0].values.dtype not in (torch.float64, torch.complex128):
        sizes = sizes.float()
    keys = _keys(tuple(s.index for s in batch), count, sizes.device)
    return (keys * ~sizes.isfinite()).amax()


@functools.lru_cache(maxsize=64)
def _keys(indices: tuple[int, ...], count: int, device: torch.device) -> Tensor:
    keys = torch.tensor([count - i for i in indices], dtype=torch.int64)
    # Pinned memory: the copy does not synchronise.
    return keys.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else keys.to(device)


def _total_norm(
    batches: Sequence[Sequence[Slot]], norms: Sequence[Tensor], device: torch.device, sharded: bool
) -> Tensor:
    """Return the L2 norm over all gradients, and over all ranks if they are sharded."""
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

    Squares of bfloat16 and float32 numbers may overflow float32, and long sums lose digits: the CPU
    sums in float64. A GPU sums in float32, where a norm above 1e19 counts as not finite.
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
    """Return how many ranks of its mesh hold each element of a DTensor; 0: it is not sharded."""
    if not _is_sharded(grad):
        return 0.0
    sizes = zip(grad.placements, grad.device_mesh.shape, strict=True)
    copies = 1.0
    for placement, size in sizes:
        copies *= 1 if placement.is_shard() else size
    return copies
