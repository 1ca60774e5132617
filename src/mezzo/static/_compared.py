"""Keeps values that a backward compares for equality from being computed twice.

The gradient of `amax`, `amin`, `max()` and `min()` goes to the elements that equal the result, divided
by their number. Inductor computes half tensors in float32 and rounds only what it stores. If the
backward recomputes the input of `amax`, its unrounded elements equal no rounded maximum: their number
is 0, and the gradient 0 / 0. This was every step of PP-LiteSeg in float16. A stored tensor is rounded
like the maximum (rounding is monotonic), so both sides of a comparison are stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from mezzo._torch.dispatcher import OpOverload

_aten = torch.ops.aten
_COMPARISONS = (_aten.eq.Tensor, _aten.ne.Tensor)
_EXACT = tuple(getattr(_aten, name).default for name in "abs neg clone _unsafe_view".split())
"""Besides views: what computes the same number from a rounded tensor as before its rounding."""


def store_compared_values(graph: Graph) -> int:
    """Mark the tensors that are compared for equality: the backward must not recompute them.

    A float32 tensor is marked, too: it may have been computed from a half tensor, unrounded in the
    forward and rounded in the backward.

    Returns:
        How many tensors were marked.
    """
    marked = set()
    for node in graph.nodes:
        if node.target not in _COMPARISONS:
            continue
        for argument in node.args:
            source = _source(argument)
            if source is not None and _is_floating(source):
                source.meta["recompute"] = CheckpointPolicy.MUST_SAVE
                marked.add(source)
    return len(marked)


def _source(argument: Any) -> Node | None:
    """Return the call that computed a tensor, behind its views and signs; None for inputs and numbers."""
    while isinstance(argument, Node) and _is_exact(argument.target):
        argument = argument.args[0]
    return argument if isinstance(argument, Node) and argument.op == "call_function" else None


def _is_exact(target: Any) -> bool:
    return target in _EXACT or (isinstance(target, OpOverload) and target.is_view)


def _is_floating(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()
