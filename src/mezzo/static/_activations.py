"""GELU in a captured graph: an operator of mezzo's, where the result goes into products only.

Elsewhere Inductor joins GELU with its neighbours, which saves more. A product is computed by cuBLAS, so
GELU in front of it is a kernel of its own anyway. In the backward pass that kernel also adds up the
gradient of the bias in front of GELU: Inductor's sum reads the gradient once more.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional as F

from mezzo._torch.step_tier import has_triton
from mezzo.amp import current_policy
from mezzo.dtypes import HALF_DTYPES
from mezzo.kernels import LEAST_COLUMNS, fused_gelu, uses_own_operators

_aten = torch.ops.aten
_PRODUCTS = (F.linear, F.conv1d, F.conv2d, torch.matmul, operator.matmul, torch.mm, torch.bmm, torch.addmm, "matmul")
"""Functions, and names of methods."""
_VIEWS = ("view", "reshape", "flatten", "contiguous", torch.reshape, torch.flatten)
_VIEWS_TRACED = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)


def fuse_activations(graph: Graph) -> int:
    """Let each GELU in Dynamo's graph whose result only goes into products call mezzo's operator.

    Returns:
        How many were found. `activate` decides with the dtypes of the traced graph.
    """
    found = [node for node in graph.nodes if node.target is F.gelu and _feeds_products(node)]
    for node in found:
        node.target = activate
    return len(found)


def _feeds_products(node: Node) -> bool:
    """Whether all that reads a result is a product, behind views and dropout that drops nothing."""
    return bool(node.users) and all(
        user.target in _PRODUCTS or (_passes_on(user) and _feeds_products(user)) for user in node.users
    )


def _passes_on(node: Node) -> bool:
    if node.target is not F.dropout:
        return node.target in _VIEWS
    options = {**dict(zip(("input", "p", "training"), node.args, strict=False)), **node.kwargs}
    return bool(options.get("p", 0.5) == 0 or options.get("training", True) is False)


def activate(input: Tensor, *, approximate: str = "none") -> Tensor:
    """Return GELU."""
    if _takes(input):
        return fused_gelu(input, approximate)
    return F.gelu(input, approximate=approximate)


ACTIVATION_CALLS = (activate,)
"""What this pass puts into a graph."""


def _takes(x: Tensor) -> bool:
    """Whether mezzo's operator computes a call: half rows, and no list says otherwise.

    At O3 a product reads FP8 numbers, which Inductor's kernel prepares while it computes GELU.
    """
    if x.dtype not in HALF_DTYPES or not has_triton(x.device) or not uses_own_operators():
        return False
    if not x.dim() or not all(isinstance(size, int) and size > 0 for size in x.shape):
        return False  # a dynamic size, or nothing to compute
    if x.shape[-1] < LEAST_COLUMNS or not x.is_contiguous():
        return False
    policy = current_policy()
    return policy is None or (policy.fp8 is None and policy.decide("gelu", (x.dtype,)).dtype in (None, x.dtype))


def take_sums_of_gradients(graph: Graph) -> int:
    """Use the sums that the backward of GELU computes, in the joint graph of forward and backward.

    Returns:
        How many sums were replaced.
    """
    found = 0
    for node in graph.find_nodes(op="call_function", target=torch.ops.mezzo.gelu_backward.default):
        gradients = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
        rows = [view for gradient in gradients for view in (gradient, *gradient.users) if _is_rows(view, node)]
        for total in [user for view in rows for user in view.users if _adds_up_rows(user, view)]:
            with graph.inserting_after(node):
                sums = graph.call_function(operator.getitem, (node, 1))
            sums.meta = {**node.meta, "val": node.meta["val"][1]}
            shape = list(total.meta["val"].shape)
            with graph.inserting_before(total):
                result = graph.call_function(_aten.view.default, (sums, shape))
            result.meta = dict(total.meta)
            total.replace_all_uses_with(result)
            graph.erase_node(total)
            found += 1
    return found


def _is_rows(view: Node, backward: Node) -> bool:
    """Whether a node is the gradient of GELU's input, or a view of it with the same rows."""
    value = view.meta.get("val")
    is_view = view.target in (*_VIEWS_TRACED, operator.getitem)
    return is_view and isinstance(value, Tensor) and value.shape[-1] == backward.meta["val"][1].shape[0]


def _adds_up_rows(node: Node, rows: Node) -> bool:
    """Whether a node sums over all dimensions but the last, in the dtype of its input."""
    value: Any = rows.meta["val"]
    if node.target is not _aten.sum.dim_IntList or node.args[0] is not rows or node.kwargs.get("dtype") is not None:
        return False
    dims: Any = node.args[1]
    return sorted(dim % value.dim() for dim in dims or ()) == list(range(value.dim() - 1))
