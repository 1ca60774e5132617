"""A state in a folder: `state.safetensors` has the tensors, `state.json` what is around them.

Version 2 needs a manifest (`mezzo.files`), which ties all files of a checkpoint together. Version 1 has none: it ties
its two files by a SHA-256 of the tensors in `state.json`, and nothing notices damage to the weights beside them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from mezzo.checkpoint._errors import CheckpointError
from mezzo.checkpoint._tensors import foreign_dtypes, pack_tensors, unpack_tensors
from mezzo.checkpoint._tree import MOST_INT_BITS, MOST_LEVELS, Packer, Tree, unpack
from mezzo.files import MANIFEST, MiB, check_manifest, parse_json, read_bytes, short_repr, write_file, write_manifest

State: TypeAlias = dict[str, Tree]
TENSORS, STRUCTURE = "state.safetensors", "state.json"
_FORMAT = "mezzo.state"
_VERSION = 2
_WITHOUT_MANIFEST = 1  # the last version that has none
_MOST_STRUCTURE = 1024 * MiB  # bytes of state.json
_DEPTH = 4 * (MOST_LEVELS + 2)  # a level of a state takes up to three of JSON
_ADVICE = "the checkpoint is damaged; resume from another one"


def write_state(folder: Path, state: State, *, with_manifest: bool = True) -> None:
    """Write a state into a folder, and the manifest of the folder as it is then.

    Floats come back bit for bit, int keys as ints, tuples as tuples; tensors with their values, shape and dtype, on the
    CPU, each contiguous and with its own storage.

    Args:
        folder: Made if it is not there; older files of this kind in it are replaced.
        state: A dict; see `Tree` for what it may hold.
        with_manifest: False for `CheckpointStore.save`, which writes the manifest when all files are there.

    Raises:
        CheckpointError: Something in it cannot be held; the message names it.
        RunError: The system refuses to write.
    """
    if not isinstance(state, dict):
        raise CheckpointError(f"state: is a {type(state).__name__}; give a dict")
    packer = Packer()
    tree = packer.pack(state)
    data = pack_tensors(packer.tensors)
    structure = {
        "format": _FORMAT,
        "version": _VERSION,
        "foreign": foreign_dtypes(packer.tensors),
        "tree": tree,
    }
    write_file(folder / TENSORS, data)
    text = json.dumps(structure, allow_nan=False, ensure_ascii=False)
    # Half of a surrogate pair is a str too (names of files have them); escaped, two of them would be read as one letter.
    write_file(folder / STRUCTURE, text.encode("utf-8", "surrogatepass"))
    if with_manifest:
        write_manifest(folder)


def read_state(folder: Path) -> State:
    """Return the state in a folder, tensors on the CPU. Nothing in the files is ever executed.

    All files of the folder are compared with its manifest first.

    Raises:
        CheckpointError: A file is missing, damaged or of another origin; the message names it.
    """
    path = folder / STRUCTURE
    has_manifest = check_manifest(folder, raising=CheckpointError)
    structure = _structure(path)
    data = _bytes_of(folder / TENSORS)
    if not has_manifest:
        _refuse_untied(folder, structure, data)
    tensors = _tensors(folder / TENSORS, data, structure["foreign"])
    try:
        state = unpack(structure["tree"], _taker(tensors))
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}; {_ADVICE}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, not a dict; {_ADVICE}")
    return state


def verify(folder: Path) -> str | None:
    """Check that a checkpoint is whole; return a line if an old one can be checked in part only.

    Raises:
        CheckpointError: It is not whole; the message names the file.
    """
    if not (folder / STRUCTURE).exists():
        raise CheckpointError(f"{folder / STRUCTURE}: no such file; {_ADVICE}")
    if check_manifest(folder, raising=CheckpointError):
        return None
    read_state(folder)
    return f"{folder}: was written without {MANIFEST}, by an older version: damage to its weights would go unnoticed"


def _refuse_untied(folder: Path, structure: dict[str, Any], data: bytes) -> None:
    """Raise unless a checkpoint without a manifest is of version 1 and its two files belong together."""
    if structure["version"] != _WITHOUT_MANIFEST:
        raise CheckpointError(f"{folder / MANIFEST}: no such file, so damage could not be noticed; {_ADVICE}")
    if hashlib.sha256(data).hexdigest() != structure.get("sha256"):
        raise CheckpointError(f"{folder / TENSORS}: is not the file that {STRUCTURE} was written with; {_ADVICE}")


def _taker(tensors: dict[str, Tensor]) -> Any:
    left = dict(tensors)

    def take(name: str) -> Tensor:
        if name not in left:  # each name stands for one place: a file that repeats one would share its storage
            raise ValueError(f"the tensor {name[:80]!r} is not in {TENSORS}, or is used twice")
        return left.pop(name)

    return take


def _structure(path: Path) -> dict[str, Any]:
    data = _bytes_of(path, _MOST_STRUCTURE)
    try:
        structure = parse_json(data, max_depth=_DEPTH, int_bits=MOST_INT_BITS)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}; {_ADVICE}") from error
    if not isinstance(structure, dict) or structure.get("format") != _FORMAT:
        raise CheckpointError(f"{path}: is no state that mezzo wrote; give the folder of a checkpoint")
    version = structure.get("version")
    if type(version) is not int or not 1 <= version <= _VERSION:
        raise CheckpointError(
            f"{path}: has version {short_repr(version)}; this mezzo reads 1 to {_VERSION}: use the one that wrote it"
        )
    if missing := {"foreign", "tree"} - set(structure):
        raise CheckpointError(f"{path}: has no {', '.join(sorted(missing))}; {_ADVICE}")
    return structure


def _tensors(path: Path, data: bytes, foreign: Any) -> dict[str, Tensor]:
    try:
        return unpack_tensors(data, foreign)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file fails in as many ways as there are
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(f"{path}: cannot be read: {reason}; {_ADVICE}") from error


def _bytes_of(path: Path, limit: int | None = None) -> bytes:
    try:
        return read_bytes(path, raising=CheckpointError, **({} if limit is None else {"limit": limit}))
    except CheckpointError as error:
        raise CheckpointError(f"{error}; give the folder of a checkpoint") from error
