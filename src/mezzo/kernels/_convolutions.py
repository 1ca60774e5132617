"""Convolutions and their gradients for which cuDNN is slow, on CUDA in channels-last.

Graph mode puts them into captured graphs (static/_convolutions.py). On an H200, half:

* the input gradient of depthwise layers (the five of MobileNetV3-small, batch 256: cuDNN 660 us,
  mezzo 297 us), and the weight gradient of a first layer on images of three channels (328 us and 108 us);
* depthwise layers with dilation, forward and backward (64x2048x64x64, 3x3: cuDNN 22 ms forward, mezzo
  1.1 ms).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mezzo.kernels._launch import on_device
from mezzo.kernels._registry import register
from mezzo.kernels._tiles import STAGES, add_up, column_tile, in_rows, share_rows

BLOCK = 1024
"""Elements written per program of the depthwise kernels."""
_WIDEST = 512
"""Channels of a tile of the gradient of a depthwise weight: on an H200 up to a fifth faster than 256."""
_SLICES = 1056
"""Programs that share the pixels of a narrow layer: eight per multiprocessor of an H200."""
_PIXELS = 64
"""Pixels that one of them processes at a time."""


def _taps(weight: Tensor) -> Tensor:
    """Return a depthwise weight as (taps, channels)."""
    return weight.reshape(weight.shape[0], -1).t().contiguous()


def _sizes(x: Tensor, result: Tensor, kernel: Sequence[int]) -> dict[str, int]:
    """Return what the kernels are compiled for: sizes of input, of the forward's result, and of the weight."""
    return {
        "CHANNELS": x.shape[1], "HEIGHT": x.shape[2], "WIDTH": x.shape[3], "OUT_HEIGHT": result.shape[2],
        "OUT_WIDTH": result.shape[3], "KERNEL_H": kernel[0], "KERNEL_W": kernel[1],
    }  # fmt: skip


def _steps(stride: list[int], padding: list[int], dilation: list[int]) -> dict[str, int]:
    return {
        "STRIDE_H": stride[0], "STRIDE_W": stride[1], "PAD_H": padding[0], "PAD_W": padding[1],
        "DILATION_H": dilation[0], "DILATION_W": dilation[1],
    }  # fmt: skip


def _like_result(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    height, width = (
        (size + 2 * pad - step * (taps - 1) - 1) // jump + 1
        for size, taps, jump, pad, step in zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    )
    shape = (x.shape[0], x.shape[1], height, width)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


@register(fake=_like_result)
def depthwise_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """Return a depthwise `conv2d`, in channels-last."""
    from mezzo.kernels._convolution_kernels import depthwise_conv_kernel

    x, result = in_rows(x), _like_result(x, weight, bias, stride, padding, dilation)
    total = result.numel()
    if not total:
        return result
    with on_device(x.device):
        depthwise_conv_kernel[-(-total // BLOCK),](
            x, _taps(weight), bias, result, total, HAS_BIAS=bias is not None, BLOCK=BLOCK, num_warps=4,
            **_sizes(x, result, weight.shape[2:]), **_steps(stride, padding, dilation),
        )  # fmt: skip
    return result


def _like_input(
    grad: Tensor, weight: Tensor, height: int, width: int, stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    shape = (grad.shape[0], grad.shape[1], height, width)
    return torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)


@register(fake=_like_input)
def depthwise_input_grad(
    grad: Tensor, weight: Tensor, height: int, width: int, stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """Return the input gradient of a depthwise `conv2d`, in channels-last."""
    from mezzo.kernels._convolution_kernels import depthwise_input_grad_kernel

    grad, result = in_rows(grad), _like_input(grad, weight, height, width, stride, padding, dilation)
    count, channels = grad.shape[:2]
    total = count * -(-height // stride[0]) * -(-width // stride[1]) * channels
    with on_device(grad.device):
        depthwise_input_grad_kernel[-(-total // BLOCK), stride[0] * stride[1]](
            grad, _taps(weight), result, total, BLOCK=BLOCK, num_warps=4,
            **_sizes(result, grad, weight.shape[2:]), **_steps(stride, padding, dilation),
        )  # fmt: skip
    return result


def _like_depthwise_weight(
    grad: Tensor, x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    return grad.new_empty((*kernel, x.shape[1])).permute(2, 0, 1)[:, None]


@register(fake=_like_depthwise_weight)
def depthwise_weight_grad(
    grad: Tensor, x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """Return the weight gradient of a depthwise `conv2d`, in channels-last."""
    from mezzo.kernels._convolution_kernels import depthwise_weight_grad_kernel

    grad, x = in_rows(grad), in_rows(x)
    result = _like_depthwise_weight(grad, x, kernel, stride, padding, dilation)
    channels, taps = x.shape[1], kernel[0] * kernel[1]
    pixels = grad.numel() // channels
    if not pixels:
        return result.zero_()
    tile = column_tile(channels, _WIDEST)
    columns = tile["COLUMNS"]
    programs, steps = share_rows(pixels, taps * columns, tile["ROWS"], x.device)
    parts = x.new_empty((1, programs, taps * channels), dtype=torch.float32)
    with on_device(x.device):
        depthwise_weight_grad_kernel[taps * columns, programs](
            grad, x, parts, pixels, STEPS=steps, STAGES=STAGES, **tile,
            **_sizes(x, grad, kernel), **_steps(stride, padding, dilation),
        )  # fmt: skip
        add_up(parts, result)
    return result


def _like_weight(grad: Tensor, x: Tensor, kernel: list[int], stride: list[int], padding: list[int]) -> Tensor:
    return grad.new_empty((grad.shape[1], *kernel, x.shape[1])).permute(0, 3, 1, 2)


@register(fake=_like_weight)
def narrow_weight_grad(grad: Tensor, x: Tensor, kernel: list[int], stride: list[int], padding: list[int]) -> Tensor:
    """Return the weight gradient of `conv2d` over few channels, in channels-last."""
    from mezzo.kernels._convolution_kernels import narrow_weight_grad_kernel

    grad, x = in_rows(grad), in_rows(x)
    _, out_channels, out_height, out_width = grad.shape
    _, channels, height, width = x.shape
    taps = kernel[0] * kernel[1] * channels
    pixels = grad.numel() // out_channels
    share = max(1, -(-pixels // (_SLICES * _PIXELS))) * _PIXELS
    slices = max(1, -(-pixels // share))
    rows, columns = (max(16, 1 << (size - 1).bit_length()) for size in (out_channels, taps))  # tl.dot needs at least 16
    sums = torch.empty(slices, rows, columns, device=x.device)
    with on_device(x.device):
        narrow_weight_grad_kernel[slices,](
            grad, x, sums, pixels,
            CHANNELS=channels, HEIGHT=height, WIDTH=width, OUT_CHANNELS=out_channels, OUT_HEIGHT=out_height,
            OUT_WIDTH=out_width,
            KERNEL_H=kernel[0], KERNEL_W=kernel[1], STRIDE_H=stride[0], STRIDE_W=stride[1],
            PAD_H=padding[0], PAD_W=padding[1],
            ROWS=rows, TAPS=columns, SHARE=share, PIXELS=_PIXELS, num_warps=4,
        )  # fmt: skip
    total = sums.sum(0)[:out_channels, :taps]
    return total.to(grad.dtype).reshape(out_channels, *kernel, channels).permute(0, 3, 1, 2)
