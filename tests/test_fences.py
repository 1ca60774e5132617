"""Fences: torch's private interfaces stay in `mezzo._torch`, and packages keep out of each other's private parts.

The whole tree is parsed, nothing is imported. What still breaks a rule is listed in `fences/*.txt`; the lists must match
exactly, so they can only become shorter. The checker itself is tested below.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "mezzo"
LISTS = Path(__file__).parent / "fences"
HOME = "_torch"
"""The package that may use torch's private interfaces."""

NESTED = (
    "model.callbacks",
    "model.metric",
    *(f"vision.{name}" for name in "data models recipes lite train infer".split()),
)
"""Packages inside of packages: each has its own private modules."""

ALLOWED = {
    "_version": "Tensor: counts changes in place; in every release, read per tensor and step",
    "_base": "Tensor: what a view is a view of; in every release",
    "_values": "Tensor: of a sparse one that is not coalesced; `values()` refuses it",
    "_indices": "Tensor: the same",
    "_parameters": "nn.Module: documented for subclasses; in every release",
    "_buffers": "nn.Module: the same",
    "_modules": "nn.Module: the same",
    "_schema": "OpOverload: arguments of an operator; in every release",
    "_fields": "named tuples: public in spite of the underscore",
    "_replace": "named tuples: the same",
    "_context": "asyncio.Handle: the context of a callback (amp/_tasks.py)",
}
"""Private attributes that may be used everywhere, and why. Keep it short: everything else goes through `mezzo._torch`."""

SETTINGS = ("torch.backends", "torch.compiler.config")
"""Modules of torch whose attributes are settings: assigning to them is what they are for."""

NAMES_IN_FILES = {"checkpoint/_torch_file.py": "names that files of torch.save hold; nothing is looked up by them"}
"""Files whose texts may be private names of torch."""

_MODULE_NAME = re.compile(r"torch(\.\w+)*\._[a-zA-Z]\w*(\.\w+)*")


class Breach(NamedTuple):
    """One place where a rule is broken."""

    path: str
    line: int
    rule: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.what}"

    @property
    def entry(self) -> str:
        """The line of a list: without the line number, which changes with every edit."""
        return f"{self.path}: {self.what}"


TORCH = "private interface of torch outside mezzo._torch"
PATCH = "patch of torch outside mezzo._torch"
IMPORT = "import of another package's private module"
REACH = "private attribute of another package's object"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def package_of(path: Path, root: Path) -> str:
    """Return the package under mezzo that a file lies in, such as `amp` or `vision.data`; '' for none."""
    return owner_of(list(path.relative_to(root).parts))


def owner_of(parts: list[str]) -> str:
    """Return the package of a name below mezzo: two parts where a package lies in another."""
    if len(parts) > 2 and ".".join(parts[:2]) in NESTED:
        return ".".join(parts[:2])
    return parts[0] if len(parts) > 1 else ""


