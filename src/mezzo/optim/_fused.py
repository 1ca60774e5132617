"""The update of SGD, Adam and AdamW on masters by torch's fused kernels, without host reads."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from mezzo._torch.dispatcher import has_kernel
from mezzo._torch.foreach import foreach_add_, fused_adam_, fused_adamw_, fused_sgd_
from mezzo.optim._check import Verdict
from mezzo.optim._grads import Slot, by_kind, true_grads
from mezzo.optim._masters import master_of, publish
from mezzo.optim._rounding import STATE_DTYPE, store_rounded
from mezzo.optim._shards import local

_KERNELS = {SGD: ("_fused_sgd_",), Adam: ("_fused_adam_", "_fused_adamw_"), AdamW: ("_fused_adam_", "_fused_adamw_")}

_WIDE = (torch.float32, torch.float64)

#: Elements of gradients, and of compact masters, that are converted to float32 at a time. It limits
#: temporaries to 256 MiB, or twice that, for models of any size.
PART_ELEMENTS = 2**26


def covers_class(optimizer: Optimizer) -> bool:
    """Whether the optimizer is exactly SGD, Adam or AdamW; a subclass may have its own rule."""
    return type(optimizer) in _KERNELS


def covers(optimizer: Optimizer, groups: Sequence[Sequence[Slot]]) -> bool:
    """Whether the fused kernels can take this step; otherwise the optimizer's own step does."""
    if not covers_class(optimizer):
        return False
    kernels = _KERNELS[type(optimizer)]
    kinds = {slot.kind for slots in groups for slot in slots}
    if not all(dtype in _WIDE and _has_kernels(kernels, device.type) for device, dtype, _ in kinds):
        return False
    return all(
        covers_options(group)
        and all([_covers_slot(slot) for slot in slots])
        and knows_first_steps(optimizer, group, [slot.param for slot in slots])
        for group, slots in zip(optimizer.param_groups, groups, strict=True)
    )


def covers_options(group: dict[str, Any]) -> bool:
    """Whether this update supports the options of a parameter group."""
    tensors = [group.get("weight_decay"), *group.get("betas", ())]
    lr = group["lr"]
    needs_autograd = isinstance(lr, Tensor) and lr.requires_grad
    odd = group.get("amsgrad") or group.get("differentiable") or needs_autograd
    return not odd and not any(isinstance(value, Tensor) for value in tensors)


def _covers_slot(slot: Slot) -> bool:
    return (slot.is_plain or not slot.grad.is_sparse) and (
        slot.local_target.is_contiguous() or _is_dense(slot.local_target)
    )


def knows_first_steps(optimizer: Optimizer, group: dict[str, Any], params: Sequence[Tensor]) -> bool:
    """Whether momentum with dampening has its buffers.

    The first buffer is the gradient without dampening, so the host must know which step is the
    first that was taken. Until the buffers exist, the generic path reads that.
    """
    if not (group.get("dampening") and group["momentum"]):
        return True
    return all(optimizer.state.get(param, {}).get("momentum_buffer") is not None for param in params)


@functools.cache
def _has_kernels(names: tuple[str, ...], device_type: str) -> bool:
    return all(hasattr(torch, name) and has_kernel(f"aten::{name}", device_type.upper()) for name in names)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their storage, so that kernels can treat it as one dimension."""
    if tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)):
        return True
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def apply(
    optimizer: Optimizer,
    groups: Sequence[Sequence[Slot]],
    verdict: Verdict | None,
    factor: Tensor | None,
    state_dtype: torch.dtype = torch.float32,
) -> None:
    """Take the step; change nothing if the verdict is an overflow.

    Args:
        optimizer: SGD, Adam or AdamW.
        groups: Per parameter group, the parameters with gradients.
        verdict: The result of the check; None: take the step in any case.
        factor: Gradients are multiplied by it; None: by nothing.
        state_dtype: bfloat16 state is computed in float32 and rounded stochastically.
    """
    update = _sgd if type(optimizer) is SGD else _adam
    for group, slots in zip(optimizer.param_groups, groups, strict=True):
        full = (s for s in slots if s.local_target.numel())
        for batch in by_kind(full):
            found = None if verdict is None else verdict.found_inf.to(batch[0].local_target.device, non_blocking=True)
            for part in _parts(batch):
                masters = {s.param: master for s in part if (master := master_of(s.param)) is not None}
                targets = [local(masters[s.param]) if s.has_master else s.local_target for s in part]
                grads = true_grads([s.values for s in part], targets, factor)
                update(optimizer, group, part, targets, grads, found, state_dtype)
                publish(list(masters), list(masters.values()))


def _parts(batch: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Split a batch so that the float32 temporaries of its gradients stay small."""
    part: list[Slot] = []
    elements = 0
    for slot in batch:
        size = slot.local_target.numel()
        if part and elements + size > PART_ELEMENTS:
            yield part
            part, elements = [], 0
        part.append(slot)
        elements += size
    if part:
        yield part


