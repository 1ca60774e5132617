"""Measure the tree: `python tools/measures.py d34c384 HEAD` prints a Markdown table with a column per revision.

An argument that is a folder is measured as it is on the disk. Only the standard library is used, and nothing of the tree is
imported: both sides are counted by the same rules, whatever they contain.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tarfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

MECHANISMS = "tests/torch_mechanisms/"
PUBLIC_IN_SPITE = {"_version", "_base", "_values", "_indices", "_parameters", "_buffers", "_modules", "_schema"}
PUBLIC_IN_SPITE |= {"_fields", "_replace", "_context"}
"""Attributes of torch's and Python's objects that may be used everywhere; tests/test_fences.py has the reasons."""
_TORCH_MODULE = re.compile(r"torch(\.\w+)*\._[a-zA-Z]")


class Tree:
    """The Python files of `src` and `tests`, parsed."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = texts
        self.parsed = {path: ast.parse(text) for path, text in texts.items()}
        self.source = {path: tree for path, tree in self.parsed.items() if path.startswith("src/mezzo/")}
        self.tests = {path: tree for path, tree in self.parsed.items() if path.startswith("tests/")}

    def lines(self, files: dict[str, ast.Module]) -> str:
        """Return the number of lines and of files."""
        count = sum(len(self.texts[path].splitlines()) for path in files)
        return f"{count:,} in {len(files)}"


def read_tree(place: str) -> Tree:
    """Return the tree of a folder, or of a revision of the repository that the working directory is in."""
    if Path(place).is_dir():
        folders = [Path(place) / "src" / "mezzo", Path(place) / "tests"]
        files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
        return Tree({path.relative_to(place).as_posix(): path.read_text("utf-8") for path in files})
    packed = subprocess.run(["git", "archive", place, "src/mezzo", "tests"], capture_output=True, check=True).stdout
    texts = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for entry in archive:
            file = archive.extractfile(entry) if entry.name.endswith(".py") else None
            if file is not None:
                texts[entry.name] = file.read().decode("utf-8")
    return Tree(texts)


def module_of(path: str) -> str:
    """Return the dotted name of a source file.

    >>> module_of("src/mezzo/amp/__init__.py"), module_of("src/mezzo/amp/_ops.py")
    ('mezzo.amp', 'mezzo.amp._ops')
    """
    return path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def package_of(path: str) -> str:
    """Return the package that a source file belongs to: its folder; a folder of a folder counts on its own."""
    return path.removeprefix("src/").rpartition("/")[0].replace("/", ".")


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names that a file imports; there are no relative imports in the tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_private(name: str) -> bool:
    """Whether a name begins with one underscore."""
    return name.startswith("_") and not name.endswith("__")


def private_owner(dotted: str) -> str | None:
    """Return the package that the first private part of a name of mezzo lies in; None if no part is private.

    >>> private_owner("mezzo.amp._ops.OPS"), private_owner("mezzo.amp.auto_cast")
    ('mezzo.amp', None)
    """
    parts = dotted.split(".")
    if parts[0] != "mezzo" or parts[:2] == ["mezzo", "_torch"]:  # which is there for all packages
        return None
    index = next((number for number, part in enumerate(parts) if is_private(part)), None)
    return None if index is None else ".".join(parts[:index])


def foreign_imports(tree: Tree) -> int:
    """Count the imports of a private module, or a name in it, from outside of the package that it lies in."""
    count = 0
    for path, parsed in tree.source.items():
        own = f"{package_of(path)}."
        owners = (private_owner(dotted) for dotted in imports(parsed))
        count += sum(owner is not None and not own.startswith(f"{owner}.") for owner in owners)
    return count


def foreign_attributes(tree: Tree) -> int:
    """Count accesses to a private attribute of an object that only other packages define."""
    owners: dict[str, set[str]] = defaultdict(set)
    for path, parsed in tree.source.items():
        for node in ast.walk(parsed):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                owners[node.name].add(package_of(path))
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                owners[node.id if isinstance(node, ast.Name) else node.attr].add(package_of(path))
    count = 0
    for path, parsed in tree.source.items():
        for node in ast.walk(parsed) if not path.startswith("src/mezzo/_torch/") else ():
            if isinstance(node, ast.Attribute) and is_private(node.attr) and not _is_own(node.value):
                if node.attr in PUBLIC_IN_SPITE or node.attr.startswith("_mezzo"):
                    continue
                known = owners.get(node.attr, set())
                count += bool(known) and package_of(path) not in known
    return count


