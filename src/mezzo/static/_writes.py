"""What a call of a captured graph may change in place, and where a call can move."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from types import BuiltinFunctionType
from typing import Any

from torch import Tensor
from torch.fx import Node

from mezzo._torch.dispatcher import OpOverload, OpOverloadPacket
from mezzo._torch.functorch import unwrapped
from mezzo._torch.storages import storage_id

_OPERATORS = ("_operator", "operator")
_TORCHS_FUNCTIONS = ("torch.functional", "torch.nn.functional")
"""Modules of functions that change their first argument if `inplace` is true, and nothing otherwise."""
_IN_PLACE = frozenset(
    "setitem delitem iadd isub imul imatmul iand ior ixor itruediv ifloordiv ipow imod ilshift irshift".split()
)
"""Operators that change their first argument, as functions of `operator` or as methods with underscores."""


def written_by(node: Node) -> list[Node]:
    """Return the nodes that a call may change in place: all its inputs, if the call is not known.

    The running averages of a batch norm in training are left out: torch's functions change only these
    without a name or an argument that says so.
    """
    if node.op not in ("call_function", "call_method") or not _may_write(node):
        return []
    first = node.args[0] if node.args else None
    is_operator = isinstance(node.target, (OpOverload, OpOverloadPacket))
    if isinstance(first, Node) and is_known(node) and not is_operator and "out" not in node.kwargs:
        return [first]
    return list(node.all_input_nodes)


def is_known(node: Node) -> bool:
    """Whether a call is one of torch, of which is known what it changes.

    Others are functions that a graph calls as a whole: checkpointing, a kernel, a function of the user.
    """
    kinds = (str, BuiltinFunctionType, OpOverload, OpOverloadPacket)
    return isinstance(node.target, kinds) or _is_torchs(node)


def _may_write(node: Node) -> bool:
    target = node.target
    if isinstance(target, OpOverload):
        return _changes_arguments(target, node)
    if isinstance(target, OpOverloadPacket):
        return any(_changes_arguments(getattr(target, name), node) for name in target.overloads())
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name.endswith("__") or getattr(target, "__module__", None) in _OPERATORS:
        return name.strip("_") in _IN_PLACE  # `and_` of the module `operator` changes nothing
    return not is_known(node) or "out" in node.kwargs or name.endswith("_") or _is_asked_in_place(node)


def _changes_arguments(operator: OpOverload, node: Node) -> bool:
    """Whether an operator changes an argument that a call gives; `out` is given by name only."""
    written = [each for each in operator._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    return any(not each.kwarg_only or each.name in node.kwargs for each in written)


def _is_torchs(node: Node) -> bool:
    return getattr(node.target, "__module__", None) in _TORCHS_FUNCTIONS


def _is_asked_in_place(node: Node) -> bool:
    """Whether the argument `inplace` of one of torch's functions is given, by name or by place, and not False."""
    if not _is_torchs(node):
        return False
    parameters = inspect.signature(node.target).parameters  # type: ignore[arg-type]  # a function
    given = {**dict(zip(parameters, node.args, strict=False)), **node.kwargs}
    return given.get("inplace", False) is not False


def can_move(first: Node, last: Node, inputs: Sequence[Any], ours: Any = None) -> bool:
    """Whether a call can move from `first` to `last`: it reads the same numbers, and no region begins or ends.

    Args:
        first: A call of Dynamo's graph.
        last: A later call.
        inputs: What the moved call reads.
        ours: A function that a pass puts into the graph: it is no region, and changes none of the inputs.
    """
    storages = storages_of(inputs)
    node = first.next
    while node is not last:
        is_ours = ours is not None and ours in (node.target, getattr(next(iter(node.args), None), "target", None))
        if not is_ours and not is_tensor(node):
            return False  # it may begin or end a region: `no_grad`, autocast, float32
        if (ours is None or node.target is not ours) and storages_of(written_by(node)) & storages:
            return False
        node = node.next
    return True


def is_tensor(node: Any) -> bool:
    """Whether Dynamo saw a tensor as the result of a node."""
    return isinstance(node, Node) and isinstance(node.meta.get("example_value"), Tensor)


def memory_of(node: Node) -> int | None:
    """Return a number for the memory of a fake tensor, the same for all its views; None if it has none."""
    example = node.meta.get("example_value")
    try:
        return storage_id(unwrapped(example).untyped_storage()) if isinstance(example, Tensor) else None
    except RuntimeError:  # a sparse tensor
        return None


def storages_of(nodes: Iterable[Any]) -> set[int | None]:
    """Return the memory of the tensors among the results of nodes; None stands for that of sparse tensors."""
    return {memory_of(node) for node in nodes if is_tensor(node)}
