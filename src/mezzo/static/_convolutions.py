"""Convolutions in a captured graph: two gradients use mezzo's operators where cuDNN is slow."""

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
    """Replace convolution gradients in a joint graph by mezzo's kernels where cuDNN is slow.

    Returns:
        How many gradients were replaced.
    """
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
