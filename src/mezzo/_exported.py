"""`torch.export` programs as files: written whole or not at all, and read from a file that may come from anyone.

`torch.export.load` trusts its file: it unpickles what the file marks as pickled, loads compiled libraries, imports what the
specification of inputs names, and turns names, shape expressions and guards into Python that it runs. So the archive is looked
through first, and only what was looked at is given to torch: tensors, operators of aten, and arithmetic on sizes.
"""

from __future__ import annotations

import ast
import io
import json
import logging
import re
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mezzo._errors import DeployError
from mezzo.files import write_file

if TYPE_CHECKING:
    from torch.export import ExportedProgram

MAX_TEXT = 1 << 28  # of the graph's JSON

#: Parts of an archive, below its top folder.
_KNOWN = re.compile(
    r"archive_format|archive_version|byteorder|version|\.data/\w+|models/\w+\.json|data/sample_inputs/\w+\.pt"
    r"|data/(weights/(\w+_config\.json|weight_\d+)|constants/(\w+_config\.json|tensor_\d+))"
)
_GRAPH = re.compile(r"models/\w+\.json")
#: What a text of the graph may be, by its key; the rest are names with dots.
_TEXTS = {
    # from_file opens what it is told to; of the operators of Python those that call others are left out
    "target": re.compile(
        r"torch\.ops\.aten\.(?!from_file)\w+(\.\w+)?|torch\.sym_\w+|math\.(trunc|floor|ceil|sqrt)"
        r"|_operator\.(add|sub|mul|floordiv|truediv|mod|pow|neg|pos|eq|ne|lt|le|gt|ge|and_|or_|not_|getitem)"
    ),
    "torch_version": re.compile(r"[\w.+]*"),
    "path_name": re.compile(r"(weight|tensor)_\d+"),
    "as_string": re.compile(r"[\w ]*"),
}
_NAME = re.compile(r"[\w.]*", re.ASCII)
#: What may be called or named in an expression: sympy's arithmetic, torch's whole-number functions, attributes of symbols.
_FUNCTIONS = frozenset(
    "Symbol Integer Float Rational Add Mul Pow Mod Max Min FloorDiv CleanDiv CeilDiv PythonMod Where TruncToInt FloorToInt"
    " CeilToInt RoundToInt IntTrueDiv FloatTrueDiv ToFloat Identity ModularIndexing Eq Ne Equality Unequality"
    " StrictLessThan StrictGreaterThan LessThan GreaterThan And Or Not int_oo min max abs".split()
)
_METHODS = frozenset({"size", "stride", "storage_offset"})
_ALLOWED = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.BoolOp,
    ast.Compare,
    ast.Constant,
    ast.Load,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
    ast.keyword,
)
_CONTAINERS = (None, "builtins.tuple", "builtins.list", "builtins.dict")


@contextmanager
def quietly() -> Iterator[None]:
    """Keep the exporters' own talk away from users: it is about packages that they have no need of."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def forget_places(program: ExportedProgram) -> None:
    """Take the names of source files out: they say where the network was exported, which is nobody's business."""
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)


def write_program(program: ExportedProgram, path: Path) -> None:
    """Write a program, whole or not at all."""
    import torch

    buffer = io.BytesIO()
    with quietly():
        torch.export.save(program, buffer)
    write_file(path, buffer.getvalue())


def load_program(path: Path, *, keep_sizes: bool = False) -> ExportedProgram:
    """Return a program after `checked_archive`.

    Args:
        path: The file.
        keep_sizes: Read the sizes of all results between inputs and outputs as expressions of the inputs' sizes. Whoever
            compiles the program for any size needs them; nobody who runs it does, and torch takes minutes for an OCRNet.

    Raises:
        DeployError: It is damaged, or holds what a program of ours does not.
    """
    import torch

    archive = checked_archive(path, keep_sizes=keep_sizes)
    try:
        with warnings.catch_warnings():
            # torch 2.11 reads weights in place, from bytes that no one writes to
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            return torch.export.load(archive)
    except Exception as error:  # whatever a damaged file makes of torch's own assumptions
        reason = " ".join(str(error).split())[:300]
        raise DeployError(f"{path}: torch cannot load the program: {reason}; export again with this torch") from error


def checked_archive(path: Path, *, keep_sizes: bool = True) -> io.BytesIO:
    """Return an archive of the parts that were looked at, and of nothing else.

    A copy, because two readers may see different files in one archive, and a file may change after it was looked at.

    Raises:
        DeployError: The first thing that is not tensors, operators or arithmetic.
    """
    copied = io.BytesIO()
    try:
        with zipfile.ZipFile(path) as archive, zipfile.ZipFile(copied, "w", zipfile.ZIP_STORED) as kept:
            for info in archive.infolist():
                kept.writestr(info.filename, _checked(archive.read(info), info, path, keep_sizes))
    except DeployError:
        raise
    except Exception as error:  # a damaged archive raises what its damage leads to
        reason = " ".join(str(error).split())[:200]
        raise DeployError(f"{path}: no program of torch.export: {reason}") from error
    copied.seek(0)
    return copied


