"""Gradients unscaled in place.

Only `GradScaler.unscale_` and objects that look like optimizers need it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mezzo._torch.foreach import foreach_copy_, foreach_mul_
from mezzo.optim._grads import Slot, buckets, needs_grad_dtype, true_grad


def unscale_(slots: Sequence[Slot], factor: Tensor) -> None:
    """Multiply gradients by `factor`.

    Half ones become float32 if this torch allows it on half parameters.
    """
    for batch in buckets(slots, lambda s: (s.grad.device, s.grad.dtype, s.grad.is_sparse, s.is_plain)):
        local_factor = factor.to(batch[0].grad.device, non_blocking=True)
        if _stays_in_place(batch[0]):
            foreach_mul_([s.values for s in batch], local_factor)
            continue
        for slot, grad in zip(batch, _widened(batch, local_factor), strict=True):
            _store(slot.param, grad)


def _stays_in_place(slot: Slot) -> bool:
    """Whether to change a gradient in place.

    DDP shares the memory of wide ones, old torch fixes the dtype.
    """
    is_wide = torch.promote_types(slot.grad.dtype, torch.float32) == slot.grad.dtype
    return not slot.grad.is_sparse and (is_wide or not hasattr(slot.param, "grad_dtype"))


def _widened(batch: Sequence[Slot], factor: Tensor) -> list[Tensor]:
    grads = [s.grad for s in batch]
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    if not batch[0].is_plain:
        narrow = not hasattr(batch[0].param, "grad_dtype")
        return [true_grad(s, factor, s.grad.dtype if narrow else wide) for s in batch]
    out = [torch.empty_like(g, dtype=wide) for g in grads]
    foreach_copy_(out, grads)
    foreach_mul_(out, factor)
    return out


def _store(param: Tensor, grad: Tensor) -> None:
    if needs_grad_dtype(param, grad.dtype):
        param.grad = None
        param.grad_dtype = None
    param.grad = grad
