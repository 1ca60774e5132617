"""Imports go downwards only (design.md, section 1): the whole tree is parsed, and the checker itself is tested."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "mezzo"
PACKAGE = "mezzo"

# From top to bottom. A layer imports the layers of the rows below it; not its neighbours in its own row.
ROWS = (
    ("cli",),
    ("tipc",),
    ("bench", "train"),
    ("export",),
    ("infer",),
    ("config", "checkpoint"),
    ("models", "data", "metric", "callbacks"),
    ("proof",),
    ("static",),
    ("precision",),
    ("amp",),
    ("optim",),
    ("fp8", "fetch"),
    ("files",),
    ("_torch",),
)
MAY_IMPORT_UPWARDS = {("precision", "static")}  # Precision.compile, inside the method
LOOSE_MAY_IMPORT = ("files", "_torch")  # what modules directly under mezzo may import
DEPTH = {layer: depth for depth, row in enumerate(ROWS) for layer in row}

EXTRAS = ("cv2", "matplotlib", "safetensors", "tensorboard", "onnx", "onnxscript", "onnxruntime", "psutil", "pynvml")
EXTRAS += ("jinja2", "openvino", "ray", "pytest", "hypothesis", "sklearn", "rich", "typer", "click")


def layer_of(path: Path, root: Path) -> str | None:
    """Return the layer a file lies in; None for modules directly under mezzo, which belong to none."""
    parts = path.relative_to(root).parts
    return parts[0] if len(parts) > 1 else path.stem if path.stem in DEPTH else None


def imported_modules(node: ast.AST, package: str) -> list[str]:
    """Return the dotted names an import statement may load, relative ones made absolute."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        anchor = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*anchor, base] if base else anchor)
    return [f"{base}.{alias.name}" for alias in node.names]


def breach(own: str | None, target: str, top_level: set[str]) -> str | None:
    """Return the rule that importing `target` from layer `own` breaks, or None."""
    parts = target.split(".")
    if parts[0] != PACKAGE or len(parts) == 1:
        return None
    layer = parts[1]
    if layer == own or (own, layer) in MAY_IMPORT_UPWARDS or (layer not in DEPTH and layer in top_level):
        return None
    if layer not in DEPTH:
        return None if own is None else f"'{PACKAGE}.{layer}' is no layer of design.md and no module of mezzo"
    if own is None and layer in LOOSE_MAY_IMPORT:
        return None
    if own is None:
        return f"a module directly under mezzo imports the lowest layers only, but this one imports '{layer}'"
    if DEPTH[layer] == DEPTH[own]:
        return f"'{own}' and '{layer}' lie side by side and may not import each other"
    if DEPTH[layer] < DEPTH[own]:
        return f"'{own}' may import only layers below it, '{layer}' is above"
    return None


def violations(root: Path) -> list[str]:
    """Return 'file:line: rule' for every import under `root` that goes upwards or sideways."""
    top_level = {path.stem for path in root.glob("*.py")} | {"__version__"}
    found = [
        f"{path.relative_to(root)}:1: folder '{path.name}' is no layer; add it to ROWS and to design.md"
        for path in sorted(root.iterdir())
        if path.is_dir() and path.name not in DEPTH and any(path.rglob("*.py"))
    ]
    for path in sorted(root.rglob("*.py")):
        if path == root / "__init__.py":  # the table of contents may name every layer
            continue
        own = layer_of(path, root)
        package = ".".join((PACKAGE, *path.relative_to(root).parent.parts))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
            rules = {breach(own, name, top_level) for name in imported_modules(node, package)} - {None}
            found += [f"{path.relative_to(root)}:{node.lineno}: {rule}" for rule in sorted(filter(None, rules))]
    return found


def test_imports_go_downwards_only():
    found = violations(SOURCE)
    assert not found, "imports against design.md section 1:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("path", "code", "expected"),
    [
        ("amp/_a.py", "import mezzo.cli", "amp/_a.py:1: 'amp' may import only layers below it, 'cli' is above"),
        ("optim/_a.py", "\nfrom mezzo.amp import x", "optim/_a.py:2: 'optim' may import only layers below it"),
        ("optim/_a.py", "from mezzo import amp", "optim/_a.py:1: 'optim' may import only"),
        ("optim/_a.py", "from ..amp._policy import x", "optim/_a.py:1: 'optim' may import only"),
        ("optim/_a.py", "from .. import amp", "optim/_a.py:1: 'optim' may import only"),
        ("amp/deep/_a.py", "def f():\n    from ...proof import x", "amp/deep/_a.py:2: 'amp' may import only"),
        (
            "_torch/a.py",
            "import mezzo.files",
            "_torch/a.py:1: '_torch' may import only layers below it, 'files' is above",
        ),
        ("bench/_a.py", "import mezzo.train", "bench/_a.py:1: 'bench' and 'train' lie side by side"),
        (
            "_errors.py",
            "import mezzo.amp",
            "_errors.py:1: a module directly under mezzo imports the lowest layers only",
        ),
        ("amp/_a.py", "import mezzo.utils", "amp/_a.py:1: 'mezzo.utils' is no layer"),
        ("utils/_a.py", "", "utils:1: folder 'utils' is no layer"),
    ],
)
def test_checker_names_file_line_and_rule(tmp_path, path, code, expected):
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(code)
    (found,) = violations(tmp_path)
    assert found.startswith(expected)


def test_checker_passes_what_is_allowed(tmp_path):
    allowed = (
        "import torch\nimport mezzo\nfrom mezzo.errors import MezzoError\nfrom mezzo.optim import x\nfrom . import _b"
    )
    (tmp_path / "amp").mkdir()
    (tmp_path / "amp" / "_a.py").write_text(allowed)
    (tmp_path / "errors.py").write_text("")
    (tmp_path / "__init__.py").write_text("from mezzo import amp, cli")
    assert violations(tmp_path) == []


def loaded_by(statement: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has after a statement."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(n.partition('.')[0] for n in sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_amp_loads_no_extra_and_no_command_line_library():
    added = loaded_by("import mezzo.amp") - loaded_by("import torch")
    assert not added & set(EXTRAS), "import mezzo.amp loads an optional dependency"
