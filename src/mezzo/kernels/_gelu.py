"""GELU as one operator: half in and out, float32 inside.

Its backward also adds up the rows of its result: that is the gradient of the bias of the layer before,
which otherwise reads the result once more. Graph mode puts it into captured graphs
(`static/_activations.py`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mezzo._torch.modes import no_torch_function
from mezzo._torch.step_tier import has_triton
from mezzo.kernels._launch import differentiable_gradients, on_device
from mezzo.kernels._registry import register
from mezzo.kernels._tiles import STAGES, add_up, column_tile, share_rows

LEAST_COLUMNS = 32
"""Shortest rows for which the kernels are made."""
_BLOCK = 2048


def fused_gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return GELU in the dtype of `x`, which has rows of at least `LEAST_COLUMNS` elements.

    `approximate` is `none` or `tanh`, as in `torch.nn.functional.gelu`.
    """
    result: Tensor = gelu(x, approximate)
    return result


def _plain(x: Tensor, approximate: str) -> Tensor:
    return F.gelu(x.float(), approximate=approximate).to(x.dtype)


def _forward(x: Tensor, approximate: str) -> Tensor:
    from mezzo.kernels._gelu_kernels import gelu_kernel

    x = x.contiguous()
    result = torch.empty_like(x)
    if x.numel():
        with on_device(x.device):
            gelu_kernel[(-(-x.numel() // _BLOCK),)](
                x, result, x.numel(), TANH=approximate == "tanh", BLOCK=_BLOCK, num_warps=4
            )
    return result


def _backward(grad: Tensor, x: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    from mezzo.kernels._gelu_kernels import gelu_backward_kernel

    grad, x, size = grad.contiguous(), x.contiguous(), x.shape[-1]
    grad_x, sums = torch.empty_like(x), x.new_empty(size)
    if not x.numel():
        return grad_x, sums.zero_()
    tile, rows = column_tile(size), x.numel() // size
    columns = tile["COLUMNS"]
    programs, steps = share_rows(rows, columns, tile["ROWS"], x.device)
    parts = x.new_empty((programs, size), dtype=torch.float32)
    with on_device(x.device):
        gelu_backward_kernel[(programs * columns,)](
            grad, x, grad_x, parts, rows, TANH=approximate == "tanh", STEPS=steps, STAGES=STAGES, SIZE=size, **tile
        )
        add_up(parts[None], sums)
    return grad_x, sums


def _plain_backward(grad: Tensor, x: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """Return what `_backward` returns, by torch in float32."""
    grad_x = torch.ops.aten.gelu_backward(grad.float(), x.float(), approximate=approximate).contiguous()
    return grad_x.to(x.dtype), grad_x.reshape(-1, x.shape[-1]).sum(0).to(x.dtype)


def _empty(x: Tensor, approximate: str) -> Tensor:
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.approximate = inputs
    ctx.save_for_backward(x)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
    (x,) = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph
        return differentiable_gradients(partial(_plain, approximate=ctx.approximate), (x,), grad)[0], None
    with no_torch_function():  # recorded as a gradient, not as a call of the user
        return gelu_backward(grad, x, ctx.approximate)[0], None


@register(fake=_empty, setup_context=_keep, backward=_differentiate)
def gelu(x: Tensor, approximate: str) -> Tensor:
    """Return GELU, contiguous."""
    forward = _forward if has_triton(x.device) else _plain
    return forward(x, approximate).contiguous()


def _empty_gradients(grad: Tensor, x: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[-1])


@register(fake=_empty_gradients)
def gelu_backward(grad: Tensor, x: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """Return the gradient of the input, and the sum of its rows."""
    backward = _backward if has_triton(x.device) else _plain_backward
    return backward(grad, x, approximate)
