"""Attention with a mask tensor that is causal or hides nothing, in captured graphs: the tensor is dropped.

With `is_causal` the kernels of attention skip half of the scores; with a mask tensor they compute all
of them, and read the mask. In compiled code transformers always makes a mask tensor before torch 2.14,
also where eager code needs none. Here a mask that does not depend on data is computed once, while the
graph is captured, and compared with both.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn.functional import scaled_dot_product_attention

from mezzo.static._writes import memory_of, written_by

MOST_LENGTH = 8192
"""Longest row of tokens whose mask is computed. Its mask takes 64 MiB, and so does each part of the mask."""

_FUNCTIONS = frozenset(
    [
        *(operator.add, operator.sub, operator.mul, operator.getitem, operator.and_, operator.or_, operator.invert),
        *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
        *(torch.arange, torch.ones, torch.zeros, torch.full, torch.tril, torch.triu, torch.diff, torch.where),
        *(torch.logical_and, torch.logical_or, torch.logical_not),
    ]
)
_METHODS = frozenset(
    "unsqueeze squeeze expand view reshape transpose contiguous to bool cumsum diff new_ones new_zeros tril triu "
    "logical_and logical_or logical_not eq ne lt le gt ge add sub mul "
    # torch 2.11 captures an operator between tensors as a method
    "__getitem__ __and__ __or__ __invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __add__ __sub__ __mul__".split()
)
"""What a mask may be made of: functions of their arguments, which change no tensor."""


def drop_needless_masks(graph: Graph) -> None:
    """Call attention without a mask tensor where that gives the same result, in a graph that Dynamo captured.

    The causal mask becomes `is_causal=True`; a mask that hides nothing becomes None. A mask that depends
    on an input, such as one for padding, stays.
    """
    masks = _Masks(graph)
    dropped = False
    for node in graph.nodes:
        mask = _mask_of(node)
        is_causal = None if mask is None else masks.is_causal(mask)
        if is_causal is not None:
            node.args = node.args[:3]
            node.kwargs = {**node.kwargs, "attn_mask": None, "is_causal": is_causal}
            dropped = True
    if dropped:
        for node in reversed(list(graph.nodes)):  # only parts of masks: other calls may have effects
            if node in masks.parts and not node.users:
                graph.erase_node(node)


def _mask_of(node: Node) -> Node | None:
    """Return the mask of a call of attention; None if it has none, or more than a mask."""
    if node.target is not scaled_dot_product_attention or len(node.args) > 4 or node.kwargs.get("is_causal"):
        return None
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    return mask if isinstance(mask, Node) else None


class _Masks:
    """Computes the values of masks that depend on constants only."""

    def __init__(self, graph: Graph) -> None:
        self._written = {memory_of(each) for node in graph.nodes for each in written_by(node)} - {None}
        """Memory that a call of the graph changes. A mask may be written through a view of it."""
        self.parts: dict[Node, bool] = {}
        """Nodes that were looked at, and whether they depend on constants only."""
        self._found: dict[Node, bool | None] = {}

    def is_causal(self, mask: Node) -> bool | None:
        """Whether a mask is the causal one, True, or hides nothing, False, in all rows and heads; None: neither."""
        if mask not in self._found:
            self._found[mask] = self._compare(mask)
        return self._found[mask]

    def _compare(self, mask: Node) -> bool | None:
        example = mask.meta.get("example_value")
        if not isinstance(example, Tensor) or example.dtype != torch.bool or example.dim() < 2:
            return None
        rows, columns = example.shape[-2:]
        is_small = all(isinstance(side, int) and side <= MOST_LENGTH for side in (rows, columns))
        if not is_small or not self._is_constant(mask):
            return None
        with torch.no_grad():
            value = self._value(mask, {})
            if value.all():
                return False
            causal = torch.ones(rows, columns, dtype=torch.bool, device=value.device).tril()
            return True if rows == columns and torch.equal(value, causal.expand_as(value)) else None

    def _is_constant(self, node: Node) -> bool:
        """Whether a node depends on constants only, and nothing writes into it."""
        known = self.parts.get(node)
        if known is None:
            is_known = (node.op == "call_function" and node.target in _FUNCTIONS) or (
                node.op == "call_method" and node.target in _METHODS
            )
            is_written = memory_of(node) in self._written
            known = is_known and not is_written and all(map(self._is_constant, node.all_input_nodes))
            self.parts[node] = known
        return known

    def _value(self, node: Node, values: dict[Node, Any]) -> Any:
        if node not in values:
            inputs = {each: self._value(each, values) for each in node.all_input_nodes}
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), inputs.__getitem__)
            function = node.target if node.op == "call_function" else getattr(args[0], str(node.target))
            values[node] = function(*(args if node.op == "call_function" else args[1:]), **kwargs)  # type: ignore[operator]
        return values[node]
