"""Convolutions in a captured graph: mezzo's own kernels for two gradients for which cuDNN is slow.

On an H200, channels-last, half: the input gradient of depthwise layers (the five of
MobileNetV3-small, batch 256: cuDNN 660 us, mezzo 297 us), and the weight gradient of a first layer
on images of three channels (328 us and 108 us).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from mezzo.dtypes import HALF_DTYPES
from mezzo.optim import uses_triton

_aten = torch.ops.aten
_MOST = 2**31 - 1

_BLOCK = 1024
"""Elements written per program of the depthwise kernel."""
_SLICES = 1056
"""Programs that share the pixels of a narrow layer: eight per multiprocessor of an H200."""
_PIXELS = 64
"""Pixels that one of them processes at a time."""
_MOST_TAPS = 64
_MOST_OUT_CHANNELS = 128


def depthwise_input_grad(
    grad: Tensor, weight: Tensor, height: int, width: int, stride: list[int], padding: list[int]
) -> Tensor:
    """Return the input gradient of a depthwise `conv2d`, in channels-last."""
    from mezzo.static._convolution_kernels import depthwise_input_grad_kernel

    count, channels, out_height, out_width = grad.shape
    grad = grad.contiguous(memory_format=torch.channels_last)
    result = _like_input(grad, weight, height, width, stride, padding)
    total = count * -(-height // stride[0]) * -(-width // stride[1]) * channels
    taps = weight.reshape(channels, -1).t().contiguous()
    depthwise_input_grad_kernel[-(-total // _BLOCK), stride[0] * stride[1]](
        grad, taps, result, total,
        CHANNELS=channels, HEIGHT=height, WIDTH=width, OUT_HEIGHT=out_height, OUT_WIDTH=out_width,
        KERNEL_H=weight.shape[2], KERNEL_W=weight.shape[3], STRIDE_H=stride[0], STRIDE_W=stride[1],
        PAD_H=padding[0], PAD_W=padding[1], BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return result


def _like_input(grad: Tensor, weight: Tensor, height: int, width: int, stride: list[int], padding: list[int]) -> Tensor:
    shape = (grad.shape[0], grad.shape[1], height, width)
    return torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)


def narrow_weight_grad(grad: Tensor, x: Tensor, kernel: list[int], stride: list[int], padding: list[int]) -> Tensor:
    """Return the weight gradient of `conv2d` over few channels, in channels-last."""
    from mezzo.static._convolution_kernels import narrow_weight_grad_kernel

    grad, x = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (grad, x))
    _, out_channels, out_height, out_width = grad.shape
    _, channels, height, width = x.shape
    taps = kernel[0] * kernel[1] * channels
    pixels = grad.numel() // out_channels
    share = max(1, -(-pixels // (_SLICES * _PIXELS))) * _PIXELS
    slices = max(1, -(-pixels // share))
    rows, columns = (max(16, 1 << (size - 1).bit_length()) for size in (out_channels, taps))  # tl.dot needs at least 16
    sums = torch.empty(slices, rows, columns, device=x.device)
    narrow_weight_grad_kernel[slices,](
        grad, x, sums, pixels,
        CHANNELS=channels, HEIGHT=height, WIDTH=width, OUT_CHANNELS=out_channels, OUT_HEIGHT=out_height, OUT_WIDTH=out_width,
        KERNEL_H=kernel[0], KERNEL_W=kernel[1], STRIDE_H=stride[0], STRIDE_W=stride[1], PAD_H=padding[0], PAD_W=padding[1],
        ROWS=rows, TAPS=columns, SHARE=share, PIXELS=_PIXELS, num_warps=4,
    )  # fmt: skip
    total = sums.sum(0)[:out_channels, :taps]
    return total.to(grad.dtype).reshape(out_channels, *kernel, channels).permute(0, 3, 1, 2)


def _like_weight(grad: Tensor, x: Tensor, kernel: list[int], stride: list[int], padding: list[int]) -> Tensor:
    return grad.new_empty((grad.shape[1], *kernel, x.shape[1])).permute(0, 3, 1, 2)


@functools.cache
def register_operators() -> None:
    """Register the operators.

    Compiled code from a cache on disk may call them, so register before it runs.
    """
    for function, fake in ((depthwise_input_grad, _like_input), (narrow_weight_grad, _like_weight)):
        torch.library.custom_op(f"mezzo::{function.__name__}", function, mutates_args=()).register_fake(fake)


def use_own_gradients(graph: Graph) -> int:
    """Replace convolution gradients in a joint graph by mezzo's kernels where cuDNN is slow.

    Returns:
        How many gradients were replaced.
    """
    register_operators()
    found = 0
    for node in list(graph.nodes):
        if node.target is not _aten.convolution_backward.default or not _is_plain(node):
            continue
        arguments: Any = node.args[:6]
        grad, x, weight, _, stride, padding = arguments
        sizes = [list(tensor.meta["val"].shape[2:]) for tensor in (x, weight)]
        if _is_slow_depthwise(node):
            operator = torch.ops.mezzo.depthwise_input_grad.default
            _replace(graph, node, 0, operator, (grad, weight, *sizes[0], list(stride), list(padding)))
            found += 1
        if _is_narrow(node):
            operator = torch.ops.mezzo.narrow_weight_grad.default
            _replace(graph, node, 1, operator, (grad, x, sizes[1], list(stride), list(padding)))
            found += 1
        if not node.users:
            graph.erase_node(node)
    return found


def _replace(graph: Graph, node: Node, output: int, operator: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Compute one of the three gradients with an operator of mezzo instead of the node."""
    user = next(user for user in node.users if user.args[1] == output)
    with graph.inserting_before(user):
        own = graph.call_function(operator, arguments)
    own.meta = dict(user.meta)
    user.replace_all_uses_with(own)
    graph.erase_node(user)
    wanted: Any = node.args[10]
    node.args = (*node.args[:10], [asked and place != output for place, asked in enumerate(wanted)])
    values = node.meta.get("val")
    if values is not None:
        node.meta["val"] = tuple(None if place == output else value for place, value in enumerate(values))


