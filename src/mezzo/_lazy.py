"""Packages that load their modules when a name is used, so that the command line can read options without torch."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any


def load_on_demand(package: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package whose imports stand below `if TYPE_CHECKING:`.

    The imports are written once: type checkers read them there, and a name is imported by them when it is first used.

    Args:
        package: The `__name__` of the package.
    """

    @cache
    def places() -> dict[str, tuple[str, str]]:
        block = next(node for node in ast.parse(inspect.getsource(sys.modules[package])).body if _is_for_types(node))
        return {
            alias.asname or alias.name: (node.module or "", alias.name)
            for node in ast.walk(block)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    def load(name: str) -> Any:
        if name.startswith("__") or name not in places():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = places()[name]
        value = getattr(importlib.import_module(module), attribute)
        setattr(sys.modules[package], name, value)
        return value

    return load


def _is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
