"""`torch.export` programs as files: written atomically, and read safely from untrusted files.

`torch.export.load` trusts its file. It unpickles objects, loads compiled libraries, imports classes
that the input specification names, and runs names, shape expressions and guards as Python code.
Therefore this module checks the archive first and passes only checked parts to torch: tensors, the
operators of `_program_operators`, and arithmetic on sizes.

Loading needs a few times the file's size in memory. This module does not limit the time and memory
that the operators of a program need when it runs.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mezzo.errors import DeployError
from mezzo.export._program_operators import DEVICES, problem_with_nodes, problem_with_target
from mezzo.export._program_rewrites import rewrite
from mezzo.export._program_sizes import is_arithmetic
from mezzo.files import (
    UnsafePickle,
    open_regular,
    parse_json,
    read_bytes,
    stored_parts,
    too_large,
    unpacked_limit,
    write_file,
)

if TYPE_CHECKING:
    from torch.export import ExportedProgram

MAX_TEXT = 1 << 28  # bytes of the graph's JSON

#: Files that an archive may contain, below its top folder.
_KNOWN = re.compile(
    r"archive_format|archive_version|byteorder|version|\.data/\w+|models/\w+\.json|data/sample_inputs/\w+\.pt"
    r"|data/(weights/(\w+_config\.json|weight_\d+)|constants/(\w+_config\.json|tensor_\d+))"
)
_GRAPH = re.compile(r"models/\w+\.json")
#: Allowed strings of the graph, by key; the strings of all other keys must match _NAME.
_TEXTS = {
    "torch_version": re.compile(r"[\w.+]*"),
    "path_name": re.compile(r"(weight|tensor)_\d+"),
    "as_string": re.compile(r"[\w ,.>-]{0,500}", re.ASCII),  # an option, or an einsum equation
    **dict.fromkeys(("as_float", "as_floats"), re.compile(r"-?Infinity|NaN")),  # JSON cannot write them as numbers
}
_NAME = re.compile(r"[\w.]*", re.ASCII)
_DUNDER = re.compile(r"(^|\.)__\w*__($|\.)")
_STRIDED = 7  # in torch's schema: a dense tensor
#: Bytes per element, by dtype number of torch's schema; 16, the largest, for all other dtypes.
_ITEM_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 2, 7: 4, 8: 8, 9: 4, 10: 8, 11: 16, 12: 1, 13: 2, 28: 2}
_CONTAINERS = (None, "builtins.tuple", "builtins.list", "builtins.dict")


@contextmanager
def quietly() -> Iterator[None]:
    """Silence warnings and logs of the exporters: they concern packages that users do not need."""
    names = ("torch.onnx", "torch.export", "torch.fx.experimental.symbolic_shapes", "onnxscript", "onnx_ir")
    loggers = [logging.getLogger(name) for name in names]
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
    """Remove stack traces: they disclose paths of the machine that exported the network."""
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)


def write_program(program: ExportedProgram, path: Path, *, shown: Path | None = None) -> None:
    """Write a program atomically; warn if `load_program` would refuse it.

    Args:
        program: A program that this process exported.
        path: The file.
        shown: The path that a warning names, if `path` is temporary.
    """
    import torch

    buffer = io.BytesIO()
    with quietly():
        torch.export.save(program, buffer)
    data = buffer.getvalue()
    place = shown or path
    try:
        _checked_copy(buffer, len(data), place, keep_sizes=True)
    except DeployError as error:
        reason = str(error).removeprefix(f"{place}: ").removesuffix("; not loaded")
        warnings.warn(f"{place}: mezzo will not load this program: {reason}", stacklevel=2)
    write_file(path, data)


def own_program(path: Path) -> Callable[..., Any]:
    """Return a program that this process has just written, without checks: the file is trusted."""
    import torch

    with quietly():
        return torch.export.load(io.BytesIO(read_bytes(path, raising=DeployError))).module()


def load_program(path: Path, *, keep_sizes: bool = False) -> ExportedProgram:
    """Load a program from the archive that `checked_archive` returns.

    Args:
        path: The file.
        keep_sizes: Read the sizes of intermediate results as expressions of the input sizes.
            Compiling a program for free sizes needs them; running it does not. torch takes minutes
            to read those of an OCRNet.

    Raises:
        DeployError: The file is damaged, or contains parts that are not allowed.
    """
    import torch

    archive = checked_archive(path, keep_sizes=keep_sizes)
    try:
        # torch 2.11 warns because it reads weights from read-only bytes; torch 2.13 logs a
        # traceback of every error.
        with quietly():
            return torch.export.load(archive)
    except Exception as error:  # a damaged file can raise anything in torch
        reason = " ".join(str(error).split())[:300]
        raise DeployError(f"{path}: torch cannot load the program: {reason}; export again with this torch") from error


def checked_archive(path: Path, *, keep_sizes: bool = True) -> io.BytesIO:
    """Return a copy of an archive that contains only checked parts.

    A copy is necessary: two readers may see different files in one archive, and the file may change
    after the check.

    Raises:
        DeployError: The archive contains more than tensors, allowed operators and arithmetic; the
            message names the first problem.
    """
    with open_regular(path, raising=DeployError) as file:
        return _checked_copy(file, os.fstat(file.fileno()).st_size, path, keep_sizes)


def _checked_copy(file: IO[bytes], size: int, path: Path, keep_sizes: bool) -> io.BytesIO:
    copied = io.BytesIO()
    try:
        with zipfile.ZipFile(file) as archive:
            parts = stored_parts(archive, size)
            for info in parts:
                _check_name(info, path)
            with zipfile.ZipFile(copied, "w", zipfile.ZIP_STORED) as kept:
                for info in parts:
                    kept.writestr(info.filename, _checked(archive.read(info), info, path, keep_sizes))
        with zipfile.ZipFile(copied) as kept:
            _check_weights(kept, size, path)
    except DeployError:
        raise
    except Exception as error:  # a damaged archive can raise anything
        reason = " ".join(str(error).split())[:200]
        raise DeployError(f"{path}: is not a torch.export program: {reason}") from error
    copied.seek(0)
    return copied


def _check_name(info: zipfile.ZipInfo, path: Path) -> None:
    top, _, part = info.filename.partition("/")
    if not _KNOWN.fullmatch(part) or not _NAME.fullmatch(top):
        raise DeployError(
            f"{path}: contains {part[:80]!r}, which a program of tensors and operators does not need; not loaded"
        )
    if part.endswith(".json") and info.file_size > MAX_TEXT:
        raise DeployError(f"{path}: {part!r} is larger than the limit of {MAX_TEXT} bytes")


def _checked(data: bytes, info: zipfile.ZipInfo, path: Path, keep_sizes: bool) -> bytes:
    """Check a part of an archive; return the bytes that torch may load."""
    part = info.filename.partition("/")[2]
    if part.startswith("data/sample_inputs/"):
        return _checked_samples(data, path) if keep_sizes else b""  # only compilation needs them
    if not part.endswith(".json"):
        return data
    tree = parse_json(data)
    if _GRAPH.fullmatch(part):
        graph = tree["graph_module"]["graph"]
        _forget_metadata(tree)
        if not keep_sizes:
            _forget_sizes(graph)
        if problem := rewrite(graph) or problem_with_nodes(graph["nodes"]):
            raise DeployError(f"{path}: {problem}; not loaded")
    _check_json(tree, path)
    return json.dumps(tree).encode()


def _check_weights(archive: zipfile.ZipFile, size: int, path: Path) -> None:
    """Limit the total size that tensors claim: with strides of 0 or empty files it can be any."""
    lengths = {info.filename.partition("/")[2]: info.file_size for info in archive.infolist()}
    total = 0
    for info in archive.infolist():
        if not info.filename.endswith("_config.json"):
            continue
        folder = info.filename.partition("/")[2].rpartition("/")[0]
        for entry in parse_json(archive.read(info))["config"].values():
            meta = entry["tensor_meta"]
            claimed = math.prod(length["as_int"] for length in meta["sizes"]) * _ITEM_SIZES.get(meta["dtype"], 16)
            total += claimed
            if claimed and not lengths.get(f"{folder}/{entry['path_name']}"):
                raise DeployError(f"{path}: {str(entry['path_name'])[:40]!r} has no data; not loaded")
    if total > (limit := unpacked_limit(size)):
        raise DeployError(f"{path}: {too_large(total, limit)}")


def _forget_metadata(tree: Any) -> None:
    """Remove the metadata of operators: it is not needed, and torch looks up names in it."""
    for node in tree["graph_module"]["graph"]["nodes"]:
        node["metadata"] = {}


def _forget_sizes(graph: Any) -> None:
    """Replace size expressions by the traced sizes, for all tensors except the inputs."""
    inputs = {entry["as_tensor"]["name"] for entry in graph["inputs"] if "as_tensor" in entry}
    for name, tensor in graph["tensor_values"].items():
        if name not in inputs:
            for key in ("sizes", "strides"):
                tensor[key] = [_as_traced(size) for size in tensor[key]]


def _as_traced(size: Any) -> Any:
    hint = size["as_expr"]["hint"] if "as_expr" in size else None
    return hint or size


def _checked_samples(data: bytes, path: Path) -> bytes:
    """Read sample inputs safely and write them again: torch would unpickle any object."""
    import torch

    from mezzo.checkpoint import read_torch_file

    if not data:
        return data
    try:
        samples = read_torch_file(data)
    except UnsafePickle as error:
        raise DeployError(f"{path}: its sample inputs contain more than tensors: {error}; not loaded") from error
    buffer = io.BytesIO()
    torch.save(samples, buffer)
    return buffer.getvalue()


def _check_json(tree: Any, path: Path) -> None:
    for key, value in _pairs(tree):
        if not _NAME.fullmatch(key) or _DUNDER.search(key):
            raise DeployError(f"{path}: {key[:80]!r} is not a valid name; not loaded")
        if key == "use_pickle" and value is not False:
            raise DeployError(f"{path}: contains pickled objects; not loaded")
        if key in ("layout", "as_layout") and value not in (_STRIDED, None):
            raise DeployError(f"{path}: contains sparse tensors; not loaded")
        if key in ("device", "as_device") and not _is_usable_device(value):
            raise DeployError(f"{path}: contains tensors on a device other than cpu and cuda; not loaded")
        if key == "guards_code" and not isinstance(value, list):
            raise DeployError(f"{path}: guards_code must be a list; not loaded")
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                _check_text(key, text, path)


def _is_usable_device(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and value.get("type") in DEVICES)


def _check_text(key: str, text: str, path: Path) -> None:
    if key in ("expr_str", "guards_code"):
        if not is_arithmetic(text):
            raise DeployError(f"{path}: {text[:80]!r} is not arithmetic on sizes; not loaded")
    elif key in ("in_spec", "out_spec"):
        if text and not _is_plain_spec(parse_json(text)):
            raise DeployError(f"{path}: inputs or outputs must be tensors in tuples, lists and dicts; not loaded")
    elif key == "target":
        if problem := problem_with_target(text):
            raise DeployError(f"{path}: {problem}; not loaded")
    elif not _TEXTS.get(key, _NAME).fullmatch(text) or _DUNDER.search(text):
        raise DeployError(f"{path}: {key} {text[:80]!r} is not the name of a tensor or an operator; not loaded")


def _is_plain_spec(spec: Any) -> bool:
    """Return whether a specification has only plain containers: torch imports other classes."""
    version, root = spec
    waiting = [root]
    while waiting:
        node = waiting.pop()
        context = parse_json(node["context"]) if node["context"] is not None else None
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
