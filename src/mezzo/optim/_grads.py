"""The gradients of one step: collecting them, and unscaling them into new tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo._torch.foreach import foreach_copy_, foreach_mul, foreach_mul_
from mezzo.optim._masters import is_half, stored_master
from mezzo.optim._shards import is_dtensor, like_dtensor, local


@dataclass(slots=True)
class Slot:
    """A parameter with a gradient in this step.

    Shards are looked up once, as the host limits small steps.
    """

    index: int
    """Position among all parameters of the optimizer, over all groups."""
    param: Tensor
    target: Tensor
    """What the update writes: the stored master, or the parameter if it has none."""
    local_target: Tensor
    """Its shard on this rank."""
    grad: Tensor
    """From backward; a sparse one is coalesced."""
    values: Tensor
    """The dense values of the gradient on this rank."""
    is_plain: bool
    """Whether the gradient is neither sparse nor a DTensor."""
    kind: tuple[torch.device, torch.dtype, torch.dtype]
    """Device and dtype of the updated values, dtype of the gradient: slots of one kind can share a
    launch."""

    @property
    def has_master(self) -> bool:
        """Whether the parameter is written from a float32 master."""
        return self.target is not self.param


def gather(optimizer: Optimizer) -> list[list[Slot]]:
    """Return, per parameter group, the parameters that have a gradient."""
    groups: list[list[Slot]] = []
    start = 0
    for group in optimizer.param_groups:
        params = group["params"]
        groups.append([_slot(i, p, p.grad) for i, p in enumerate(params, start) if p.grad is not None])
        start += len(params)
    return groups


def _slot(index: int, param: Tensor, grad: Tensor) -> Slot:
    kept = stored_master(param)
    target = param if kept is None else kept
    kind = (target.device, param.dtype if kept is None else torch.float32, grad.dtype)
    if grad.is_sparse:
        grad = grad.coalesce()
        return Slot(index, param, target, local(target), grad, grad._values(), False, kind)
    if type(grad) is Tensor:
        return Slot(index, param, target, target, grad, grad, True, kind)
    values = local(grad)
    return Slot(index, param, target, local(target), grad, values, values is grad, kind)


def buckets(slots: Iterable[Slot], key: Any) -> list[list[Slot]]:
    """Group slots by `key(slot)`, in order."""
    found: defaultdict[Any, list[Slot]] = defaultdict(list)
    for slot in slots:
        found[key(slot)].append(slot)
    return list(found.values())


def by_kind(slots: Iterable[Slot]) -> list[list[Slot]]:
    """Group slots that can share a launch, in order."""
    found: defaultdict[Any, list[Slot]] = defaultdict(list)
    for slot in slots:
        found[slot.kind].append(slot)
    return list(found.values())


def inverse_of(scale: Tensor) -> Tensor:
    """Return 1/scale."""
    return scale.reciprocal()


def factor_of(scale: Tensor | None, clip_coef: Tensor | None) -> Tensor | None:
    """Return the factor of gradients, inverse scale times clip coefficient; None means 1."""
    if scale is None:
        return clip_coef
    inverse = inverse_of(scale)
    return inverse if clip_coef is None else inverse * clip_coef.to(inverse.device, non_blocking=True)


def same_order(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape have their elements in the same order in memory.

    Strides of dimensions of size 1 do not count: weights of 1x1 and depthwise convolutions are in
    both memory formats at once, and their gradients come in either.
    """
    mine, theirs = one.stride(), other.stride()
    return mine == theirs or all(a == b for a, b, n in zip(mine, theirs, one.shape, strict=True) if n > 1)


def true_grads(grads: Sequence[Tensor], likes: Sequence[Tensor], factor: Tensor | None) -> list[Tensor]:
    """Return gradients times `factor` in the dtype and layout of `likes`, all on one device.

    A gradient that needs no change is returned itself. None is changed in place.
    """
    out = list(grads)
    fits = [g.dtype == t.dtype and same_order(g, t) for g, t in zip(grads, likes, strict=True)]
    if factor is not None and grads:
        factor = factor.to(grads[0].device, non_blocking=True)
        scaled = [i for i, fit in enumerate(fits) if fit]
        if scaled:
            products = foreach_mul([grads[i] for i in scaled], factor)
            for i, value in zip(scaled, products, strict=True):
                out[i] = value
    copied = [i for i, fit in enumerate(fits) if not fit]
    if copied:
        # Multiply before the dtype narrows: a scaled gradient may overflow half where the unscaled
        # one fits.
        wide = [torch.empty_like(likes[i], dtype=compute_dtype(likes[i]), requires_grad=False) for i in copied]
        foreach_copy_(wide, [grads[i] for i in copied])
        if factor is not None:
            foreach_mul_(wide, factor)
        for i, value in zip(copied, wide, strict=True):
            out[i] = value if value.dtype == likes[i].dtype else value.to(likes[i].dtype)
    return out


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of arithmetic on a tensor: float32 for half, otherwise its own."""
    return torch.float32 if is_half(tensor) else tensor.dtype


def true_grad(slot: Slot, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return one gradient of any kind (sparse, DTensor, dense) times `factor`, in `dtype`."""
    grad = slot.grad
    if grad.dtype == dtype and factor is None:
        return grad
    values = slot.values
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    if factor is not None:
        wide = wide * factor.to(wide.device, non_blocking=True)
    wide = wide.to(dtype)
    if grad.is_sparse:
        return torch.sparse_coo_tensor(grad._indices(), wide, grad.shape, is_coalesced=True, check_invariants=False)
    return like_dtensor(grad, wide) if is_dtensor(grad) else wide


def needs_grad_dtype(param: Tensor, dtype: torch.dtype) -> bool:
    """Whether `param` refuses a gradient of `dtype` unless its `grad_dtype` is changed."""
    if not hasattr(param, "grad_dtype"):
        return param.dtype != dtype
    return param.grad_dtype not in (None, dtype)
