"""A state in a folder: `state.safetensors` has the tensors, `state.json` the rest.

Version 2 needs a manifest (`mezzo.files`) with checksums of all files of a checkpoint. Version 1 has only a SHA-256 of
the tensors in `state.json`, so damage to the weights files next to them is not detected.
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
_WITHOUT_MANIFEST = 1  # the last version without a manifest
_MOST_STRUCTURE = 1024 * MiB  # bytes of state.json
_DEPTH = 4 * (MOST_LEVELS + 2)  # a level of a state takes up to three of JSON
_ADVICE = "the checkpoint is damaged; resume from another one"


def write_state(folder: Path, state: State, *, with_manifest: bool = True) -> None:
    """Write a state into a folder, then the manifest of the folder.

    Floats are bit-exact, int keys stay ints and tuples stay tuples. Tensors keep values, shape and dtype; they are read
    on the CPU, contiguous and with separate storages.

    Args:
        folder: Created if missing; older state files in it are replaced.
        state: A dict; see `Tree` for the allowed values.
        with_manifest: False for `CheckpointStore.save`, which writes the manifest after all files.

    Raises:
        CheckpointError: A value cannot be stored; the message names it.
        RunError: Writing failed.
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
    # File names can contain unpaired surrogates; escaped, two of them would be read as one character.
    write_file(folder / STRUCTURE, text.encode("utf-8", "surrogatepass"))
    if with_manifest:
        write_manifest(folder)


def read_state(folder: Path) -> State:
    """Return the state in a folder, with tensors on the CPU. No code from the files is executed.

    First, all files of the folder are compared with its manifest.

    Raises:
        CheckpointError: A file is missing, damaged or belongs to another checkpoint; the message names it.
    """
    path = folder / STRUCTURE
    has_manifest = check_manifest(folder, raising=CheckpointError)
    structure = _structure(path)
    data = _bytes_of(folder / TENSORS)
    if not has_manifest:
        _check_old_version(folder, structure, data)
    tensors = _tensors(folder / TENSORS, data, structure["foreign"])
    try:
        state = unpack(structure["tree"], _take_once(tensors))
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}; {_ADVICE}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, not a dict; {_ADVICE}")
    return state


def verify(folder: Path) -> str | None:
    """Check that a checkpoint is complete; return a message if an old one can only be checked in part.

    Raises:
        CheckpointError: It is incomplete or damaged; the message names the file.
    """
    if not (folder / STRUCTURE).exists():
        raise CheckpointError(f"{folder / STRUCTURE}: no such file; {_ADVICE}")
    if check_manifest(folder, raising=CheckpointError):
        return None
    read_state(folder)
    return f"{folder}: was written without {MANIFEST}, by an older version: damage to its weights would go unnoticed"


def _check_old_version(folder: Path, structure: dict[str, Any], data: bytes) -> None:
    """Raise unless a checkpoint without a manifest is of version 1 and its two files belong together."""
    if structure["version"] != _WITHOUT_MANIFEST:
        raise CheckpointError(f"{folder / MANIFEST}: no such file, so damage could not be noticed; {_ADVICE}")
    if hashlib.sha256(data).hexdigest() != structure.get("sha256"):
        raise CheckpointError(f"{folder / TENSORS}: is not the file that {STRUCTURE} was written with; {_ADVICE}")


def _take_once(tensors: dict[str, Tensor]) -> Any:
    left = dict(tensors)

    def take(name: str) -> Tensor:
        if name not in left:  # each tensor is used once: a file that repeats a name would share its storage
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
        raise CheckpointError(f"{path}: not a state written by mezzo; give the folder of a checkpoint")
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
    except Exception as error:  # a damaged file can raise anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(f"{path}: cannot be read: {reason}; {_ADVICE}") from error


def _bytes_of(path: Path, limit: int | None = None) -> bytes:
    try:
        return read_bytes(path, raising=CheckpointError, **({} if limit is None else {"limit": limit}))
    except CheckpointError as error:
        raise CheckpointError(f"{error}; give the folder of a checkpoint") from error