def _values(node: Node) -> list[Any]:
    """Return the fake tensors of gradient, input and weight of a convolution's backward."""
    return [argument.meta.get("val") for argument in node.args[:3] if isinstance(argument, Node)]


def _is_plain(node: Node) -> bool:
    """Whether it is the backward of a 2d half convolution in channels-last with known sizes."""
    values = _values(node)
    if len(values) != 3 or not all(isinstance(value, Tensor) for value in values):
        return False
    grad, x, _ = values
    if not all(isinstance(size, int) for value in values for size in value.shape):
        return False  # a dynamic size
    arguments: Any = node.args
    dilation, transposed = arguments[6:8]
    if x.dim() != 4 or x.dtype not in HALF_DTYPES or transposed or any(step != 1 for step in dilation):
        return False
    in_rows = all(value.is_contiguous(memory_format=torch.channels_last) for value in (grad, x))
    addressable = max(value.numel() for value in (grad, x)) + _BLOCK <= _MOST  # the kernels count in int32
    return in_rows and addressable and uses_triton(x.device)


def _is_slow_depthwise(node: Node) -> bool:
    """Whether the graph needs a depthwise input gradient for which cuDNN is slow.

    cuDNN is fast for 5x5 with stride 1.
    """
    _, x, weight = _values(node)
    arguments: Any = node.args
    stride, groups = arguments[4], arguments[9]
    depthwise = groups == x.shape[1] == weight.shape[0] and weight.shape[1] == 1
    return bool(depthwise) and (max(stride) > 1 or max(weight.shape[2:]) < 5) and _is_used(node, 0)


def _is_narrow(node: Node) -> bool:
    """Whether the graph needs the weight gradient of a convolution with few channels and taps."""
    _, _, weight = _values(node)
    taps = weight.shape[1] * weight.shape[2] * weight.shape[3]
    small = weight.shape[1] <= 4 and taps <= _MOST_TAPS and weight.shape[0] <= _MOST_OUT_CHANNELS
    return bool(node.args[9] == 1 and small) and _is_used(node, 1)


def _is_used(node: Node, output: int) -> bool:
    wanted: Any = node.args[10]
    return bool(wanted[output]) and any(user.args[1] == output for user in node.users)
