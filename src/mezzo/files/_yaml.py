"""Parses untrusted YAML into a tree with line numbers; the text cannot run code, exhaust memory or crash the parser."""

from __future__ import annotations

import os
import re
from typing import Any, Protocol

import yaml

from mezzo.errors import MezzoError, short_repr
from mezzo.files._errors import FileError
from mezzo.files._read import MiB, read_text, shown_path
from mezzo.files._tree import Scalar, SourceMark, YamlNode

_FAST_LOADER: Any = getattr(
    yaml, "CSafeLoader", yaml.SafeLoader
)  # the parser of libyaml, ten times faster, if PyYAML has it
_FAST_FROM = 64 * 1024  # characters; for shorter texts the better messages of PyYAML are worth the time
MAX_DEPTH = 48
MAX_VALUES = 20_000
"""Maximum number of values after expanding aliases; the largest public recipe has about 300."""
_INT_BITS = 64
"""Integers of more bits are refused, as they could overflow later."""
_NUMBER_LETTERS = 400  # of a number, a truth value or null; the largest float has 309 digits
_DIRECTIVES = 8
_PREFIX = "tag:yaml.org,2002:"
_MERGE = "tag:yaml.org,2002:merge"
_TEXT = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value")
_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
#: YAML 1.1 reads 5e-4 as text because it has no point; here it is a number.
_NUMBER_WITHOUT_POINT = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+")


class FaultSink(Protocol):
    """Collects the errors of a text."""

    def add(self, mark: SourceMark, text: str) -> None:
        """Add an error."""


class _FirstFault:
    """Keeps the first fault, as one line."""

    def __init__(self) -> None:
        self.line: str | None = None

    def add(self, mark: SourceMark, text: str) -> None:
        self.line = self.line or f"{mark}: {' '.join(text.split())}"


def read_yaml(
    path: str | os.PathLike[str],
    *,
    limit: int = 4 * MiB,
    max_values: int = 200_000,
    raising: type[MezzoError] = FileError,
) -> Any:
    """Return the plain data of a YAML file: text, numbers, truth values, None, and lists and dicts of these.

    Args:
        path: The file.
        limit: Largest size in bytes.
        max_values: Maximum number of values after expanding aliases; a list of 21,841 class names fits.
        raising: Class of the error.

    Raises:
        MezzoError: Of class `raising`: the first fault, as one line with file and line number.
    """
    faults = _FirstFault()
    tree = parse_yaml(read_text(path, limit=limit, raising=raising), shown_path(path), faults, max_values=max_values)
    if faults.line is not None:
        raise raising(faults.line)
    return None if tree is None else tree.plain()


class _Refused(Exception):
    """An error that ends the parsing."""

    def __init__(self, line: int | None, text: str) -> None:
        super().__init__(text)
        self.line = line


