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
    ("__main__",),
    ("cli",),
    ("tipc",),
    ("bench",),
    ("vision",),
    ("integrations",),
    ("model",),
    ("proof",),
    ("trial",),
    ("static",),
    ("precision",),
    ("export",),
    ("record",),
    ("amp",),
    ("kernels",),
    ("optim",),
    ("fp8", "checkpoint"),
    ("fetch", "report"),
    ("files",),
    ("_torch", "devices", "_options"),
    ("_arguments", "dtypes"),
    ("errors",),
    ("_version", "_lazy"),
)
DEPTH = {layer: depth for depth, row in enumerate(ROWS) for layer in row}

# The same inside a package that has rooms of its own.
ROOMS = {
    "vision": (("train", "export"), ("infer",), ("recipes", "lite"), ("options",), ("models", "data")),
    "model": (("_model",), ("callbacks", "metric")),
}
ROOM_DEPTH = {
    f"{layer}.{room}": depth for layer, rows in ROOMS.items() for depth, row in enumerate(rows) for room in row
}

# Imports that go upwards, each inside of a function or of a facade that its own package does not load.
EXCEPTIONS = {
    ("amp/debugging.py", "record"): "Paddle's name for parts of mezzo.record; amp loads it when it is asked for",
    ("precision.py", "static"): "Precision.compile, inside the method",
    ("amp/_operator_log.py", "record"): "GLOG_v=5 works for who imports amp only; loaded when it is asked for",
}

EXTRAS = ("cv2", "matplotlib", "safetensors", "tensorboard", "onnx", "onnxscript", "onnxruntime", "psutil", "pynvml")
EXTRAS += (
    "jinja2",
    "openvino",
    "ray",
    "pytest",
    "hypothesis",
    "sklearn",
    "rich",
    "typer",
    "click",
    "accelerate",
    "transformers",
    "wandb",
)


def module_of(path: Path, root: Path) -> list[str]:
    """Return the parts of a module's name below mezzo: ["vision", "train", "_run"]."""
    parts = list(path.relative_to(root).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


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


def breach(own: list[str], target: str) -> str | None:
    """Return the rule that importing `target` from the module `own` breaks, or None."""
    parts = target.split(".")
    if parts[0] != PACKAGE or len(parts) == 1 or parts[1] == "__version__":
        return None
    layer = parts[1]
    if layer not in DEPTH:
        return f"'{PACKAGE}.{layer}' is no layer of design.md"
    if layer != own[0]:
        return compare(own[0], layer, DEPTH)
    rooms = ".".join(own[:2]), ".".join(parts[1:3])
    return compare(*rooms, ROOM_DEPTH) if rooms[0] != rooms[1] and ROOM_DEPTH.keys() >= set(rooms) else None


def compare(own: str, other: str, depths: dict[str, int]) -> str | None:
    if depths[own] == depths[other]:
        return f"'{own}' and '{other}' lie side by side and may not import each other"
    return f"'{own}' may import only layers below it, '{other}' is above" if depths[other] < depths[own] else None


def violations(root: Path) -> list[str]:
    """Return 'file:line: rule' for every import under `root` that goes upwards or sideways."""
    found = [
        f"{path.relative_to(root)}:1: '{path.stem}' is no layer; add it to ROWS and to design.md"
        for path in sorted(root.iterdir())
        if path.stem not in DEPTH and path != root / "__init__.py"
        if path.suffix == ".py" or (path.is_dir() and any(path.rglob("*.py")))
    ]
    for path in sorted(root.rglob("*.py")):
        own, name = module_of(path, root), path.relative_to(root).as_posix()
        if not own or own[0] not in DEPTH:  # the table of contents may name every layer; the others are found already
            continue
        package = ".".join((PACKAGE, *path.relative_to(root).parent.parts))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
            targets = [each for each in imported_modules(node, package) if (name, layer_of(each)) not in EXCEPTIONS]
            rules = {breach(own, each) for each in targets}
            found += [f"{name}:{node.lineno}: {rule}" for rule in sorted(filter(None, rules))]
    return found


def layer_of(target: str) -> str:
    return target.removeprefix(f"{PACKAGE}.").partition(".")[0]


def test_every_exception_is_needed():
    for name, layer in EXCEPTIONS:
        tree = ast.parse((SOURCE / name).read_text(encoding="utf-8"))
        assert any(layer_of(each) == layer for node in ast.walk(tree) for each in imported_modules(node, PACKAGE))


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
        ("fp8/_a.py", "import mezzo.checkpoint", "fp8/_a.py:1: 'fp8' and 'checkpoint' lie side by side"),
        (
            "precision.py",
            "import mezzo.proof",
            "precision.py:1: 'precision' may import only layers below it, 'proof' is above",
        ),
        ("vision/data/_a.py", "import mezzo.vision.train", "vision/data/_a.py:1: 'vision.data' may import only layers"),
        (
            "vision/data/_a.py",
            "from mezzo.vision import models",
            "vision/data/_a.py:1: 'vision.data' and 'vision.models'",
        ),
        (
            "vision/export.py",
            "from mezzo.vision.train import x",
            "vision/export.py:1: 'vision.export' and 'vision.train'",
        ),
        ("amp/_a.py", "import mezzo.utils", "amp/_a.py:1: 'mezzo.utils' is no layer"),
        ("_utils.py", "", "_utils.py:1: '_utils' is no layer"),
        ("utils/_a.py", "", "utils:1: 'utils' is no layer"),
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
