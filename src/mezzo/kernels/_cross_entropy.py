"""Cross entropy of half logits over a large vocabulary, in float32, without a float32 copy of the logits.

torch's own way holds the logits of GPT-2 (16384 tokens, 50257 words) three more times in float32:
3.3 GB each. Here the forward keeps the half logits and one float32 number per row, and the backward
writes the half gradient once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mezzo._torch.modes import no_torch_function
from mezzo._torch.step_tier import has_triton
from mezzo.errors import unknown_choice
from mezzo.kernels._launch import differentiable_gradients, on_device
from mezzo.kernels._registry import register

_REDUCTIONS = ("none", "mean", "sum")
_BLOCK, _WARPS = 4096, 8
_ALIGNMENT = 8
"""Elements of the widest load of half numbers."""


def fused_cross_entropy(
    logits: Tensor, target: Tensor, reduction: str = "mean", ignore_index: int = -100, label_smoothing: float = 0.0
) -> Tensor:
    """Return the cross entropy of rows of logits in float32, as `F.cross_entropy` of their float32 copy.

    The number of counted targets stays on the device. A target that is neither a class nor
    `ignore_index` makes the loss NaN, with NaN gradients in its row; torch stops the process there.

    Args:
        logits: (rows, classes) in float16, bfloat16 or float32.
        target: (rows,) classes, int64.
        reduction: `mean` over the counted targets, `sum`, or `none`.
        ignore_index: The target of rows that do not count.
        label_smoothing: From 0 to 1.
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(unknown_choice("reduction", reduction, _REDUCTIONS))
    losses: Tensor = token_losses(logits, target, ignore_index, label_smoothing)[0]
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / (target != ignore_index).sum() if reduction == "mean" else total


def _plain_losses(logits: Tensor, target: Tensor, ignore_index: int, smoothing: float) -> Tensor:
    return F.cross_entropy(
        logits.float(), target, reduction="none", ignore_index=ignore_index, label_smoothing=smoothing
    )


def _empty_losses(logits: Tensor, target: Tensor, ignore_index: int, smoothing: float) -> tuple[Tensor, Tensor]:
    rows = logits.shape[0]
    return logits.new_empty(rows, dtype=torch.float32), logits.new_empty(rows, dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target, ctx.ignore_index, ctx.smoothing = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, target, output[1])


def _differentiate(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None
    logits, target, sums = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph
        (found,) = differentiable_gradients(
            lambda given: _plain_losses(given, target, ctx.ignore_index, ctx.smoothing), (logits,), grad
        )
        return found, None, None, None
    with no_torch_function():  # recorded as a gradient, not as a call of the user
        found = token_losses_backward(grad, logits, target, sums, ctx.ignore_index, ctx.smoothing)
    return found, None, None, None


@register(fake=_empty_losses, setup_context=_keep, backward=_differentiate)
def token_losses(logits: Tensor, target: Tensor, ignore_index: int, smoothing: float) -> tuple[Tensor, Tensor]:
    """Return the loss and the log-sum-exp of each row; an ignored row has loss 0."""
    return row_losses(logits, target, ignore_index, smoothing)


def row_losses(logits: Tensor, target: Tensor, ignore_index: int, smoothing: float) -> tuple[Tensor, Tensor]:
    """Compute what `token_losses` returns."""
    if not has_triton(logits.device):
        return _plain_losses(logits, target, ignore_index, smoothing), logits.float().logsumexp(1)
    from mezzo.kernels._cross_entropy_kernels import cross_entropy_kernel

    losses, sums = _empty_losses(logits, target, ignore_index, smoothing)
    rows, size = logits.shape
    logits = _with_plain_rows(logits)
    if rows:
        with on_device(logits.device):
            cross_entropy_kernel[(rows,)](
                logits, target.contiguous(), losses, sums, logits.stride(0), size, ignore_index, smoothing,
                SMOOTHED=smoothing != 0, ALIGNMENT=_ALIGNMENT, BLOCK=_BLOCK, num_warps=_WARPS,
            )  # fmt: skip
    return losses, sums


def _empty_grad(
    grad: Tensor, logits: Tensor, target: Tensor, sums: Tensor, ignore_index: int, smoothing: float
) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


@register(fake=_empty_grad)
def token_losses_backward(
    grad: Tensor, logits: Tensor, target: Tensor, sums: Tensor, ignore_index: int, smoothing: float
) -> Tensor:
    """Return the gradient of the logits, in their dtype."""
    result = _empty_grad(grad, logits, target, sums, ignore_index, smoothing)
    write_gradient(grad, logits, target, sums, ignore_index, smoothing, result)
    return result


def write_gradient(
    grad: Tensor, logits: Tensor, target: Tensor, sums: Tensor, ignore_index: int, smoothing: float, result: Tensor
) -> None:
    """Write the gradient of the logits into `result`, whose rows may lie apart; it may be the logits themselves."""
    rows, size = logits.shape
    if not has_triton(logits.device):
        found = (logits.float() - sums[:, None]).exp() - smoothing / size
        counted = target != ignore_index
        found[counted, target[counted]] -= 1 - smoothing
        result.copy_(found * torch.where(counted, grad, 0.0)[:, None])
        return
    from mezzo.kernels._cross_entropy_kernels import cross_entropy_backward_kernel

    logits = _with_plain_rows(logits)
    if rows:
        with on_device(logits.device):
            cross_entropy_backward_kernel[(rows,)](
                grad.contiguous(), logits, target.contiguous(), sums, result, logits.stride(0), result.stride(0), size,
                ignore_index, smoothing, PACKED=logits.stride(0) == result.stride(0), ALIGNMENT=_ALIGNMENT,
                BLOCK=_BLOCK, num_warps=_WARPS,
            )  # fmt: skip


def _with_plain_rows(logits: Tensor) -> Tensor:
    """Return the logits with elements of a row side by side; rows may lie apart."""
    return logits if logits.stride(1) == 1 else logits.contiguous()