def _checked(data: bytes, info: zipfile.ZipInfo, path: Path, keep_sizes: bool) -> bytes:
    """Return a part of an archive as it may be loaded."""
    top, _, part = info.filename.partition("/")
    if not _KNOWN.fullmatch(part) or not _NAME.fullmatch(top):
        raise DeployError(
            f"{path}: holds {part!r}, which a program of tensors and operators has no need of; not loaded"
        )
    if part.startswith("data/sample_inputs/"):
        _check_samples(data, path)
    elif part.endswith(".json"):
        if info.file_size > MAX_TEXT:
            raise DeployError(f"{path}: {part!r} is larger than the {MAX_TEXT} bytes that are read")
        tree = json.loads(data)
        if _GRAPH.fullmatch(part):
            _forget_metadata(tree)
            if not keep_sizes:
                _forget_sizes(tree["graph_module"]["graph"])
        _check_json(tree, path)
        return json.dumps(tree).encode()
    return data


def _forget_metadata(tree: Any) -> None:
    """Take out where each operator came from: no one needs it, and torch looks names up by it."""
    for node in tree["graph_module"]["graph"]["nodes"]:
        node["metadata"] = {}


def _forget_sizes(graph: Any) -> None:
    """Put the sizes that the network was traced with in place of expressions, for all tensors but the inputs."""
    inputs = {entry["as_tensor"]["name"] for entry in graph["inputs"] if "as_tensor" in entry}
    for name, tensor in graph["tensor_values"].items():
        if name not in inputs:
            for key in ("sizes", "strides"):
                tensor[key] = [_as_traced(size) for size in tensor[key]]


def _as_traced(size: Any) -> Any:
    hint = size["as_expr"]["hint"] if "as_expr" in size else None
    return hint or size


def _check_samples(data: bytes, path: Path) -> None:
    """Refuse samples that need more than torch's restricted unpickler: torch would fall back to the other one."""
    import torch

    try:
        if data:
            torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:  # whatever it is, torch would try again without restrictions
        raise DeployError(f"{path}: its sample inputs are pickled objects, not tensors; not loaded") from error


def _check_json(tree: Any, path: Path) -> None:
    for key, value in _pairs(tree):
        if not _NAME.fullmatch(key):
            raise DeployError(f"{path}: {key[:80]!r} is no name; not loaded")
        if key == "use_pickle" and value is not False:
            raise DeployError(f"{path}: holds pickled objects; not loaded")
        if key == "guards_code" and not isinstance(value, list):
            raise DeployError(f"{path}: guards_code is no list; not loaded")
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                _check_text(key, text, path)


def _check_text(key: str, text: str, path: Path) -> None:
    if key in ("expr_str", "guards_code"):
        if not is_arithmetic(text):
            raise DeployError(f"{path}: {text[:80]!r} is no arithmetic on sizes; not loaded")
    elif key in ("in_spec", "out_spec"):
        if text and not _is_plain_spec(json.loads(text)):
            raise DeployError(f"{path}: inputs or outputs are more than tensors in tuples, lists and dicts; not loaded")
    elif not _TEXTS.get(key, _NAME).fullmatch(text):
        raise DeployError(f"{path}: {key} {text[:80]!r} is no name of a tensor or an operator; not loaded")


def _is_plain_spec(spec: Any) -> bool:
    """Return whether a specification has plain containers alone: torch imports what others name."""
    version, root = spec
    waiting = [root]
    while waiting:
        node = waiting.pop()
        context = json.loads(node["context"]) if node["context"] is not None else None
        is_plain = context is None or (isinstance(context, list) and all(isinstance(key, str) for key in context))
        if node["type"] not in _CONTAINERS or not is_plain:
            return False
        waiting += node["children_spec"]
    return bool(version == 1)


def _pairs(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key of a JSON tree with its value, without recursion."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield from node.items()
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


def is_arithmetic(text: object) -> bool:
    """Return whether a text only computes with sizes: no attribute, call or name but those that torch writes.

    >>> is_arithmetic("FloorDiv(Add(Symbol('s0', positive=True, integer=True), Integer(-1)), Integer(32))")
    True
    >>> is_arithmetic("1 + (((-1) + L['x'].size()[2]) // 32) >= 2")
    True
    >>> is_arithmetic("__import__('os').system('true')")
    False
    """
    if not isinstance(text, str) or re.search(r"[#\\\r\n]", text):
        return False
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return all(_is_harmless(node) for node in ast.walk(tree))


def _is_harmless(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        is_method = isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS
        return is_method or (isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS)
    if isinstance(node, ast.Attribute):
        return node.attr in _METHODS
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant)
    if isinstance(node, ast.Name):
        return node.id in _FUNCTIONS or node.id == "L" or re.fullmatch(r"[su]\d+|oo|int_oo", node.id) is not None
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.fullmatch(r"[A-Za-z_]\w*", node.value) is not None and "__" not in node.value
    return isinstance(node, _ALLOWED)
