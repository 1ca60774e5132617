"""Depthwise convolutions in a captured graph: the gradient of their input by a kernel of ours.

cuDNN's kernel for it (channels-last, half, 3x3 or any stride above one) takes five to twelve times the time that its bytes
need, ours two to four (MobileNetV3-small's five such layers on an H200, batch 256: 660 and 297 us together).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from mezzo.optim import uses_triton

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_BLOCK = 1024
_MOST = 2**31 - 1


def depthwise_input_grad(
    grad: Tensor, weight: Tensor, height: int, width: int, stride: list[int], padding: list[int]
) -> Tensor:
    """Return the gradient of the input of `conv2d(x, weight, stride=, padding=, groups=channels)`, in channels-last."""
    from mezzo.static._depthwise_kernels import input_grad_kernel

    count, channels, out_height, out_width = grad.shape
    grad = grad.contiguous(memory_format=torch.channels_last)
    result = _like_input(grad, weight, height, width, stride, padding)
    total = count * -(-height // stride[0]) * -(-width // stride[1]) * channels
    taps = weight.reshape(channels, -1).t().contiguous()
    input_grad_kernel[-(-total // _BLOCK), stride[0] * stride[1]](
        grad, taps, result, total,
        CHANNELS=channels, HEIGHT=height, WIDTH=width, OUT_HEIGHT=out_height, OUT_WIDTH=out_width,
        KERNEL_H=weight.shape[2], KERNEL_W=weight.shape[3], STRIDE_H=stride[0], STRIDE_W=stride[1],
        PAD_H=padding[0], PAD_W=padding[1], BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return result


def _like_input(grad: Tensor, weight: Tensor, height: int, width: int, stride: list[int], padding: list[int]) -> Tensor:
    shape = (grad.shape[0], grad.shape[1], height, width)
    return torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)


@functools.cache
def depthwise_operator() -> Any:
    """Return the operator of graphs; it must be there before code from a cache on disk, which may call it, is run."""
    operator = torch.library.custom_op("mezzo::depthwise_input_grad", depthwise_input_grad, mutates_args=())
    operator.register_fake(_like_input)
    return torch.ops.mezzo.depthwise_input_grad.default


def use_own_depthwise_gradients(graph: Graph) -> int:
    """Compute the input's gradient of depthwise convolutions by our kernel, in a joint graph.

    Returns:
        How many there were.
    """
    found = [node for node in graph.nodes if node.target is _aten.convolution_backward.default and _is_ours(node)]
    for node in found:
        grad, x, weight, _, stride, padding = node.args[:6]
        first = next(user for user in node.users if user.args[1] == 0)
        with graph.inserting_before(first):
            height, width = x.meta["val"].shape[2:]
            own = graph.call_function(depthwise_operator(), (grad, weight, height, width, list(stride), list(padding)))
        own.meta = dict(first.meta)
        first.replace_all_uses_with(own)
        graph.erase_node(first)
        _, with_weight, with_bias = node.args[10]
        node.args = (*node.args[:10], [False, with_weight, with_bias])
        values = node.meta.get("val")
        if values is not None:
            node.meta["val"] = (None, *values[1:])
        if not node.users:
            graph.erase_node(node)
    return len(found)


def _is_ours(node: Node) -> bool:
    """Whether a backward is that of a plain depthwise convolution whose input's gradient cuDNN is slow at."""
    arguments: tuple[Any, ...] = node.args[:11]
    grad, x, weight, _, stride, _, dilation, transposed, _, groups, wanted = arguments
    values: list[Any] = [argument.meta.get("val") for argument in (grad, x, weight) if isinstance(argument, Node)]
    if len(values) != 3 or not all(isinstance(value, Tensor) for value in values):
        return False
    grad_value, x_value, weight_value = values
    if not all(isinstance(size, int) for value in values for size in value.shape):
        return False  # a size that is left free
    if x_value.dim() != 4 or x_value.dtype not in _HALF or not wanted[0] or transposed:
        return False
    depthwise = groups == x_value.shape[1] == weight_value.shape[0] and weight_value.shape[1] == 1
    plain = all(step == 1 for step in dilation) and any(user.args[1] == 0 for user in node.users)
    in_rows = all(value.is_contiguous(memory_format=torch.channels_last) for value in (grad_value, x_value))
    addressable = max(value.numel() for value in (grad_value, x_value)) + _BLOCK <= _MOST  # the kernel counts in int32
    slow = max(stride) > 1 or max(weight_value.shape[2:]) < 5
    return depthwise and plain and in_rows and addressable and slow and uses_triton(x_value.device)