def _is_own(node: ast.AST) -> bool:
    is_super = isinstance(node, ast.Call) and ast.unparse(node.func) == "super"
    return is_super or (isinstance(node, ast.Name) and node.id in ("self", "cls"))


def files_on_private_torch(tree: Tree) -> str:
    """Count the files that name `torch._*` or import ctypes, and those of them outside of mezzo._torch."""
    found = [path for path, parsed in tree.source.items() if _uses_private_torch(parsed)]
    outside = [path for path in found if not path.startswith("src/mezzo/_torch/")]
    return f"{len(found)}, {len(outside)} of them outside of `_torch`"


def _uses_private_torch(parsed: ast.Module) -> bool:
    if any(dotted.startswith("ctypes") or _TORCH_MODULE.match(dotted) for dotted in imports(parsed)):
        return True
    attributes = (ast.unparse(node) for node in ast.walk(parsed) if isinstance(node, ast.Attribute))
    return any(_TORCH_MODULE.match(text) for text in attributes)


def namesakes(tree: Tree) -> str:
    """Count the names that public classes of more than one package have."""
    homes: dict[str, set[str]] = defaultdict(set)
    for path, parsed in tree.source.items():
        for node in parsed.body:
            if isinstance(node, ast.ClassDef) and not is_private(node.name):
                homes[node.name].add(package_of(path))
    shared = sorted(name for name, packages in homes.items() if len(packages) > 1)
    return f"{len(shared)}" + (f" ({', '.join(shared)})" if shared else "")


def tests_on_private_modules(tree: Tree) -> str:
    """Count the test files that import a private module of mezzo, and those of them that do not test a mechanism."""
    found = [path for path, parsed in tree.tests.items() if any(map(_is_private_import, imports(parsed)))]
    others = [path for path in found if not path.startswith(MECHANISMS)]
    return f"{len(found)} of {len(tree.tests)}; without `{MECHANISMS}` {len(others)}"


def _is_private_import(dotted: str) -> bool:
    parts = dotted.split(".")
    return parts[0] == "mezzo" and any(is_private(part) for part in parts[1:])


def profile_branches(tree: Tree) -> int:
    """Count the comparisons of a profile's name in mezzo.tipc."""
    count = 0
    for path, parsed in tree.source.items():
        for node in ast.walk(parsed) if path.startswith("src/mezzo/tipc/") else ():
            if isinstance(node, ast.Compare):
                sides = [ast.unparse(each) for each in (node.left, *node.comparators)]
                count += any(re.search(r"profile\.name$", side) for side in sides)
            elif isinstance(node, ast.Match):
                count += ast.unparse(node.subject).endswith("profile.name")
    return count


def device_parsers(tree: Tree) -> str:
    """Count the functions that know both words for a GPU, `gpu` and `cuda`: a heuristic, it misses and adds a few."""
    found = []
    for path, parsed in tree.source.items():
        for node in ast.walk(parsed):
            if isinstance(node, ast.FunctionDef):
                texts = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
                if {"gpu", "cuda"} <= {text for text in texts if isinstance(text, str)}:
                    found.append(f"{module_of(path).removeprefix('mezzo.')}.{node.name}")
    return f"{len(found)}" + (f" ({', '.join(sorted(found))})" if found else "")


MEASURES: dict[str, Callable[[Tree], object]] = {
    "lines of source, in files": lambda tree: tree.lines(tree.source),
    "lines of tests, in files": lambda tree: tree.lines(tree.tests),
    "imports of foreign private modules": foreign_imports,
    "private attributes of foreign objects": foreign_attributes,
    "files that touch `torch._*` or ctypes": files_on_private_torch,
    "names that classes of two packages share": namesakes,
    "test files on private modules": tests_on_private_modules,
    "branches on a profile's name in `tipc`": profile_branches,
    "functions that parse names of devices": device_parsers,
}


def main(places: list[str]) -> None:
    """Print the table."""
    trees = [read_tree(place) for place in places]
    print(f"| measure | {' | '.join(places)} |")
    print("|---" * (1 + len(places)) + "|")
    for name, measure in MEASURES.items():
        print(f"| {name} | {' | '.join(str(measure(tree)) for tree in trees)} |")


if __name__ == "__main__":
    main(sys.argv[1:] or ["HEAD"])