def parse_yaml(
    text: str, file: str, faults: FaultSink, *, line: int | None = 1, max_values: int = MAX_VALUES
) -> YamlNode | None:
    """Return the tree of a text, or None if it cannot be parsed.

    Args:
        text: One YAML document.
        file: Name of the text in errors.
        faults: Collects the errors; a tree can be returned in spite of errors.
        line: Number of the first line; None for a text without lines, such as an option.
        max_values: Maximum number of values after expanding aliases.
    """
    reader = _TreeBuilder(file, faults, line, max_values)
    loader = _FAST_LOADER if len(text) > _FAST_FROM else yaml.SafeLoader
    try:
        _refuse_large(text, loader, max_values)
        document = yaml.compose(text, Loader=loader)
        return None if document is None else reader.tree(document, reader.mark(document), 0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        faults.add(reader.at(mark.line if mark else None), f"not YAML: {error.problem or error.context}")
    except yaml.reader.ReaderError as error:
        place = reader.at(text.count("\n", 0, error.position))
        faults.add(place, f"not YAML: the character U+{error.character:04X} is not allowed")
    except _Refused as refused:
        faults.add(reader.at(refused.line), str(refused))
    except (
        ValueError,
        OverflowError,
    ):  # PyYAML does not catch these: an escape beyond Unicode, a version of many digits
        faults.add(reader.at(None), "not YAML: a number or an escape in it is too large")
    return None


def _refuse_large(text: str, loader: Any, max_values: int) -> None:
    """Raise if blocks are nested too deep for the recursive parser, or if there are too many values."""
    if text.count("\n%") > _DIRECTIVES:
        raise _Refused(None, f"more than {_DIRECTIVES} directives (%)")
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=loader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise _Refused(event.start_mark.line, f"nested more than {MAX_DEPTH} levels deep")
        if count > 4 * max_values:  # a value has at most four events: a key, a value and the two ends of a block
            raise _Refused(event.start_mark.line, f"more than {max_values} values")


class _TreeBuilder:
    """Converts the nodes of PyYAML into our tree."""

    def __init__(self, file: str, faults: FaultSink, first_line: int | None, max_values: int) -> None:
        self._file, self._faults, self._first_line, self._max_values = file, faults, first_line, max_values
        self._values = 0
        self._constructor = yaml.constructor.SafeConstructor()

    def at(self, line: int | None) -> SourceMark:
        """Return the place of a line that PyYAML counts from 0."""
        return SourceMark(self._file, None if line is None or self._first_line is None else self._first_line + line)

    def mark(self, node: yaml.Node) -> SourceMark:
        return self.at(node.start_mark.line)

    def tree(self, node: yaml.Node, mark: SourceMark, depth: int) -> YamlNode:
        """Return a node with everything below it."""
        self._values += 1
        line = node.start_mark.line
        if self._values > self._max_values:
            raise _Refused(line, f"more than {self._max_values} values once the aliases are written out")
        if depth > MAX_DEPTH:  # depth was checked before, so only an alias can cause this
            raise _Refused(line, f"nested more than {MAX_DEPTH} levels deep: an anchor contains itself")
        if isinstance(node, yaml.CollectionNode) and node.tag not in _COLLECTIONS:
            self._faults.add(mark, f"the tag {short_repr(node.tag)} is not used here")
        if isinstance(node, yaml.MappingNode):
            return YamlNode(self._entries(node, depth), mark)
        if isinstance(node, yaml.SequenceNode):
            return YamlNode([self.tree(item, self.mark(item), depth + 1) for item in node.value], mark)
        assert isinstance(node, yaml.ScalarNode)
        return YamlNode(self._scalar(node, mark), mark)

    def _entries(self, node: yaml.MappingNode, depth: int) -> dict[str, YamlNode]:
        own: dict[str, YamlNode] = {}
        merged: dict[str, YamlNode] = {}
        for key_node, value_node in node.value:
            mark = self.mark(key_node)
            if key_node.tag == _MERGE:
                for name, value in self._merged(value_node, depth).items():
                    merged.setdefault(name, value)  # the first that has a key wins
                continue
            key = self._key(key_node, mark)
            if key in own:
                self._faults.add(mark, f"{key!r} is written twice in one block, first in line {own[key].mark.line}")
            value = self.tree(value_node, mark, depth + 1)
            own.setdefault(key, value)
        return {**merged, **own}

    def _key(self, node: yaml.Node, mark: SourceMark) -> str:
        if isinstance(node, yaml.ScalarNode) and node.tag in _TEXT:
            return str(node.value)
        shown = short_repr(node.value) if isinstance(node, yaml.ScalarNode) else "(a list or block)"
        self._faults.add(mark, f"the key {shown} is not text; keys must be names")
        return shown

    def _merged(self, node: yaml.Node, depth: int) -> dict[str, YamlNode]:
        """Return the entries of a merge key `<<`: of one block, or of several, where the first wins."""
        tree = self.tree(node, self.mark(node), depth + 1)
        blocks = [tree] if isinstance(tree.value, dict) else tree.items
        if not blocks or not all(isinstance(item.value, dict) for item in blocks):
            self._faults.add(tree.mark, "'<<' needs a block, or a list of blocks")
        found: dict[str, YamlNode] = {}
        for item in blocks:
            for name, value in item.block.items():
                found.setdefault(name, value)
        return found

    def _scalar(self, node: yaml.ScalarNode, mark: SourceMark) -> Scalar:
        if node.tag in _TEXT:
            text = str(node.value)
            plain = node.style is None and _NUMBER_WITHOUT_POINT.fullmatch(text)
            return float(text) if plain else text
        if len(node.value) > _NUMBER_LETTERS:  # PyYAML takes quadratic time for 1:1:1:..., a number in base 60
            self._faults.add(mark, f"the number {short_repr(node.value)} is too large")
            return None
        try:
            value: Any = self._constructor.construct_object(node)
        except (ValueError, LookupError, ArithmeticError, AttributeError, yaml.constructor.ConstructorError):
            self._faults.add(mark, f"{short_repr(node.value)} cannot be read as {node.tag.removeprefix(_PREFIX)}")
            return None
        if isinstance(value, int) and value.bit_length() > _INT_BITS:
            self._faults.add(mark, f"the number {short_repr(node.value)} is too large")
            return None
        if value is None or isinstance(value, (bool, int, float)):
            return value
        self._faults.add(
            mark, f"{short_repr(node.value)}: a value of kind {node.tag.removeprefix(_PREFIX)} is not used here"
        )
        return None
