"""The last layer of a language model and its cross entropy in one operator, in chunks of rows.

All logits of a large vocabulary take more memory than the rest of a small model: 16384 tokens of
128256 words are 4.2 GB in half, and as much again for their gradient. Here the logits of a few
thousand rows exist at a time. Each chunk becomes its losses and the gradients of input and weight
at once, so the backward pass multiplies by one number.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mezzo.dtypes import HALF_DTYPES
from mezzo.errors import unknown_choice
from mezzo.kernels._cross_entropy import row_losses, write_gradient
from mezzo.kernels._launch import differentiable_gradients
from mezzo.kernels._registry import register

CHUNK_ROWS = 4096
"""Rows of a chunk, unless the caller chooses. Each chunk reads and writes the float32 gradient of the
weight once: with 4096 rows that is 5 % of the time of the chunk's products on an H200."""
LEAST_LOGITS, MOST_LOGITS = 2**26, 2**29
"""A chunk has more or fewer rows if its logits would take less than 128 MiB or more than 1 GiB in half."""
ROW_MULTIPLE = 128
"""Rows of a chunk are a multiple of it, the tile of a matrix product."""
ALIGNMENT = 8
"""Half logits of a row begin at multiples of 16 bytes: otherwise cuBLAS falls back to old, slow kernels."""
LEAST_ALIGNED = 1024
"""Fewest classes for which the weight is padded."""
_REDUCTIONS = ("mean", "sum")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    chunk_rows: int | None = None,
) -> Tensor:
    """Return the cross entropy of `hidden @ weight.T` in float32; all logits never exist at the same time.

    Logits are in the dtype of the inputs (under autocast in its dtype), as those of a linear layer.
    Losses, and the sum of the weight's gradient over rows, are float32. On a GPU a target that is
    neither a class nor `ignore_index` makes the loss NaN. If no target counts, the mean is NaN, as
    torch's, and the gradients are zero.

    Args:
        hidden: (..., inputs), the input of the last layer.
        weight: (classes, inputs), that layer's weight.
        target: (...), int64 classes.
        reduction: `mean` over the counted targets, or `sum`.
        ignore_index: The target of rows that do not count.
        label_smoothing: From 0 to 1.
        chunk_rows: Rows whose logits exist at a time; None: 4096, or such that they take 128 MiB to 1 GiB in half.

    Raises:
        ValueError: The shapes do not fit, or an option is wrong.

    >>> hidden, weight = torch.randn(6, 4), torch.randn(10, 4)
    >>> loss = linear_cross_entropy(hidden, weight, torch.arange(6), chunk_rows=2)
    >>> torch.allclose(loss, F.cross_entropy(hidden @ weight.t(), torch.arange(6)))
    True
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(unknown_choice("reduction", reduction, _REDUCTIONS))
    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:] or hidden.shape[:-1] != target.shape:
        raise ValueError(
            f"linear_cross_entropy: hidden {list(hidden.shape)}, weight {list(weight.shape)} and target "
            f"{list(target.shape)} do not fit; they must be [..., inputs], [classes, inputs] and [...]"
        )
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"linear_cross_entropy: chunk_rows={chunk_rows}: must be at least 1")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"linear_cross_entropy: label_smoothing={label_smoothing}: must be from 0 to 1")
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        half = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(half), weight.to(half)
    rows, target = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    wants = torch.is_grad_enabled()
    total: Tensor = chunked_token_loss(
        rows,
        weight,
        target,
        ignore_index,
        label_smoothing,
        chunk_rows or _rows_of_chunk(weight.shape[0]),
        wants and hidden.requires_grad,
        wants and weight.requires_grad,
    )[0]
    if reduction == "sum":
        return total
    count = (target != ignore_index).sum()
    # Not total / count: its gradient would be infinite without a counted target, and infinity times 0 is NaN.
    return torch.where(count > 0, total / count.clamp(min=1), float("nan"))


def _rows_of_chunk(classes: int) -> int:
    """Return the default number of rows.

    >>> _rows_of_chunk(32000), _rows_of_chunk(2**20), _rows_of_chunk(256)
    (4096, 512, 262144)
    """
    classes = max(classes, 1)
    rows = min(max(CHUNK_ROWS, LEAST_LOGITS // classes), MOST_LOGITS // classes)
    return max(1, rows // ROW_MULTIPLE) * ROW_MULTIPLE


def _plain_total(hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: int, smoothing: float) -> Tensor:
    logits = (hidden @ weight.t()).float()
    return F.cross_entropy(logits, target, reduction="sum", ignore_index=ignore_index, label_smoothing=smoothing)


def _empty_total(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    ignore_index: int,
    smoothing: float,
    chunk_rows: int,
    for_hidden: bool,
    for_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    # The gradient of a sum over rows may be too large for float16; bfloat16 is as wide as float32.
    is_rounded_once = chunk_rows >= len(hidden) and weight.dtype == torch.bfloat16
    return (
        hidden.new_empty((), dtype=torch.float32),
        hidden.new_empty(hidden.shape if for_hidden else (0,)),
        weight.new_empty(
            weight.shape if for_weight else (0,), dtype=weight.dtype if is_rounded_once else torch.float32
        ),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, target, ctx.ignore_index, ctx.smoothing, _, ctx.for_hidden, ctx.for_weight = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, target, *output[1:])


def _differentiate(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 8
    hidden, weight, target, of_hidden, of_weight = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph
        found = differentiable_gradients(
            lambda rows, matrix: _plain_total(rows, matrix, target, ctx.ignore_index, ctx.smoothing),
            (hidden, weight),
            grad,
        )
        return *found, *(None,) * 6
    return (
        _scaled(of_hidden, grad, hidden.dtype) if ctx.for_hidden else None,
        _scaled(of_weight, grad, weight.dtype) if ctx.for_weight else None,
        *(None,) * 6,
    )


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a gradient times a number, rounded once."""
    if gradient.dtype != torch.float32:
        return (gradient.float() * factor).to(dtype)
    result = torch.empty(gradient.shape, dtype=dtype, device=gradient.device)
    return torch.mul(gradient, factor, out=result)  # without a second float32 matrix


