"""Two gradients of convolutions for which cuDNN is slow, on CUDA in channels-last.

On an H200, half: the input gradient of depthwise layers (the five of MobileNetV3-small, batch 256:
cuDNN 660 us, mezzo 297 us), and the weight gradient of a first layer on images of three channels
(328 us and 108 us). Graph mode puts them into captured graphs (static/_convolutions.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mezzo.kernels._launch import on_device
from mezzo.kernels._registry import register

BLOCK = 1024
"""Elements written per program of the depthwise kernel."""
_SLICES = 1056
"""Programs that share the pixels of a narrow layer: eight per multiprocessor of an H200."""
_PIXELS = 64
"""Pixels that one of them processes at a time."""


def _like_input(grad: Tensor, weight: Tensor, height: int, width: int, stride: list[int], padding: list[int]) -> Tensor:
    shape = (grad.shape[0], grad.shape[1], height, width)
    return torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)


@register(fake=_like_input)
def depthwise_input_grad(
    grad: Tensor, weight: Tensor, height: int, width: int, stride: list[int], padding: list[int]
) -> Tensor:
    """Return the input gradient of a depthwise `conv2d`, in channels-last."""
    from mezzo.kernels._convolution_kernels import depthwise_input_grad_kernel

    count, channels, out_height, out_width = grad.shape
    grad = grad.contiguous(memory_format=torch.channels_last)
    result = _like_input(grad, weight, height, width, stride, padding)
    total = count * -(-height // stride[0]) * -(-width // stride[1]) * channels
    taps = weight.reshape(channels, -1).t().contiguous()
    with on_device(grad.device):
        depthwise_input_grad_kernel[-(-total // BLOCK), stride[0] * stride[1]](
            grad, taps, result, total,
            CHANNELS=channels, HEIGHT=height, WIDTH=width, OUT_HEIGHT=out_height, OUT_WIDTH=out_width,
            KERNEL_H=weight.shape[2], KERNEL_W=weight.shape[3], STRIDE_H=stride[0], STRIDE_W=stride[1],
            PAD_H=padding[0], PAD_W=padding[1], BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return result


def _like_weight(grad: Tensor, x: Tensor, kernel: list[int], stride: list[int], padding: list[int]) -> Tensor:
    return grad.new_empty((grad.shape[1], *kernel, x.shape[1])).permute(0, 3, 1, 2)


@register(fake=_like_weight)
def narrow_weight_grad(grad: Tensor, x: Tensor, kernel: list[int], stride: list[int], padding: list[int]) -> Tensor:
    """Return the weight gradient of `conv2d` over few channels, in channels-last."""
    from mezzo.kernels._convolution_kernels import narrow_weight_grad_kernel

    grad, x = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (grad, x))
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
