"""Removes redundant casts from a traced graph."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from mezzo._torch.operators import TO_COPY


def _target_of(node: Node) -> torch.dtype | None:
    """Return the dtype that a node casts to, None if it does anything else."""
    if node.op != "call_function":
        return None
    if node.target is torch.ops.prims.convert_element_type.default:
        return node.args[1]  # type: ignore[return-value]
    if node.target is not TO_COPY:
        return None
    value, source = node.meta.get("val"), _value(node.args[0])
    if value is None or source is None or value.device != source.device or value.stride() != source.stride():
        return None
    asked = {name for name, given in node.kwargs.items() if given is not None}
    return value.dtype if asked <= {"dtype", "layout", "device"} else None


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, Node) else None


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether the wide floating dtype represents every number of the narrow one."""
    if not (wide.is_floating_point and narrow.is_floating_point) or wide is narrow:
        return False
    one, other = torch.finfo(wide), torch.finfo(narrow)  # torch promotes no FP8 dtypes
    return one.eps <= other.eps and one.max >= other.max and one.tiny * one.eps <= other.tiny * other.eps


def drop_needless_casts(graph: Graph) -> int:
    """Remove redundant casts from a graph.

    These are casts to the dtype a tensor already has, repeated casts of one tensor, and casts back
    from a wider dtype. A cast to a narrower dtype and back rounds, so such a pair stays. Results of
    the graph stay separate tensors.

    Returns:
        How many casts were removed.
    """
    done: dict[tuple[Node, torch.dtype], Node] = {}
    dropped = 0
    for node in list(graph.nodes):
        dtype = _target_of(node)
        if dtype is None:
            continue
        instead = _instead_of(node, dtype, done)
        if instead is None:
            done[node.args[0], dtype] = node
        # An input may be overwritten before the backward reads it, so a copy of it stays a copy.
        elif instead.op != "placeholder" and not any(user.op == "output" for user in node.users):
            node.replace_all_uses_with(instead)
            graph.erase_node(node)
            dropped += 1
    return dropped


def _instead_of(node: Node, dtype: torch.dtype, done: dict[tuple[Node, torch.dtype], Node]) -> Node | None:
    """Return a node that already has the values and dtype of a cast."""
    source = node.args[0]
    value = _value(source)
    assert isinstance(source, Node)
    if value is not None and value.dtype is dtype:
        return source
    earlier = done.get((source, dtype))
    if earlier is not None:
        return earlier
    if value is not None and _target_of(source) is value.dtype and isinstance(source.args[0], Node):
        origin: Any = _value(source.args[0])
        wide = value.dtype
        assert isinstance(wide, torch.dtype)
        if origin is not None and origin.dtype is dtype and _holds(wide, dtype):
            return source.args[0]
    return None