@register(fake=_empty_total, setup_context=_keep, backward=_differentiate)
def chunked_token_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    ignore_index: int,
    smoothing: float,
    chunk_rows: int,
    for_hidden: bool,
    for_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of the losses, and its gradients by hidden (in its dtype) and weight.

    The gradient of the weight is float32 where chunks are added up, and half if there is one chunk.

    The gradients are of the sum, so they are neither too small for float16 nor divided by a number of
    tokens; gradients that are not asked for are empty.
    """
    total, of_hidden, of_weight = _empty_total(
        hidden, weight, target, ignore_index, smoothing, chunk_rows, for_hidden, for_weight
    )
    total.zero_()
    classes, matrix = len(weight), _aligned(weight)
    if for_weight and len(matrix) > classes:
        of_weight = of_weight.new_empty(matrix.shape)
    if for_weight and not len(hidden):
        of_weight.zero_()
    ones = torch.ones(min(chunk_rows, len(hidden)), dtype=torch.float32, device=hidden.device)
    for start in range(0, len(hidden), chunk_rows):
        chunk = slice(start, start + chunk_rows)
        rows, labels = hidden[chunk], target[chunk]
        padded = rows @ matrix.t()
        logits = padded[:, :classes]
        losses, sums = row_losses(logits, labels, ignore_index, smoothing)
        total += losses.sum()
        if for_hidden or for_weight:
            write_gradient(ones[: len(rows)], logits, labels, sums, ignore_index, smoothing, logits)
            padded[:, classes:].zero_()
        if for_hidden:
            torch.mm(padded, matrix, out=of_hidden[chunk])
        if for_weight:
            _add_product(of_weight, padded.t(), rows, is_first=start == 0)
        del logits, padded  # before those of the next chunk exist
    return total, of_hidden, of_weight[:classes]


def _aligned(weight: Tensor) -> Tensor:
    """Return a half weight with rows of zeros added, so that rows of logits are aligned; other weights as they are."""
    missing = -len(weight) % ALIGNMENT
    if weight.dtype not in HALF_DTYPES or len(weight) < LEAST_ALIGNED or not missing:
        return weight
    return F.pad(weight, (0, 0, 0, missing))


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, is_first: bool) -> None:
    """Add a product to a float32 matrix, or write it there; the sums stay in float32 if the device can do so."""
    if total.dtype == a.dtype and is_first:
        torch.mm(a, b, out=total)
        return
    if a.dtype == torch.float32 or not _sums_in_float32(a.device, a.dtype):
        product = (a.float() @ b.float()) if a.device.type == "cpu" else a @ b
        total.copy_(product) if is_first else total.add_(product)
        return
    torch.addmm(total, a, b, out_dtype=torch.float32, beta=0 if is_first else 1, out=total)


@functools.cache
def _sums_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device multiplies half matrices into a float32 one; a CPU does not (torch 2.15)."""
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    total = torch.full((16, 16), 0.5, dtype=torch.float32, device=device)
    try:
        torch.addmm(total, ones.t(), ones, out_dtype=torch.float32, beta=1, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 16.5).all())
