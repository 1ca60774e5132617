"""Reading a `torch.export` program from a file that may come from anyone.

`torch.export.load` trusts its file: it unpickles what the file marks as pickled, loads compiled libraries, and evaluates
shape expressions and guards as Python. So the archive is looked through first, and a program that holds more than tensors,
operators and arithmetic on sizes is refused.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mezzo.infer._errors import DeployError

if TYPE_CHECKING:
    from torch.export import ExportedProgram

MAX_TEXT = 1 << 28  # of the graph's JSON

#: Parts of an archive, below its top folder.
_KNOWN = re.compile(
    r"archive_format|archive_version|byteorder|version|\.data/\w+|models/\w+\.json|data/sample_inputs/\w+\.pt"
    r"|data/(weights|constants)/(\w+_config\.json|weight_\d+|tensor_\d+|\w+\.pt)"
)
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


def load_program(path: Path) -> ExportedProgram:
    """Return a program after `check_program`.

    Raises:
        DeployError: It is damaged, or holds what a program of ours does not.
    """
    import torch

    check_program(path)
    try:
        with warnings.catch_warnings():
            # torch 2.11 reads weights in place, from bytes that no one writes to
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            return torch.export.load(path)
    except (RuntimeError, ValueError, KeyError, OSError, AssertionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DeployError(f"{path}: torch cannot load the program: {reason}; export again with this torch") from error


def check_program(path: Path) -> None:
    """Refuse an archive that could run code when it is loaded.

    Raises:
        DeployError: The first thing that is not tensors, operators or arithmetic.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                _check_part(archive, info, path)
    except (zipfile.BadZipFile, OSError, ValueError, RecursionError) as error:
        raise DeployError(f"{path}: no program of torch.export: {error}") from error


def _check_part(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> None:
    part = info.filename.split("/", 1)[-1]
    if not _KNOWN.fullmatch(part):
        raise DeployError(
            f"{path}: holds {part!r}, which a program of tensors and operators has no need of; not loaded"
        )
    if part.startswith("data/sample_inputs/"):
        _check_samples(archive.read(info), path)
    elif part.endswith(".json"):
        if info.file_size > MAX_TEXT:
            raise DeployError(f"{path}: {part!r} is larger than the {MAX_TEXT} bytes that are read")
        _check_json(json.loads(archive.read(info)), path)


def _check_samples(data: bytes, path: Path) -> None:
    """Refuse samples that need more than torch's restricted unpickler: torch would fall back to the other one."""
    import io
    import pickle

    import torch

    try:
        if data:
            torch.load(io.BytesIO(data), weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        raise DeployError(f"{path}: its sample inputs are pickled objects, not tensors; not loaded") from error


def _check_json(tree: Any, path: Path) -> None:
    for key, value in _pairs(tree):
        if key == "use_pickle" and value is not False:
            raise DeployError(f"{path}: holds pickled objects; not loaded")
        texts = [value] if key == "expr_str" else value if key == "guards_code" else []
        for text in texts or []:
            if not is_arithmetic(text):
                raise DeployError(f"{path}: {str(text)[:80]!r} is no arithmetic on sizes; not loaded")


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
    if not isinstance(text, str):
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
