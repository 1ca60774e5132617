"""Cross-entropy of every pixel over few classes: no float32 copy of the logits.

torch casts half logits to float32, writes their log-softmax, and turns gradients from contiguous to
channels-last: 10 of the 34 ms of an eager PP-LiteSeg step (16 images of 512x1024, 19 classes, three
heads) on an H200, where these kernels took 4.6 ms. Here the forward reads the logits once, and the
backward reads and writes them once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from mezzo._torch.functorch import innermost_transform
from mezzo._torch.step_tier import has_triton
from mezzo.dtypes import HALF_DTYPES
from mezzo.kernels._launch import differentiable_gradients, on_device
from mezzo.kernels._registry import register
from mezzo.kernels._switch import uses_own_operators

_MOST_CLASSES = 256
_TILE = 4096
"""Logits that one program holds."""


def pixel_cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Return the cross-entropy of each pixel, in float32 (float64 for such logits); 0 where it is ignored.

    Args:
        logits: (n, classes, ...) of any floating dtype.
        labels: (n, ...), integers. A label that is neither a class nor `ignore_index` is an error
            of torch; for half logits on CUDA its loss and gradient are NaN.
        ignore_index: Label to ignore.
    """
    if logits.is_cuda and uses_own_operators() and _fits(logits, labels):
        losses: Tensor = pixel_loss(logits, labels, ignore_index)[0]
        return losses
    return _plain_losses(logits, labels, ignore_index)


def _plain_losses(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    logits = logits.float() if logits.dtype in HALF_DTYPES else logits
    return cross_entropy(logits, labels.long(), ignore_index=ignore_index, reduction="none")


def _fits(logits: Tensor, labels: Tensor) -> bool:
    """Whether `pixel_loss` takes the call: half logits of few classes in channels-last.

    Labels that do not fit the logits go to torch, which words the errors; so do calls inside of
    `torch.func`, which registered operators do not support.
    """
    if logits.dim() != 4 or logits.dtype not in HALF_DTYPES or labels.device != logits.device:
        return False
    if labels.dim() != 3 or (logits.shape[0], *logits.shape[2:]) != tuple(labels.shape):
        return False
    if not torch.compiler.is_compiling() and innermost_transform() is not None:
        return False
    few = 1 < logits.shape[1] <= _MOST_CLASSES and logits.numel() > 0
    return few and not labels.is_floating_point() and logits.is_contiguous(memory_format=torch.channels_last)


def _fake_losses(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    losses = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
    return losses, torch.empty_like(losses)


def _fake_gradient(grad: Tensor, logits: Tensor, labels: Tensor, sums: Tensor, ignore_index: int) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.channels_last)


@register(fake=_fake_gradient)
def pixel_loss_gradient(grad: Tensor, logits: Tensor, labels: Tensor, sums: Tensor, ignore_index: int) -> Tensor:
    """Return the gradient of the logits of `pixel_loss`."""
    if not has_triton(logits.device):
        counts = labels != ignore_index
        is_class = one_hot(torch.where(counts, labels, 0).long(), logits.shape[1]).movedim(-1, 1)
        share = (logits.float() - sums.unsqueeze(1)).exp() - is_class
        return (share * (grad * counts).unsqueeze(1)).to(dtype=logits.dtype, memory_format=torch.channels_last)
    from mezzo.kernels._pixel_loss_kernels import pixel_loss_gradient_kernel

    logits = logits.contiguous(memory_format=torch.channels_last)
    result = _fake_gradient(grad, logits, labels, sums, ignore_index)
    rows, options = _tiles(logits)
    pixels = labels.numel()
    with on_device(logits.device):
        pixel_loss_gradient_kernel[-(-pixels // rows),](
            grad.contiguous(), logits, labels.contiguous(), sums, result, pixels, ignore_index, **options
        )
    return result


def _tiles(logits: Tensor) -> tuple[int, dict[str, int]]:
    classes = logits.shape[1]
    columns = max(2, 1 << (classes - 1).bit_length())
    rows = max(1, _TILE // columns)
    return rows, {"CLASSES": classes, "COLUMNS": columns, "ROWS": rows, "num_warps": 4}


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.ignore_index = inputs[2]


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, None, None]:
    if grad is None:
        return None, None, None
    logits, labels, sums = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph
        (found,) = differentiable_gradients(
            lambda given: _plain_losses(given, labels, ctx.ignore_index), (logits,), grad
        )
        return found, None, None
    return pixel_loss_gradient(grad, logits, labels, sums, ctx.ignore_index), None, None


@register(fake=_fake_losses, setup_context=_keep, backward=_backward)
def pixel_loss(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return loss and log-sum-exp of each pixel, in float32; half logits in channels-last."""
    if not has_triton(logits.device):
        return _plain_losses(logits, labels, ignore_index), logits.float().logsumexp(1)
    from mezzo.kernels._pixel_loss_kernels import pixel_loss_kernel

    logits = logits.contiguous(memory_format=torch.channels_last)
    losses, sums = _fake_losses(logits, labels, ignore_index)
    rows, options = _tiles(logits)
    pixels = labels.numel()
    with on_device(logits.device):
        pixel_loss_kernel[-(-pixels // rows),](
            logits, labels.contiguous(), losses, sums, pixels, ignore_index, **options
        )  # fmt: skip
    return losses, sums
