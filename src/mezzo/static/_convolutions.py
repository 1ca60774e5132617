"""Convolutions in a captured graph: three gradients are computed in another way where cuDNN is slow.

Two use mezzo's operators. The input gradient of a depthwise layer with large kernels is a forward
convolution with mirrored kernels: for the 7x7 of ConvNeXt, cuDNN's own gradient takes twice the time of
its forward pass (4.80 and 2.33 ms per step of convnext_tiny, batch 128, on an H200).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from mezzo.dtypes import HALF_DTYPES
from mezzo.kernels import CONVOLUTION_BLOCK
from mezzo.optim import uses_triton

_aten = torch.ops.aten
_MOST = 2**31 - 1
_MOST_TAPS = 64
_MOST_OUT_CHANNELS = 128


def use_own_gradients(graph: Graph) -> int:
    """Replace convolution gradients in a joint graph where cuDNN is slow.

    Returns:
        How many gradients were replaced.
    """
    found = 0
    for node in list(graph.nodes):
        if node.target is not _aten.convolution_backward.default or not _is_plain(node):
            continue
        arguments: Any = node.args[:6]
        grad, x, weight = arguments[:3]
        stride, padding = _stride_and_padding(node)
        sizes = [list(tensor.meta["val"].shape[2:]) for tensor in (x, weight)]
        if _is_slow_depthwise(node):
            operator = torch.ops.mezzo.depthwise_input_grad.default
            _replace(graph, node, 0, operator, (grad, weight, *sizes[0], stride, padding))
            found += 1
        elif _is_large_depthwise(node):
            padding_of_gradient = [size - 1 - pad for size, pad in zip(sizes[1], padding, strict=True)]
            arguments = (padding_of_gradient, [1, 1], False, [0, 0], node.args[9])
            mirrored = _mirror(graph, node, weight)
            _replace(graph, node, 0, _aten.convolution.default, (grad, mirrored, None, [1, 1], *arguments))
            found += 1
        if _is_narrow(node):
            operator = torch.ops.mezzo.narrow_weight_grad.default
            _replace(graph, node, 1, operator, (grad, x, sizes[1], stride, padding))
            found += 1
        if not node.users:
            graph.erase_node(node)
    return found


def _mirror(graph: Graph, node: Node, weight: Node) -> Node:
    """Return a node with the kernels of a weight turned by 180 degrees."""
    with graph.inserting_before(node):
        # not aten.flip: Inductor has decomposed the graph already, and refuses it
        mirrored = graph.call_function(torch.ops.prims.rev.default, (weight, [2, 3]))
    mirrored.meta["val"] = weight.meta["val"].flip(2, 3)
    return mirrored


def _replace(graph: Graph, node: Node, output: int, operator: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Compute one of the three gradients with another operator instead of the node."""
    user = next(user for user in node.users if user.args[1] == output)
    with graph.inserting_before(user):
        own = graph.call_function(operator, arguments)
    own.meta = dict(user.meta)
    # Inductor keeps these strides. Without them it may choose others, and the operator would copy its inputs.
    values = tuple(value.meta["val"] if isinstance(value, Node) else value for value in arguments)
    own.meta["eager_input_vals"] = values, {}
    user.replace_all_uses_with(own)
    graph.erase_node(user)
    wanted: Any = node.args[10]
    node.args = (*node.args[:10], [asked and place != output for place, asked in enumerate(wanted)])
    gradients = node.meta.get("val")
    if gradients is not None:
        node.meta["val"] = tuple(None if place == output else value for place, value in enumerate(gradients))


def _stride_and_padding(node: Node) -> tuple[list[int], list[int]]:
    """Return both with a number per axis; a graph may have one for both axes, as for `padding="valid"`."""
    arguments: Any = node.args[4:6]
    stride, padding = ([*given, *given][:2] for given in arguments)
    return stride, padding


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
    addressable = max(value.numel() for value in (grad, x)) + CONVOLUTION_BLOCK <= _MOST  # the kernels count in int32
    return in_rows and addressable and uses_triton(x.device)


def _is_slow_depthwise(node: Node) -> bool:
    """Whether the graph needs a depthwise input gradient for which mezzo's kernel is faster than cuDNN.

    cuDNN is fast for 5x5 with stride 1.
    """
    arguments: Any = node.args
    return _needs_depthwise(node) and (max(arguments[4]) > 1 or max(_values(node)[2].shape[2:]) < 5)


def _is_large_depthwise(node: Node) -> bool:
    """Whether the graph needs the input gradient of a depthwise layer with stride 1 and more than 5x5 taps."""
    (stride, padding), kernel = _stride_and_padding(node), _values(node)[2].shape[2:]
    fits = all(pad < size for pad, size in zip(padding, kernel, strict=True))
    return _needs_depthwise(node) and max(stride) == 1 and max(kernel) > 5 and fits


def _needs_depthwise(node: Node) -> bool:
    """Whether the graph needs the input gradient of a depthwise layer with one output per channel."""
    _, x, weight = _values(node)
    depthwise = node.args[9] == x.shape[1] == weight.shape[0] and weight.shape[1] == 1
    return bool(depthwise) and _is_used(node, 0)


def _is_narrow(node: Node) -> bool:
    """Whether the graph needs the weight gradient of a convolution with few channels and taps."""
    _, _, weight = _values(node)
    taps = weight.shape[1] * weight.shape[2] * weight.shape[3]
    small = weight.shape[1] <= 4 and taps <= _MOST_TAPS and weight.shape[0] <= _MOST_OUT_CHANNELS
    return bool(node.args[9] == 1 and small) and _is_used(node, 1)


def _is_used(node: Node, output: int) -> bool:
    wanted: Any = node.args[10]
    return bool(wanted[output]) and any(user.args[1] == output for user in node.users)
