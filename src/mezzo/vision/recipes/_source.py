"""Merges a recipe file with its base files."""

from __future__ import annotations

import os
from pathlib import Path

from mezzo.files import FileError, SourceMark, YamlNode, parse_yaml, read_bytes, short_repr, shown_path
from mezzo.vision.recipes._errors import FaultLog

MAX_BYTES = 256 * 1024
MAX_FILES = 32
BASE, INHERITED = "_base_", "_inherited_"


def read_tree(path: Path, faults: FaultLog) -> YamlNode:
    """Return the merged tree of a file and its bases; unreadable files are added to the faults.

    `_base_` names a file, relative to the one it stands in, or a list of them of which later ones win. Blocks are merged
    entry by entry, lists and values are replaced; a block with `_inherited_: False` replaces that of the base.
    """
    tree = _Files(faults).read(path, SourceMark(str(path)), ())
    return _clean(YamlNode({}, SourceMark(str(path))) if tree is None else tree, faults)


class _Files:
    """Reads files and their bases, and limits their number."""

    def __init__(self, faults: FaultLog) -> None:
        self._faults, self._count = faults, 0

    def read(self, path: Path, named_at: SourceMark, above: tuple[Path, ...]) -> YamlNode | None:
        """Return the merged tree of a file.

        Args:
            path: The file.
            named_at: Where faults of the file as a whole belong.
            above: The files that led here, from the first on.
        """
        real = Path(os.path.realpath(path))  # Path.resolve raises for links in a circle
        self._count += 1
        if real in above:
            chain = " -> ".join(item.name for item in (*above[above.index(real) :], real))
            self._faults.add(named_at, f"{BASE} goes in a circle: {chain}")
            return None
        if self._count > MAX_FILES:
            self._faults.add(named_at, f"{BASE} leads to more than {MAX_FILES} files")
            return None
        tree = self._parse(path, named_at, is_base=bool(above))
        if tree is None or BASE not in tree.block:
            return tree
        merged = YamlNode({}, tree.mark)
        for name in self._bases(tree.block[BASE]):
            base = self.read(path.parent / str(name.value), name.mark, (*above, real))
            merged = merged if base is None else merge(merged, base)
        return merge(merged, tree.without(BASE))

    def _bases(self, node: YamlNode) -> list[YamlNode]:
        names = node.value if isinstance(node.value, list) else [node]
        good = [name for name in names if isinstance(name.value, str) and _is_file_name(name.value)]
        if len(good) < len(names) or not names:
            self._faults.add(
                node.mark, f"{BASE}: {short_repr(node.plain())}: must be the name of a file, or a list of names"
            )
        return good

    def _parse(self, path: Path, named_at: SourceMark, *, is_base: bool) -> YamlNode | None:
        text = self._text(path, named_at, what=f"{BASE}: {path}: " if is_base else "")
        if text is None:
            return None
        before = len(self._faults)
        tree = parse_yaml(text, str(path), self._faults)
        if tree is not None and not isinstance(tree.value, dict):
            self._faults.add(tree.mark, "a configuration is a block of settings (key: value), this is not one")
            return None
        if tree is None and len(self._faults) == before:
            self._faults.add(SourceMark(str(path)), "the file is empty")
        return tree

    def _text(self, path: Path, named_at: SourceMark, what: str) -> str | None:
        try:
            data = read_bytes(path, limit=MAX_BYTES)
        except FileError as error:
            self._faults.add(named_at, what + str(error).removeprefix(f"{shown_path(path)}: "))
            return None
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            self._faults.add(SourceMark(str(path), data.count(b"\n", 0, error.start) + 1), "not UTF-8 text")
            return None


def _is_file_name(text: str) -> bool:
    """Return whether a text can be a file name: without zero bytes and unpaired surrogates."""
    try:
        return bool(text) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def merge(base: YamlNode, over: YamlNode) -> YamlNode:
    """Return a block with the entries of another merged over it; see `read_tree`."""
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    if over.get(INHERITED) is False:
        return over.without(INHERITED)
    both = {key: merge(base.block[key], node) for key, node in over.block.items() if key in base.block}
    return YamlNode({**base.block, **over.block, **both}, over.mark)


def _clean(node: YamlNode, faults: FaultLog) -> YamlNode:
    """Return the tree without the entries that control merging."""
    if isinstance(node.value, list):
        return YamlNode([_clean(item, faults) for item in node.value], node.mark)
    if INHERITED in node.block and not isinstance(node.get(INHERITED), bool):
        faults.add(node.mark_of(INHERITED), f"{INHERITED}: {short_repr(node.get(INHERITED))}: must be True or False")
    if isinstance(node.value, dict):
        return YamlNode({key: _clean(item, faults) for key, item in node.block.items() if key != INHERITED}, node.mark)
    return node
