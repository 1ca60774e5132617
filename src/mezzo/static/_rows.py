"""Operators of mezzo's that work on rows in front of a product: GELU and norms.

A product is computed by cuBLAS, so what stands in front of it is a kernel of its own anyway. Elsewhere
Inductor joins it with its neighbours, which saves more. The backward of these operators can also add up
the rows of its result: that is the gradient of a bias, for which Inductor reads the result once more.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional as F

from mezzo._torch.operators import unsafe_view
from mezzo._torch.step_tier import has_triton
from mezzo.amp import current_policy
from mezzo.dtypes import HALF_DTYPES
from mezzo.kernels import LEAST_COLUMNS, has_rules, uses_own_operators

_aten = torch.ops.aten
_PRODUCTS = (F.linear, torch.matmul, operator.matmul, torch.mm, torch.bmm, torch.addmm, "matmul")
"""Functions, and names of methods."""
CONVOLUTIONS = (F.conv1d, F.conv2d)
"""Their channels are dimension 1. A norm over channels reaches them through a permutation; GELU does not need one, so its
rows may be rows of pixels."""
_VIEWS = ("view", "reshape", "flatten", "contiguous", "permute", torch.reshape, torch.flatten, torch.permute)
_VIEWS_TRACED = (_aten.view.default, unsafe_view.default, _aten.reshape.default)
_SUMS = {
    torch.ops.mezzo.gelu_backward.default: (1, None),
    torch.ops.mezzo.layer_norm_backward.default: (3, 8),
    torch.ops.mezzo.rms_norm_backward.default: (2, 6),
}
"""By backward: which result the sum over rows is, and which argument asks for it (None: it is always there)."""


def feeds_one_product(node: Node, others: Sequence[Any] = ()) -> bool:
    """Whether one product is all that reads a result, behind views and dropout that drops nothing.

    With several readers, Inductor adds up their gradients in the kernel of the backward: one pass less.

    Args:
        node: A call of Dynamo's graph.
        others: Calls that count as products besides matrix products.
    """
    user = next(iter(node.users), None)
    if user is None or len(node.users) > 1:
        return False
    return user.target in (*_PRODUCTS, *others) or (_passes_on(user) and feeds_one_product(user, others))


def _passes_on(node: Node) -> bool:
    if node.target is not F.dropout:
        return node.target in _VIEWS
    options = {**dict(zip(("input", "p", "training"), node.args, strict=False)), **node.kwargs}
    return bool(options.get("p", 0.5) == 0 or options.get("training", True) is False)


def takes_rows(x: Tensor, operators: Sequence[str], others: Sequence[Tensor] = ()) -> bool:
    """Whether mezzo's operator computes calls on `x`: half rows, and no list says otherwise.

    At O3 a product reads FP8 numbers, which Inductor's kernel prepares while it computes what is in front.

    Args:
        x: The input.
        operators: The names of the calls in the lists of a policy.
        others: The other tensors that the calls read.
    """
    if x.dtype not in HALF_DTYPES or not has_triton(x.device) or not uses_own_operators():
        return False
    if not has_rules(x, *others):
        return False
    if not x.dim() or not all(isinstance(size, int) and size > 0 for size in x.shape):
        return False  # a dynamic size, or nothing to compute
    if x.shape[-1] < LEAST_COLUMNS or not x.is_contiguous():
        return False
    policy = current_policy()
    if policy is None:
        return True
    return policy.fp8 is None and all(policy.decide(name, (x.dtype,)).dtype in (None, x.dtype) for name in operators)


def as_rows(x: Tensor) -> Tensor:
    """Return a contiguous tensor as a matrix: of four dimensions Inductor would make channels-last copies."""
    return x.view(-1, x.shape[-1])


def take_sums_of_gradients(graph: Graph) -> int:
    """Use the sums that a backward of mezzo's computes, in the joint graph of forward and backward.

    Returns:
        How many sums were replaced.
    """
    found = 0
    for target, (place, switch) in _SUMS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            gradients = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
            rows = [view for gradient in gradients for view in _rows_of(gradient)]
            # Of two biases before a GELU, only one takes the sum: two gradients in one memory would add to both.
            for total in [user for view in rows for user in view.users if _adds_up_rows(user, view)][:1]:
                if switch is not None:
                    _ask(node, place, switch)
                with graph.inserting_after(node):
                    sums = graph.call_function(operator.getitem, (node, place))
                sums.meta = {**node.meta, "val": node.meta["val"][place]}
                shape = list(total.meta["val"].shape)
                with graph.inserting_before(total):
                    result = graph.call_function(_aten.view.default, (sums, shape))
                result.meta = dict(total.meta)
                total.replace_all_uses_with(result)
                graph.erase_node(total)
                found += 1
    return found


def _ask(node: Node, place: int, switch: int) -> None:
    """Set the argument that asks for a sum, and give that result its real size."""
    node.update_arg(switch, True)
    values = list(node.meta["val"])
    values[place] = values[place].new_empty(values[0].shape[-1])
    node.meta["val"] = tuple(values)
    if "eager_input_vals" in node.meta:  # what Inductor compares strides with
        arguments, keywords = node.meta["eager_input_vals"]
        node.meta["eager_input_vals"] = (*arguments[:switch], True, *arguments[switch + 1 :]), keywords


def _rows_of(gradient: Node) -> list[Node]:
    """Return a gradient and all views of it with the same rows."""
    size, found, left = gradient.meta["val"].shape[-1], [], [gradient]
    while left:
        node = left.pop()
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.dim() and value.shape[-1] == size:
            found.append(node)
            left += [user for user in node.users if user.target in _VIEWS_TRACED]
    return found


def _adds_up_rows(node: Node, rows: Node) -> bool:
    """Whether a node sums over all dimensions but the last, in the dtype of its input."""
    value: Any = rows.meta["val"]
    if node.target is not _aten.sum.dim_IntList or node.args[0] is not rows or node.kwargs.get("dtype") is not None:
        return False
    dims: Any = node.args[1]
    return sorted(dim % value.dim() for dim in dims or ()) == list(range(value.dim() - 1))
