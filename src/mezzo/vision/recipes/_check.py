"""Blocks with a `type`: the class is looked up, the other entries are its arguments, and faults get a line."""

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

#: What a constructor may raise when it is given nonsense. It becomes a fault with a line, so nothing is lost.
REFUSALS = (MezzoError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError)


def find_type(node: YamlNode, what: str, table: Mapping[str, T], faults: FaultLog) -> T | None:
    """Return what the `type` of a block stands for, or None after noting the fault."""
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
    """Note entries that a callable does not take and those that it needs; return whether all is well.

    Args:
        node: A block; its `type` is no argument.
        factory: What takes the entries as keyword arguments.
        faults: Where to note.
        given: Arguments that come from elsewhere: allowed, and never missing.
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
    """Note every entry of a block that is not allowed, with the nearest name that is."""
    for key, item in node.block.items():
        if key not in allowed:
            faults.add(item.mark, unknown_key(f"key of {what}", key, allowed))


def check_block(node: YamlNode, what: str, allowed: Sequence[str], required: Sequence[str], faults: FaultLog) -> bool:
    """Return whether a node is a block with these keys; what is not is noted."""
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
    """Return the object that a block describes, or None after noting what is wrong.

    Args:
        node: A block with a `type`.
        what: What the type is called in faults.
        table: From type names to classes.
        faults: Where to note.
        given: Further arguments; the block need not have them.
    """
    factory = find_type(node, what, table, faults)
    if factory is None or not check_arguments(node, factory, faults, given=tuple(given)):
        return None
    arguments = {**given, **node.without("type").plain()}
    return attempt(node, faults, factory, **arguments)


def attempt(node: YamlNode, faults: FaultLog, make: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
    """Return what a call makes of a block; if it refuses, note that at the line of the entry it names, and return None."""
    try:
        return make(*args, **kwargs)
    except REFUSALS as error:
        name, text = node.get("type"), str(error) or type(error).__name__
        faults.add(find_line(node, text), text if not isinstance(name, str) or name in text else f"{name}: {text}")
        return None


def find_line(node: YamlNode, message: str) -> SourceMark:
    """Return the place of the entry that a message names; of the block's type if it names none."""
    path = find_entry(node, message)
    for key in path[:-1]:
        node = node.block[key]
    return node.mark_of(path[-1] if path else "type")


def find_entry(node: YamlNode, message: str) -> tuple[str, ...]:
    """Return the keys that lead to the entry that a message names, the longest name if it names several; or none."""
    # What is allowed stands behind the first semicolon, so only what is in front of it names the culprit.
    words = set(re.findall(r"\w+", message.partition(";")[0]))
    named = [path for path in _paths(node) if path[-1] in words and path[-1] != "type"]
    return max(named, key=lambda path: len(path[-1]), default=())


def _paths(node: YamlNode) -> list[tuple[str, ...]]:
    """Return the way to every entry of a block and of the blocks inside it."""
    return [(key, *rest) for key, item in node.block.items() for rest in ((), *_paths(item))]
