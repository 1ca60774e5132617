"""The content of a configuration file, with the line of every value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Scalar: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class SourceMark:
    """The position of a value: a file and line, or an option of the command line."""

    file: str
    line: int | None = None

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class YamlNode:
    """A value with its position. The position of a value in a block is that of its key."""

    value: Scalar | dict[str, YamlNode] | list[YamlNode]
    mark: SourceMark

    @property
    def block(self) -> dict[str, YamlNode]:
        """The entries, if this is a block; an empty dict otherwise."""
        return self.value if isinstance(self.value, dict) else {}

    @property
    def items(self) -> list[YamlNode]:
        """The entries, if this is a list; an empty one otherwise."""
        return self.value if isinstance(self.value, list) else []

    def get(self, key: str) -> Any:
        """Return the plain value of an entry, None if there is none."""
        return self.block[key].plain() if key in self.block else None

    def mark_of(self, key: str) -> SourceMark:
        """Return the position of an entry, or of the block if the entry is missing."""
        return self.block[key].mark if key in self.block else self.mark

    def plain(self) -> Any:
        """Return the value without positions."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def with_entries(self, entries: Mapping[str, YamlNode]) -> YamlNode:
        """Return the block with entries added or replaced."""
        return YamlNode({**self.block, **entries}, self.mark)

    def without(self, *keys: str) -> YamlNode:
        """Return the block without some entries; anything else as it is."""
        if not isinstance(self.value, dict):
            return self
        return YamlNode({key: node for key, node in self.block.items() if key not in keys}, self.mark)

    def with_defaults(self, **values: Any) -> YamlNode:
        """Return the block with defaults for missing entries."""
        lacking = {key: mark_all(value, self.mark) for key, value in values.items() if key not in self.block}
        return self.with_entries(lacking)


def mark_all(value: Any, mark: SourceMark) -> YamlNode:
    """Return plain data as a tree in which every value has the same position."""
    if isinstance(value, Mapping):
        return YamlNode({str(key): mark_all(item, mark) for key, item in value.items()}, mark)
    if isinstance(value, (list, tuple)):
        return YamlNode([mark_all(item, mark) for item in value], mark)
    return YamlNode(value, mark)