def _sgd(
    optimizer: Optimizer,
    group: dict[str, Any],
    batch: Sequence[Slot],
    targets: list[Tensor],
    grads: list[Tensor],
    found: Tensor | None,
    state_dtype: torch.dtype,
) -> None:
    momentum = group["momentum"]
    # A buffer of zeros gives the same first step as none (dampening is 0 or the buffer exists), and
    # stays right if the first step is skipped.
    buffers = [state_tensor(optimizer, slot, "momentum_buffer", state_dtype) for slot in batch] if momentum else []
    wide = _widened(buffers)
    fused_sgd_(
        targets,
        grads,
        wide,
        weight_decay=group["weight_decay"],
        momentum=momentum,
        lr=_lr(group, targets[0]),
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=False,
        found_inf=found,
    )
    if buffers and buffers[0].dtype is STATE_DTYPE:
        steps = _count_steps(optimizer, batch, found)
        for slot, step, stored, value in zip(batch, steps, buffers, wide, strict=True):
            store_rounded([stored], [value], slot.target, step, slot.index)


def _adam(
    optimizer: Optimizer,
    group: dict[str, Any],
    batch: Sequence[Slot],
    targets: list[Tensor],
    grads: list[Tensor],
    found: Tensor | None,
    state_dtype: torch.dtype,
) -> None:
    steps = _count_steps(optimizer, batch, found)
    means = [state_tensor(optimizer, slot, "exp_avg", state_dtype) for slot in batch]
    squares = [state_tensor(optimizer, slot, "exp_avg_sq", state_dtype) for slot in batch]
    wide_means, wide_squares = _widened(means), _widened(squares)
    kernel = fused_adamw_ if group.get("decoupled_weight_decay", type(optimizer) is AdamW) else fused_adam_
    kernel(
        targets,
        grads,
        wide_means,
        wide_squares,
        [],
        steps,
        amsgrad=False,
        lr=_lr(group, targets[0]),
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        found_inf=found,
    )
    if means[0].dtype is STATE_DTYPE:
        for slot, step, *moments in zip(batch, steps, means, squares, wide_means, wide_squares, strict=True):
            store_rounded(moments[:2], moments[2:], slot.target, step, slot.index)


def _count_steps(optimizer: Optimizer, batch: Sequence[Slot], found: Tensor | None) -> list[Tensor]:
    """Return the step counts with this step, which does not count if `found` says overflow."""
    steps = [step_count(optimizer, slot) for slot in batch]
    # The Tensor overload: torch._foreach_add_ would read the tensor on the host.
    foreach_add_(steps, torch.ones((), device=steps[0].device) if found is None else 1 - found)
    return steps


def _widened(state: list[Tensor]) -> list[Tensor]:
    """Return state that the kernels compute with: the tensors themselves unless they are bfloat16."""
    return [tensor.float() if tensor.dtype is STATE_DTYPE else tensor for tensor in state]


def state_tensor(optimizer: Optimizer, slot: Slot, key: str, dtype: torch.dtype) -> Tensor:
    """Return a state tensor by torch's name.

    Created, or converted to `dtype` and the layout of the target. State of float64 parameters is float64.
    """
    state = optimizer.state[slot.param]
    value = state.get(key)
    target = slot.target
    dtype = dtype if slot.kind[1] is torch.float32 else slot.kind[1]
    if value is None:
        value = state[key] = torch.zeros_like(target, dtype=dtype, requires_grad=False)
    elif value.shape != target.shape:
        raise ValueError(
            f"the optimizer's {key} is {tuple(value.shape)}, its parameter {tuple(target.shape)}: the state is of another model"
        )
    elif value.dtype != dtype or value.device != target.device or local(value).stride() != slot.local_target.stride():
        # From a checkpoint of another layout, dtype or device; kernels need all tensors alike.
        fitting = torch.empty_like(target, dtype=dtype, requires_grad=False)
        value = state[key] = fitting.copy_(value)
    return local(value)


def step_count(optimizer: Optimizer, slot: Slot) -> Tensor:
    """Return the step count on the device: a skipped step leaves it without a host read."""
    state = optimizer.state[slot.param]
    value = state.get("step")
    device = slot.target.device
    if value is None:
        value = state["step"] = torch.zeros((), dtype=torch.float32, device=device)
    elif not isinstance(value, Tensor):
        value = state["step"] = torch.full((), float(value), dtype=torch.float32, device=device)
    elif value.device != device or value.dtype != torch.float32:
        value = state["step"] = value.to(device, torch.float32)
    return local(value)


def _lr(group: dict[str, Any], target: Tensor) -> Any:
    lr = group["lr"]
    if not isinstance(lr, Tensor):
        return lr
    lr = lr.reshape(())
    return lr if lr.device.type == "cpu" else lr.to(target.device, non_blocking=True)
