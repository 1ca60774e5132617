"""Convolutions in a captured graph: some are computed in another way where cuDNN is slow.

Most use mezzo's operators: depthwise layers with dilation, forward and backward; the input gradient of
other depthwise layers; the weight gradient of a narrow first layer. The input gradient of a depthwise layer with
large kernels is a forward convolution with mirrored kernels: for the 7x7 of ConvNeXt, cuDNN's own gradient
takes twice the time of its forward pass (4.80 and 2.33 ms per step of convnext_tiny, batch 128, on an H200).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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


class _Layer(NamedTuple):
    """A 2d half convolution in channels-last with known sizes."""

    x: Tensor
    weight: Tensor
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    @property
    def kernel(self) -> list[int]:
        return list(self.weight.shape[2:])

    @property
    def is_dilated(self) -> bool:
        return max(self.dilation) > 1

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel has one output of its own."""
        return self.groups == self.x.shape[1] == self.weight.shape[0] and self.weight.shape[1] == 1

    @property
    def has_few_taps(self) -> bool:
        """Whether mezzo's depthwise kernels compile in a second: each tap is written out in them."""
        return self.weight.shape[2:].numel() <= _MOST_TAPS

    @property
    def is_slow(self) -> bool:
        """Whether mezzo's kernels are faster than cuDNN in forward and backward: depthwise with dilation."""
        return self.is_depthwise and self.is_dilated and self.has_few_taps

    @property
    def has_slow_input_grad(self) -> bool:
        """Whether mezzo's kernel is faster than cuDNN, which is fast for 5x5 with stride 1."""
        spaced_or_small = self.is_dilated or max(self.stride) > 1 or max(self.kernel) < 5
        return self.is_depthwise and self.has_few_taps and spaced_or_small

    @property
    def has_large_kernel(self) -> bool:
        """Whether it is depthwise with stride 1 and more than 5x5 taps, and less padding than taps."""
        fits = all(pad < size for pad, size in zip(self.padding, self.kernel, strict=True))
        return self.is_depthwise and not self.is_dilated and max(self.stride) == 1 and max(self.kernel) > 5 and fits

    @property
    def is_narrow(self) -> bool:
        """Whether it has few channels and taps."""
        taps = self.weight.shape[1:].numel()
        small = self.weight.shape[1] <= 4 and taps <= _MOST_TAPS and self.weight.shape[0] <= _MOST_OUT_CHANNELS
        return self.groups == 1 and not self.is_dilated and small


def use_own_convolutions(graph: Graph) -> int:
    """Replace convolutions and their gradients in a joint graph where cuDNN is slow.

    Returns:
        How many results were replaced.
    """
    found = 0
    for node in graph.find_nodes(op="call_function", target=_aten.convolution.default):
        layer = _read(node, 0)
        if layer is not None and layer.is_slow:
            operator = torch.ops.mezzo.depthwise_conv.default
            with graph.inserting_before(node):
                own = _call(graph, node, operator, (*node.args[:3], layer.stride, layer.padding, layer.dilation))
            node.replace_all_uses_with(own)
            graph.erase_node(node)
            found += 1
    for node in graph.find_nodes(op="call_function", target=_aten.convolution_backward.default):
        layer = _read(node, 1)
        if layer is not None:
            found += _use_own_gradients(graph, node, layer)
    return found


def _use_own_gradients(graph: Graph, node: Node, layer: _Layer) -> int:
    """Replace the gradients of a convolution for which cuDNN is slow; return how many."""
    arguments: Any = node.args
    grad, x, weight = arguments[:3]
    spaced = layer.stride, layer.padding
    found = 0
    if layer.has_slow_input_grad and _is_used(node, 0):
        operator = torch.ops.mezzo.depthwise_input_grad.default
        _replace(graph, node, 0, operator, (grad, weight, *layer.x.shape[2:], *spaced, layer.dilation))
        found += 1
    elif layer.has_large_kernel and _is_used(node, 0):
        padding = [size - 1 - pad for size, pad in zip(layer.kernel, layer.padding, strict=True)]
        geometry = ([1, 1], padding, [1, 1], False, [0, 0], layer.groups)
        mirrored = _mirror(graph, node, weight)
        _replace(graph, node, 0, _aten.convolution.default, (grad, mirrored, None, *geometry))
        found += 1
    if layer.is_slow and _is_used(node, 1):
        operator = torch.ops.mezzo.depthwise_weight_grad.default
        _replace(graph, node, 1, operator, (grad, x, layer.kernel, *spaced, layer.dilation))
        found += 1
    elif layer.is_narrow and _is_used(node, 1):
        operator = torch.ops.mezzo.narrow_weight_grad.default
        _replace(graph, node, 1, operator, (grad, x, layer.kernel, *spaced))
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
        own = _call(graph, user, operator, arguments)
    user.replace_all_uses_with(own)
    graph.erase_node(user)
    wanted: Any = node.args[10]
    node.args = (*node.args[:10], [asked and place != output for place, asked in enumerate(wanted)])
    gradients = node.meta.get("val")
    if gradients is not None:
        node.meta["val"] = tuple(None if place == output else value for place, value in enumerate(gradients))


def _call(graph: Graph, node: Node, operator: Callable[..., Any], arguments: tuple[Any, ...]) -> Node:
    """Return a call of an operator with the same result as a node."""
    own = graph.call_function(operator, arguments)
    own.meta = dict(node.meta)
    # Inductor keeps these strides. Without them it may choose others, and the operator would copy its inputs.
    values = tuple(value.meta["val"] if isinstance(value, Node) else value for value in arguments)
    own.meta["eager_input_vals"] = values, {}
    return own


def _read(node: Node, start: int) -> _Layer | None:
    """Return the layer of a convolution (its input is argument 0) or of its backward (1); None if it is not such."""
    arguments: Any = node.args
    values: list[Any] = [argument.meta.get("val") for argument in arguments[: start + 2] if isinstance(argument, Node)]
    stride, padding, dilation, transposed, _, groups = arguments[start + 3 : start + 9]
    if len(values) != start + 2 or not all(isinstance(value, Tensor) and value.dim() == 4 for value in values):
        return None
    if not all(isinstance(size, int) for value in values for size in value.shape):
        return None  # a dynamic size
    *images, weight = values
    x = images[-1]
    if transposed or x.dtype not in HALF_DTYPES or not uses_triton(x.device):
        return None
    if not all(value.is_contiguous(memory_format=torch.channels_last) for value in images):
        return None
    reached = images if start else [x, node.meta["val"]]
    addressable = max(value.numel() for value in reached) + CONVOLUTION_BLOCK <= _MOST  # the kernels count in int32
    # a graph may have one number for both axes, as for `padding="valid"`
    stride, padding, dilation = ([*given, *given][:2] for given in (stride, padding, dilation))
    return _Layer(x, weight, stride, padding, dilation, groups) if addressable else None


def _is_used(node: Node, output: int) -> bool:
    wanted: Any = node.args[10]
    return bool(wanted[output]) and any(user.args[1] == output for user in node.users)
