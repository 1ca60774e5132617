"""YAML text to a tree with lines; nothing in the text can run code, use up memory or crash the reader."""

from __future__ import annotations

import re
from typing import Any

import yaml

from mezzo.config._errors import Faults, short
from mezzo.config._tree import Mark, Node, Scalar

MAX_DEPTH = 48
MAX_VALUES = 20_000  # after aliases are written out; the largest public recipe has some 300
_PREFIX = "tag:yaml.org,2002:"
_MERGE = "tag:yaml.org,2002:merge"
_TEXT = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value")
_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
#: YAML 1.1 takes 5e-4 for text because it has no point; everyone who writes it means a number.
_NUMBER_WITHOUT_POINT = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+")


class _Refused(Exception):
    """The whole text is refused at a place."""

    def __init__(self, line: int | None, text: str) -> None:
        super().__init__(text)
        self.line = line


def parse_yaml(text: str, file: str, faults: Faults, *, line: int | None = 1) -> Node | None:
    """Return the tree of a text, or None after noting why there is none.

    Args:
        text: One YAML document.
        file: How faults name the text.
        faults: Where they are noted. A tree can come back although there were some.
        line: Number of the first line; None for a text that has no lines of its own, as an option.
    """
    reader = _Reader(file, faults, line)
    try:
        _refuse_deep(text)
        document = yaml.compose(text, Loader=yaml.SafeLoader)
        return None if document is None else reader.tree(document, reader.mark(document), 0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        faults.add(reader.at(mark.line if mark else None), f"not YAML: {error.problem or error.context}")
    except yaml.reader.ReaderError as error:
        place = reader.at(text.count("\n", 0, error.position))
        faults.add(place, f"not YAML: the character U+{error.character:04X} is not allowed")
    except _Refused as refused:
        faults.add(reader.at(refused.line), str(refused))
    except (ValueError, OverflowError):  # PyYAML lets these out: an escape beyond Unicode, a version of many digits
        faults.add(reader.at(None), "not YAML: a number or an escape in it is too large")
    return None


def _refuse_deep(text: str) -> None:
    """Raise if blocks are nested too deep for the reader, which calls itself once a level."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise _Refused(event.start_mark.line, f"nested more than {MAX_DEPTH} levels deep")


class _Reader:
    """Turns what PyYAML composed into our tree."""

    def __init__(self, file: str, faults: Faults, first_line: int | None) -> None:
        self._file, self._faults, self._first_line = file, faults, first_line
        self._values = 0
        self._constructor = yaml.constructor.SafeConstructor()

    def at(self, line: int | None) -> Mark:
        """Return the place of a line that PyYAML counts from 0."""
        return Mark(self._file, None if line is None or self._first_line is None else self._first_line + line)

    def mark(self, node: yaml.Node) -> Mark:
        return self.at(node.start_mark.line)

    def tree(self, node: yaml.Node, mark: Mark, depth: int) -> Node:
        """Return a node with everything below it."""
        self._values += 1
        line = node.start_mark.line
        if self._values > MAX_VALUES:
            raise _Refused(line, f"more than {MAX_VALUES} values once the aliases are written out")
        if depth > MAX_DEPTH:  # depth was checked before, so only an alias leads here
            raise _Refused(line, f"nested more than {MAX_DEPTH} levels deep: an anchor contains itself")
        if isinstance(node, yaml.CollectionNode) and node.tag not in _COLLECTIONS:
            self._faults.add(mark, f"the tag {short(node.tag)} is not used here")
        if isinstance(node, yaml.MappingNode):
            return Node(self._entries(node, depth), mark)
        if isinstance(node, yaml.SequenceNode):
            return Node([self.tree(item, self.mark(item), depth + 1) for item in node.value], mark)
        assert isinstance(node, yaml.ScalarNode)
        return Node(self._scalar(node, mark), mark)

    def _entries(self, node: yaml.MappingNode, depth: int) -> dict[str, Node]:
        own: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key_node, value_node in node.value:
            mark = self.mark(key_node)
            if key_node.tag == _MERGE:
                merged = {**self._merged(value_node, depth), **merged}  # the first that has a key wins
                continue
            key = self._key(key_node, mark)
            if key in own:
                self._faults.add(mark, f"{key!r} is written twice in one block, first in line {own[key].mark.line}")
            value = self.tree(value_node, mark, depth + 1)
            own.setdefault(key, value)
        return {**merged, **own}

    def _key(self, node: yaml.Node, mark: Mark) -> str:
        value = self._scalar(node, mark) if isinstance(node, yaml.ScalarNode) else None
        if isinstance(value, str):
            return value
        shown = short(node.value) if isinstance(node, yaml.ScalarNode) else "(a list or block)"
        self._faults.add(mark, f"the key {shown} is no text; keys are names")
        return shown

    def _merged(self, node: yaml.Node, depth: int) -> dict[str, Node]:
        """Return the entries that `<<` brings: of one block, or of several of which the first wins."""
        tree = self.tree(node, self.mark(node), depth + 1)
        blocks = [tree] if isinstance(tree.value, dict) else tree.items
        if not blocks or not all(isinstance(item.value, dict) for item in blocks):
            self._faults.add(tree.mark, "'<<' needs a block, or a list of blocks")
        found: dict[str, Node] = {}
        for item in blocks:
            found = {**item.block, **found}
        return found

    def _scalar(self, node: yaml.ScalarNode, mark: Mark) -> Scalar:
        if node.tag in _TEXT:
            text = str(node.value)
            plain = node.style is None and _NUMBER_WITHOUT_POINT.fullmatch(text)
            return float(text) if plain else text
        try:
            value: Any = self._constructor.construct_object(node)
        except (ValueError, LookupError, ArithmeticError, AttributeError, yaml.constructor.ConstructorError):
            self._faults.add(mark, f"{short(node.value)} cannot be read as {node.tag.removeprefix(_PREFIX)}")
            return None
        if value is None or isinstance(value, (bool, int, float)):
            return value
        self._faults.add(
            mark, f"{short(node.value)}: a value of kind {node.tag.removeprefix(_PREFIX)} is not used here"
        )
        return None
