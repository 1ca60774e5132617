"""What a call of a captured graph may change in place."""

from __future__ import annotations

import inspect
from types import BuiltinFunctionType

from torch.fx import Node

from mezzo._torch.dispatcher import OpOverload, OpOverloadPacket

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
    is_known = isinstance(node.target, (str, BuiltinFunctionType)) or _is_torchs(node)
    return [first] if is_known and isinstance(first, Node) and "out" not in node.kwargs else list(node.all_input_nodes)


def _may_write(node: Node) -> bool:
    target = node.target
    if isinstance(target, OpOverload):
        return bool(target._schema.is_mutable)
    if isinstance(target, OpOverloadPacket):
        return any(getattr(target, name)._schema.is_mutable for name in target.overloads())
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name.endswith("__") or getattr(target, "__module__", None) in _OPERATORS:
        return name.strip("_") in _IN_PLACE  # `and_` of the module `operator` changes nothing
    if not (isinstance(target, (str, BuiltinFunctionType)) or _is_torchs(node)):
        return True  # a function that the graph calls as a whole: checkpointing, a kernel, a function of the user
    return "out" in node.kwargs or name.endswith("_") or _is_asked_in_place(node)


def _is_torchs(node: Node) -> bool:
    return getattr(node.target, "__module__", None) in _TORCHS_FUNCTIONS


def _is_asked_in_place(node: Node) -> bool:
    """Whether the argument `inplace` of one of torch's functions is given, by name or by place, and not False."""
    if not _is_torchs(node):
        return False
    parameters = inspect.signature(node.target).parameters  # type: ignore[arg-type]  # a function
    given = {**dict(zip(parameters, node.args, strict=False)), **node.kwargs}
    return given.get("inplace", False) is not False
