"""Bilinear enlargement, float32 inside, whose gradient has no atomics.

torch's backward on CUDA adds the gradient of each result to four inputs by atomic operations: when
logits are enlarged eight times, about a hundred results compete for one input. Inductor generates
the same: 47 of the 62 ms of a compiled PP-LiteSeg step (16 images of 512x1024) on an H200. Resizing is
separable, so the gradient is two sums, along the rows and then along the columns.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mezzo._torch.step_tier import has_triton
from mezzo.dtypes import HALF_DTYPES
from mezzo.kernels._launch import on_device
from mezzo.kernels._registry import register

_BLOCK = 1024
_aten = torch.ops.aten


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF_DTYPES else x


def _dense(x: Tensor) -> torch.memory_format:
    """Return the layout of the result: channels-last if the input is that and nothing else."""
    is_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if is_last else torch.contiguous_format


def _fake_resized(x: Tensor, height: int, width: int) -> Tensor:
    shape = (x.shape[0], x.shape[1], height, width)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_dense(x))


@register(fake=_fake_resized)
def enlarge_gradient(grad: Tensor, height: int, width: int) -> Tensor:
    """Return the gradient of the input of `enlarge_bilinear` from that of its result.

    Args:
        grad: (n, channels, height and width of the result).
        height: Of the input.
        width: Of the input.
    """
    layout = _dense(grad)
    grad = grad.contiguous(memory_format=layout)
    count, channels, out_height, out_width = grad.shape
    if not _has_kernels(grad):
        size = [count, channels, height, width]
        result: Tensor = _aten.upsample_bilinear2d_backward(_widened(grad), [out_height, out_width], size, False)
        return result.to(dtype=grad.dtype, memory_format=layout)
    is_last = layout is torch.channels_last
    planes, inner = (count, channels) if is_last else (count * channels, 1)
    rows = grad.new_empty((planes, height, out_width * inner), dtype=torch.float32)
    result = _fake_resized(grad, height, width)
    with on_device(grad.device):
        _gather(grad, rows, planes, height, out_height, out_width * inner)
        _gather(rows, result, planes * height, width, out_width, inner)
    return result


def _gather(grad: Tensor, result: Tensor, outer: int, size: int, out_size: int, inner: int) -> None:
    """Write the gradient along one axis; `grad` is (outer, out_size, inner) in memory."""
    from mezzo.kernels._enlarge_kernels import gather_axis_kernel

    total = outer * size * inner
    taps = math.ceil(2 * out_size / size) + 3
    gather_axis_kernel[-(-total // _BLOCK),](
        grad, result, total, size / out_size, out_size / size,
        SIZE=size, OUT_SIZE=out_size, INNER=inner, TAPS=taps, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


def _keep_size(ctx: Any, inputs: tuple[Tensor, int, int], output: Tensor) -> None:
    ctx.size = inputs[0].shape[-2:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return enlarge_gradient(grad, *ctx.size), None, None


@register(fake=_fake_resized, setup_context=_keep_size, backward=_backward)
def enlarge_bilinear(x: Tensor, height: int, width: int) -> Tensor:
    """Return `x` (n, channels, h, w) at another height and width: bilinear, half-pixel centres.

    The result has the dtype and layout (contiguous or channels-last) of `x`; sums are float32. It is
    right for any size, and faster than torch where the image grows.
    """
    layout = _dense(x)
    x = x.contiguous(memory_format=layout)
    count, channels, old_height, old_width = x.shape
    if not _has_kernels(x):
        result: Tensor = _aten.upsample_bilinear2d(_widened(x), [height, width], False)
        return result.to(dtype=x.dtype, memory_format=layout, copy=True)
    from mezzo.kernels._enlarge_kernels import enlarge_kernel

    planes, inner = (count, channels) if layout is torch.channels_last else (count * channels, 1)
    result = _fake_resized(x, height, width)
    with on_device(x.device):
        enlarge_kernel[planes * height, -(-width * inner // _BLOCK)](
            x, result, old_height / height, old_width / width,
            CHANNELS=inner, HEIGHT=old_height, WIDTH=old_width, OUT_HEIGHT=height, OUT_WIDTH=width,
            BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return result


enlarge_gradient.register_autograd(  # linear: the gradient of the gradient is the enlargement
    lambda ctx, grad: (enlarge_bilinear(grad, *ctx.size), None, None), setup_context=_keep_size
)


def _has_kernels(x: Tensor) -> bool:
    """Whether the Triton kernels take a tensor; float64 and huge planes go to torch."""
    fits = x.dtype in (torch.float32, torch.float16, torch.bfloat16) and x.numel() > 0
    return fits and x[0].numel() < 2**31 and has_triton(x.device)
