"""Changes to the graph of a program before it is run or saved."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, Node

from mezzo.static._graph import named
from mezzo.static._variables import Variable
from mezzo.static._writes import is_known, written_by


def needed_for(graph: Graph, end: Node, root: nn.Module) -> set[Node]:
    """Return the nodes that compute a result, and the nodes that change these in place."""
    needed: set[Node] = set()
    waiting = [end]
    while waiting:
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed.add(node)
                waiting += node.all_input_nodes
        waiting = [node for node in graph.nodes if node not in needed and _writes_into(node, needed, root)]
    return needed


def _writes_into(node: Node, needed: set[Node], root: nn.Module) -> bool:
    """Whether a call changes one of the needed values in place."""
    if node.op == "call_module":
        changes = any(getattr(part, "inplace", False) for part in root.get_submodule(str(node.target)).modules())
        return changes and bool(node.args) and _origin(node.args[0]) in needed
    # What an unknown function does, such as a loss of the user, is no reason to keep it and its inputs
    return is_known(node) and any(_origin(written) in needed for written in written_by(node))


def _origin(value: Any) -> Any:
    """Return the value that a value is a view of; itself if it is none."""
    while isinstance(value, Node) and value.op != "placeholder" and _name_of(value) in _VIEWS:
        value = value.args[0]
    return value


def _name_of(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


_VIEWS = frozenset(
    "getitem __getitem__ getattr view view_as reshape flatten unflatten squeeze unsqueeze narrow select expand expand_as t "
    "transpose permute movedim swapaxes swapdims chunk split tensor_split unbind diagonal detach contiguous unfold "
    "as_strided".split()
)
"""Functions and methods whose result may have the memory of their first argument."""


def mark(graph: Graph, nodes: dict[Node, Node], variable: Variable) -> None:
    """Insert a node with the variable's name between its value and the users of the value."""
    node = nodes[variable._node]
    users = list(node.users)
    with graph.inserting_after(node):
        marked = graph.call_function(named, (node, variable.name))
    for user in users:
        user.replace_input_with(node, marked)
    nodes[variable._node] = marked


def by_name(names: Sequence[str], values: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return results by name in a plain dict.

    A dict of torch.fx has a class that other readers do not know.
    """
    return dict(zip(names, values, strict=True))


def evaluate_functions(graph: Graph) -> None:
    """Set `training=False` in calls of functions that have it (dropout, batch_norm)."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        try:
            signature = inspect.signature(node.target)
        except (TypeError, ValueError):  # a C function: it has no signature and no such argument
            continue
        if "training" in signature.parameters:
            given = signature.bind_partial(*node.args, **node.kwargs)
            given.arguments["training"] = False
            node.args, node.kwargs = given.args, given.kwargs
