"""The gradients of one step: gathered, and turned into true float32 values without rewriting them."""

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
    """A parameter that has a gradient in this step. Shards are looked up once, here: steps are bound by the host."""

    index: int
    """Place among all parameters of the optimizer, groups one after the other."""
    param: Tensor
    target: Tensor
    """What the update writes: what is kept of the master, else the parameter."""
    local_target: Tensor
    """The part of it on this rank."""
    grad: Tensor
    """As backward left it; a sparse one coalesced."""
    values: Tensor
    """The numbers of the gradient on this rank, dense."""
    is_plain: bool
    """Whether the gradient is neither sparse nor a DTensor."""
    kind: tuple[torch.device, torch.dtype, torch.dtype]
    """Device and dtype of the numbers that are updated, dtype of the gradient: what can go into one launch."""

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
    """Group slots by `key(slot)`, order kept."""
    found: defaultdict[Any, list[Slot]] = defaultdict(list)
    for slot in slots:
        found[key(slot)].append(slot)
    return list(found.values())


def by_kind(slots: Iterable[Slot]) -> list[list[Slot]]:
    """Group slots that can go into one launch, order kept."""
    found: defaultdict[Any, list[Slot]] = defaultdict(list)
    for slot in slots:
        found[slot.kind].append(slot)
    return list(found.values())


def inverse_of(scale: Tensor) -> Tensor:
    """Return 1/scale."""
    return scale.reciprocal()


def factor_of(scale: Tensor | None, clip_coef: Tensor | None) -> Tensor | None:
    """Return what gradients are multiplied with: inverse scale times clip coefficient; None for 1."""
    if scale is None:
        return clip_coef
    inverse = inverse_of(scale)
    return inverse if clip_coef is None else inverse * clip_coef.to(inverse.device, non_blocking=True)


def same_order(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape have their elements in the same order; strides of single elements do not count.

    Weights of 1x1 and depthwise convolutions are in both memory formats at once, and gradients come in either.
    """
    mine, theirs = one.stride(), other.stride()
    return mine == theirs or all(a == b for a, b, n in zip(mine, theirs, one.shape, strict=True) if n > 1)


def true_grads(grads: Sequence[Tensor], likes: Sequence[Tensor], factor: Tensor | None) -> list[Tensor]:
    """Return gradients times `factor` in the dtype and layout of `likes`, all on one device.

    A gradient that needs no change is returned itself; none is written.
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
        # The product is made before the dtype narrows: a scaled gradient may not fit into half, the true one does.
        wide = [torch.empty_like(likes[i], dtype=compute_dtype(likes[i]), requires_grad=False) for i in copied]
        foreach_copy_(wide, [grads[i] for i in copied])
        if factor is not None:
            foreach_mul_(wide, factor)
        for i, value in zip(copied, wide, strict=True):
            out[i] = value if value.dtype == likes[i].dtype else value.to(likes[i].dtype)
    return out


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which numbers of a tensor are worked on: float32 for half, else its own."""
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
    """Whether `param` refuses a gradient of `dtype` until its `grad_dtype` says otherwise."""
    if not hasattr(param, "grad_dtype"):
        return param.dtype != dtype
    return param.grad_dtype not in (None, dtype)
