"""A state in a folder: `state.safetensors` has the tensors, `state.json` what is around them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from mezzo.checkpoint._errors import CheckpointError
from mezzo.checkpoint._tensors import foreign_dtypes, pack_tensors, unpack_tensors
from mezzo.checkpoint._tree import Packer, Tree, unpack
from mezzo.files import write_file

State: TypeAlias = dict[str, Tree]
TENSORS, STRUCTURE = "state.safetensors", "state.json"
_FORMAT = "mezzo.state"
_VERSION = 1
_ADVICE = "the checkpoint is damaged; resume from another one"


def write_state(folder: Path, state: State) -> None:
    """Write a state into a folder.

    Floats come back bit for bit, int keys as ints, tuples as tuples; tensors with their values, shape and dtype, on the
    CPU, each contiguous and with its own storage.

    Args:
        folder: Made if it is not there; older files of this kind in it are replaced.
        state: A dict; see `Tree` for what it may hold.

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
        "sha256": hashlib.sha256(data).hexdigest(),  # ties the two files together
        "foreign": foreign_dtypes(packer.tensors),
        "tree": tree,
    }
    write_file(folder / TENSORS, data)
    text = json.dumps(structure, allow_nan=False, ensure_ascii=False)
    # Half of a surrogate pair is a str too (names of files have them); escaped, two of them would be read as one letter.
    write_file(folder / STRUCTURE, text.encode("utf-8", "surrogatepass"))


def read_state(folder: Path) -> State:
    """Return the state in a folder, tensors on the CPU. Nothing in the files is ever executed.

    Raises:
        CheckpointError: A file is missing, damaged or of another origin; the message names it.
    """
    path = folder / STRUCTURE
    structure = _structure(path)
    data = _bytes_of(folder / TENSORS)
    if hashlib.sha256(data).hexdigest() != structure["sha256"]:
        raise CheckpointError(f"{folder / TENSORS}: is not the file that {STRUCTURE} was written with; {_ADVICE}")
    tensors = _tensors(folder / TENSORS, data, structure["foreign"])
    try:
        state = unpack(structure["tree"], _taker(tensors))
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}; {_ADVICE}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, not a dict; {_ADVICE}")
    return state


def _taker(tensors: dict[str, Tensor]) -> Any:
    left = dict(tensors)

    def take(name: str) -> Tensor:
        if name not in left:  # each name stands for one place: a file that repeats one would share its storage
            raise ValueError(f"the tensor {name[:80]!r} is not in {TENSORS}, or is used twice")
        return left.pop(name)

    return take


def _structure(path: Path) -> dict[str, Any]:
    try:
        structure = json.loads(_bytes_of(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is no JSON; {_ADVICE}") from error
    if not isinstance(structure, dict) or structure.get("format") != _FORMAT:
        raise CheckpointError(f"{path}: is no state that mezzo wrote; give the folder of a checkpoint")
    if structure.get("version") != _VERSION:
        raise CheckpointError(
            f"{path}: has version {structure.get('version')!r}; this mezzo reads {_VERSION}: use the one that wrote it"
        )
    if missing := {"sha256", "foreign", "tree"} - set(structure):
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


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{path}: cannot be read: {reason}; give the folder of a checkpoint") from error