def imports_of(tree: ast.AST, module: list[str]) -> Iterator[tuple[ast.stmt, str, str]]:
    """Yield each import statement with the dotted name that it loads, made absolute, and the local name it gets."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name, alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(filter(None, [*module[: len(module) - node.level], base]))
            for alias in node.names:
                yield node, f"{base}.{alias.name}", alias.asname or alias.name


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yield the private names that a module defines: functions, classes, their attributes, module-level names."""
    bodies = [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr
    for body in bodies:
        for statement in ast.walk(body) if isinstance(body, ast.ClassDef) else body.body:
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            for target in (each for each in targets if each is not None):
                names = [each.id for each in ast.walk(target) if isinstance(each, ast.Name)]
                yield from names
                if names == ["__slots__"]:
                    values = ast.walk(statement.value)
                    yield from (each.value for each in values if isinstance(each, ast.Constant))


def _is_self(node: ast.AST) -> bool:
    is_super = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    return is_super or (isinstance(node, ast.Name) and node.id in ("self", "cls"))


class Checker:
    """Reads one file; `owners` says in which packages each private name is defined."""

    def __init__(self, path: Path, root: Path, owners: dict[str, set[str]]) -> None:
        self._path, self._own = path.relative_to(root).as_posix(), package_of(path, root)
        self._owners = owners
        self._tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        module = ["mezzo", *path.relative_to(root).with_suffix("").parts]
        self._imports = list(imports_of(self._tree, module))
        self._names = self._local_names()

    def _local_names(self) -> dict[str, str]:
        """Return the dotted name of each local name that is imported, or assigned from an imported one."""
        names: dict[str, str] = {}
        for node, dotted, local in self._imports:
            is_whole = isinstance(node, ast.Import) and local == dotted.partition(".")[0]
            names[local] = local if is_whole else dotted
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                dotted = self._dotted(node.value, names)
                if dotted and dotted.startswith("torch"):
                    names[node.targets[0].id] = dotted
        return names

    def _dotted(self, node: ast.AST, names: dict[str, str] | None = None) -> str:
        """Return the dotted name that an expression spells, from an imported name on; '' for any other expression."""
        if isinstance(node, ast.Name):
            return (self._names if names is None else names).get(node.id, "")
        base = self._dotted(node.value, names) if isinstance(node, ast.Attribute) else ""
        return f"{base}.{node.attr}" if base else ""

    def breaches(self) -> Iterator[Breach]:
        for node, rule, what in self._found():
            yield Breach(self._path, node.lineno, rule, what)

    def _found(self) -> Iterator[tuple[ast.AST, str, str]]:
        for node, dotted, _ in self._imports:
            yield from self._check_import(node, dotted)
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Attribute):
                if is_private(node.attr):
                    yield from self._check_attribute(node, node.value, node.attr)
                if not isinstance(node.ctx, ast.Load):
                    yield from self._check_patch(node, node.value, node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _MODULE_NAME.fullmatch(node.value):
                if self._own != HOME and self._path not in NAMES_IN_FILES:
                    yield node, TORCH, node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
                yield from self._check_call(node)

    def _check_import(self, node: ast.AST, dotted: str) -> Iterator[tuple[ast.AST, str, str]]:
        parts = dotted.split(".")
        if self._own != HOME and (parts[0] == "ctypes" or (parts[0] == "torch" and any(map(is_private, parts)))):
            yield node, TORCH, dotted
        if parts[0] == "mezzo" and len(parts) > 2:
            owner = owner_of(parts[1:])
            inside = parts[1 + len(owner.split(".")) :]
            if owner != self._own and inside and is_private(inside[0]):
                yield node, IMPORT, dotted

    def _check_call(self, node: ast.Call) -> Iterator[tuple[ast.AST, str, str]]:
        assert isinstance(node.func, ast.Name)
        name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
        if node.func.id in ("getattr", "hasattr", "setattr", "delattr") and isinstance(name, str) and is_private(name):
            yield from self._check_attribute(node, node.args[0], name)
        if node.func.id in ("setattr", "delattr"):
            yield from self._check_patch(node, node.args[0], str(name or "..."))

    def _check_attribute(self, node: ast.AST, of: ast.AST, name: str) -> Iterator[tuple[ast.AST, str, str]]:
        if name in ALLOWED or name.startswith("_mezzo"):
            return
        dotted, owners = self._dotted(of), self._owners.get(name, set())
        root = dotted.partition(".")[0]
        if root not in ("", "torch", "mezzo"):
            return  # a module of somebody else's
        if root == "torch" or not owners:
            if self._own != HOME:
                yield node, TORCH, f"{dotted or ast.unparse(of)}.{name}"
        elif self._own not in owners and not _is_self(of):
            yield node, REACH, f"{ast.unparse(of)}.{name}"

    def _check_patch(self, node: ast.AST, of: ast.AST, name: str) -> Iterator[tuple[ast.AST, str, str]]:
        dotted = self._dotted(of)
        is_torch = dotted.partition(".")[0] == "torch"
        if is_torch and not dotted.startswith(SETTINGS) and self._own != HOME:
            yield node, PATCH, f"{dotted}.{name}"


def breaches(root: Path) -> list[Breach]:
    """Return every breach under `root`, each place once."""
    paths = sorted(root.rglob("*.py"))
    owners: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        for name in private_names(ast.parse(path.read_text(encoding="utf-8"))):
            if is_private(name):
                owners[name].add(package_of(path, root))
    found = [breach for path in paths for breach in Checker(path, root, owners).breaches()]
    whole = {(each.path, each.line, each.what) for each in found}
    # `torch._C._x` is two attributes: the longer one is enough
    return [
        each
        for each in dict.fromkeys(found)
        if not any(other[:2] == each[:2] and other[2].startswith(f"{each.what}.") for other in whole)
    ]


@pytest.fixture(scope="module")
def found() -> list[Breach]:
    return breaches(SOURCE)


@pytest.mark.parametrize(
    ("rules", "name", "cure"),
    [
        (
            (TORCH, PATCH),
            "torch_private.txt",
            "put the mechanism into mezzo._torch, with a test in tests/torch_mechanisms",
        ),
        ((IMPORT,), "private_imports.txt", "import the name from the package, which exports it if others need it"),
        ((REACH,), "private_attributes.txt", "give the object a method without an underscore"),
    ],
    ids=("torch", "imports", "attributes"),
)
def test_breaches_are_those_of_the_list_and_no_others(
    found: list[Breach], rules: tuple[str, ...], name: str, cure: str
) -> None:
    lines = (LISTS / name).read_text(encoding="utf-8").splitlines()
    listed = [line for line in lines if line and not line.startswith("#")]
    here = [breach for breach in found if breach.rule in rules]
    new = [str(breach) for breach in here if breach.entry not in listed]
    assert not new, f"{cure}:\n" + "\n".join(new)
    gone = sorted(set(listed) - {breach.entry for breach in here})
    assert not gone, f"no longer broken, take these lines out of tests/fences/{name}:\n" + "\n".join(gone)
    assert listed == sorted(set(listed)), f"tests/fences/{name} is sorted, each line once"


def test_every_allowed_attribute_is_used() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    assert [name for name in ALLOWED if not re.search(rf"(\.|\"){name}\b", text)] == []


@pytest.mark.parametrize(
    ("path", "code", "rule", "what"),
    [
        ("amp/_a.py", "import torch\nx = torch._foreach_add", TORCH, "torch._foreach_add"),
        ("amp/_a.py", "import torch\ntorch._C._x()", TORCH, "torch._C._x"),
        ("amp/_a.py", "import torch\n_C = torch.utils\n_C._x", TORCH, "torch.utils._x"),
        ("amp/_a.py", "from torch import nn\nnn.Module._apply", TORCH, "torch.nn.Module._apply"),
        ("amp/_a.py", "import torch.utils as u\nu._x", TORCH, "torch.utils._x"),
        ("amp/_a.py", "from torch._C import x", TORCH, "torch._C.x"),
        ("amp/_a.py", "from torch.nn.modules.conv import _ConvNd", TORCH, "torch.nn.modules.conv._ConvNd"),
        ("amp/_a.py", "import torch._dynamo", TORCH, "torch._dynamo"),
        ("amp/_a.py", "def f():\n    import ctypes", TORCH, "ctypes"),
        ("amp/_a.py", "import torch\ngetattr(torch.autograd, '_x', None)", TORCH, "torch.autograd._x"),
        ("amp/_a.py", "import sys\nsys.modules.get('torch._dynamo')", TORCH, "torch._dynamo"),
        ("amp/_a.py", "def f(optimizer):\n    optimizer._opt_called = True", TORCH, "optimizer._opt_called"),
        ("amp/_a.py", "def f(x):\n    return getattr(x, '_local_tensor')", TORCH, "x._local_tensor"),
        ("amp/_a.py", "class A:\n    def f(self):\n        self._unheard_of()", TORCH, "self._unheard_of"),
        ("amp/_a.py", "from torch import nn\nnn.Module.forward = None", PATCH, "torch.nn.Module.forward"),
        ("amp/_a.py", "from torch import nn\nsetattr(nn.Linear, 'forward', None)", PATCH, "torch.nn.Linear.forward"),
        ("amp/_a.py", "import torch\ntorch.compile = None", PATCH, "torch.compile"),
        ("static/_a.py", "from mezzo.amp._b import x", IMPORT, "mezzo.amp._b.x"),
        ("static/_a.py", "from mezzo.amp import _b", IMPORT, "mezzo.amp._b"),
        ("static/_a.py", "import mezzo.amp._b", IMPORT, "mezzo.amp._b"),
        ("static/_a.py", "from ..amp._b import x", IMPORT, "mezzo.amp._b.x"),
        ("_a.py", "from mezzo.amp._b import x", IMPORT, "mezzo.amp._b.x"),
        ("vision/train/_a.py", "from mezzo.vision.data._b import x", IMPORT, "mezzo.vision.data._b.x"),
        ("vision/a.py", "from mezzo.vision.data._b import x", IMPORT, "mezzo.vision.data._b.x"),
        ("tipc/_a.py", "from mezzo.vision.data import _b", IMPORT, "mezzo.vision.data._b"),
        ("model/_a.py", "from mezzo.model.metric._b import x", IMPORT, "mezzo.model.metric._b.x"),
        ("model/metric/_a.py", "from mezzo.model._b import x", IMPORT, "mezzo.model._b.x"),
        ("static/_a.py", "def f(scaler):\n    scaler._note()", REACH, "scaler._note"),
        ("static/_a.py", "def f(b):\n    b.scaler._kept = 1", REACH, "b.scaler._kept"),
        ("static/_a.py", "def f(b):\n    hasattr(b, '_slot')", REACH, "b._slot"),
    ],
)
def test_checker_names_rule_and_expression(tmp_path: Path, path: str, code: str, rule: str, what: str) -> None:
    (tmp_path / "amp").mkdir()
    scaler = "class A:\n    __slots__ = ('_slot',)\n    def _note(self):\n        self._kept = 0\n"
    (tmp_path / "amp" / "_b.py").write_text(scaler)
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(code)
    (breach,) = breaches(tmp_path)
    assert (breach.path, breach.rule, breach.what) == (path, rule, what)
    assert breach.line == len(code.splitlines())


@pytest.mark.parametrize(
    ("path", "code"),
    [
        (
            "_torch/a.py",
            "import ctypes\nimport torch\nx = torch._C._y\nfrom torch._ops import z\ntorch.nn.Module.f = x",
        ),
        ("amp/_a.py", "import torch\nprint(torch.__version__)\ntorch.backends.cudnn.benchmark = True"),
        ("amp/_a.py", "def f(tensor):\n    return tensor._version"),
        ("amp/_a.py", "import sys, os\nsys._getframe()\nos._exit(1)"),
        ("amp/_a.py", "from mezzo._torch.foreach import x\nfrom mezzo import _version\nfrom mezzo.amp._b import y"),
        ("amp/_a.py", "def f(other):\n    return other._note()"),
        ("model/_a.py", "from mezzo.model._b import y\nfrom mezzo.model.metric import z"),
        ("vision/data/_a.py", "from mezzo.vision.data._b import y"),
        ("amp/_a.py", '"""Some text about torch._dynamo, which is no name."""'),
        ("static/_a.py", "from mezzo.amp import A\nclass B(A):\n    def f(self):\n        super()._note()"),
        ("static/_a.py", "class B:\n    def f(self, ctx):\n        ctx._mezzo_state = self._x = 1"),
    ],
)
def test_checker_passes_what_is_allowed(tmp_path: Path, path: str, code: str) -> None:
    (tmp_path / "amp").mkdir()
    (tmp_path / "amp" / "_b.py").write_text("class A:\n    def _note(self): ...\n")
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(code)
    assert breaches(tmp_path) == []
