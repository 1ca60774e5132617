"""Creates objects from blocks with a `type`: the other entries are arguments; errors get a line number."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from mezzo.errors import MezzoError
from mezzo.files import SourceMark, YamlNode, short_repr
from mezzo.vision.recipes._errors import FaultLog, unknown_key

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")

#: Errors of constructors for bad arguments; they become faults with a line number.
REFUSALS = (MezzoError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError)


def find_type(node: YamlNode, what: str, table: Mapping[str, T], faults: FaultLog) -> T | None:
    """Return the table entry for the `type` of a block, or None after adding a fault."""
    if not isinstance(node.value, dict):
        faults.add(node.mark, f"{what}: {short_repr(node.plain())}: must be a block with a type")
        return None
    if "type" not in node.block:
        faults.add(node.mark, f"{what}: type is missing; allowed: {', '.join(table)}")
        return None
    name = node.get("type")
    if not isinstance(name, str) or name not in table:
        faults.add(node.mark_of("type"), unknown_key(what, name if isinstance(name, str) else short_repr(name), table))
        return None
    return table[name]


def check_arguments(
    node: YamlNode, factory: Callable[..., object], faults: FaultLog, *, given: tuple[str, ...] = ()
) -> bool:
    """Add faults for unknown and missing arguments of a callable; return whether there are none.

    Args:
        node: A block; its `type` is not an argument.
        factory: Called with the entries as keyword arguments.
        faults: Collects the faults.
        given: Arguments that are passed separately: allowed, and never missing.
    """
    before = len(faults)
    name = str(node.get("type"))
    parameters = _keywords(factory)
    if parameters is not None:
        check_names(node.without("type", *given), name, tuple(parameters), faults)
        for key, required in parameters.items():
            if required and key not in node.block and key not in given:
                faults.add(node.mark, f"{name}: {key} is missing")
    return len(faults) == before


def _keywords(factory: Callable[..., object]) -> dict[str, bool] | None:
    """Return the keyword arguments and whether each is required; None if anything is taken."""
    parameters = inspect.signature(factory).parameters.values()
    if any(item.kind is item.VAR_KEYWORD for item in parameters):
        return None
    named = [item for item in parameters if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)]
    return {item.name: item.default is item.empty for item in named}


def check_names(node: YamlNode, what: str, allowed: Sequence[str], faults: FaultLog) -> None:
    """Add a fault for every unknown entry of a block, with the nearest allowed name."""
    for key, item in node.block.items():
        if key not in allowed:
            faults.add(item.mark, unknown_key(f"key of {what}", key, allowed))


def check_block(node: YamlNode, what: str, allowed: Sequence[str], required: Sequence[str], faults: FaultLog) -> bool:
    """Return whether a node is a block with these keys; add faults otherwise."""
    if not isinstance(node.value, dict):
        faults.add(node.mark, f"{what}: {short_repr(node.plain())}: must be a block with {', '.join(allowed)}")
        return False
    before = len(faults)
    check_names(node, what, allowed, faults)
    for key in required:
        if key not in node.block:
            faults.add(node.mark, f"{what}: {key} is missing")
    return len(faults) == before


def create(
    node: YamlNode, what: str, table: Mapping[str, Callable[..., R]], faults: FaultLog, **given: Any
) -> R | None:
    """Return the object that a block describes, or None after adding faults.

    Args:
        node: A block with a `type`.
        what: Name of the kind in faults.
        table: From type names to classes.
        faults: Collects the faults.
        given: Further arguments; the block need not have them.
    """
    factory = find_type(node, what, table, faults)
    if factory is None or not check_arguments(node, factory, faults, given=tuple(given)):
        return None
    arguments = {**given, **node.without("type").plain()}
    return attempt(node, faults, factory, **arguments)


def attempt(node: YamlNode, faults: FaultLog, make: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
    """Return the result of a call; if it fails, add a fault at the line of the entry that the error names, and return None."""
    try:
        return make(*args, **kwargs)
    except REFUSALS as error:
        name, text = node.get("type"), str(error) or type(error).__name__
        faults.add(find_line(node, text), text if not isinstance(name, str) or name in text else f"{name}: {text}")
        return None


def find_line(node: YamlNode, message: str) -> SourceMark:
    """Return the position of the entry that a message names, or that of the type of the block."""
    path = find_entry(node, message)
    for key in path[:-1]:
        node = node.block[key]
    return node.mark_of(path[-1] if path else "type")


def find_entry(node: YamlNode, message: str) -> tuple[str, ...]:
    """Return the keys that lead to the entry that a message names, the longest name if it names several; or none."""
    # Messages list allowed names after the first semicolon; only the text before it names the wrong entry.
    words = set(re.findall(r"\w+", message.partition(";")[0]))
    named = [path for path in _paths(node) if path[-1] in words and path[-1] != "type"]
    return max(named, key=lambda path: len(path[-1]), default=())


def _paths(node: YamlNode) -> list[tuple[str, ...]]:
    """Return the paths of all entries of a block, including nested blocks."""
    return [(key, *rest) for key, item in node.block.items() for rest in ((), *_paths(item))]
