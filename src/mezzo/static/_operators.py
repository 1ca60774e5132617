"""The operator table of a captured graph: which operator computes in which dtype."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from mezzo.record import OperatorStats, Phase

AT_CAPTURE = "decided at capture"


def count_operators(forward: GraphModule, backward: GraphModule | None, include_views: bool) -> OperatorStats:
    """Return the table of a traced forward and, if there is one, of its backward."""
    stats = OperatorStats(include_views=include_views)
    phases: tuple[tuple[GraphModule | None, Phase], ...] = ((forward, "forward"), (backward, "backward"))
    for module, phase in phases:
        for node in module.graph.nodes if module is not None else ():
            if node.op == "call_function" and hasattr(node.target, "_schema"):
                place, called = _module_path(node), _called_as(node)
                stats.count(node.target, _values(node.args), _values(node.kwargs), node.meta.get("val"),
                            phase=phase, module=place, api_op=called, reason=AT_CAPTURE)  # fmt: skip
    return stats


def _values(arguments: Any) -> Any:
    """Return arguments with nodes replaced by their fake tensors."""
    if isinstance(arguments, Node):
        return arguments.meta.get("val")
    if isinstance(arguments, dict):
        return {name: _values(value) for name, value in arguments.items()}
    if isinstance(arguments, (list, tuple)):
        return [_values(value) for value in arguments]
    return arguments


def _module_path(node: Node) -> str:
    """Return the module path of a node below the outermost module.

    A gradient has the path of its forward.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [str(path) for path, _ in stack.values()]
    return paths[-1].removeprefix(paths[0]).lstrip(".") if paths else ""


def _called_as(node: Node) -> str:
    """Return the torch-level call behind a node; empty for gradients."""
    if "fwd_nn_module_stack" in node.meta or "fwd_source_fn_stack" in node.meta:
        return ""
    stack = node.meta.get("source_fn_stack") or ()
    target = stack[-1][1] if stack else ""
    return getattr(target, "__name__", str(target))
