"""Reads, writes and converts weights: `.pdparams` of Paddle, safetensors, torch files, and archives of these."""

from __future__ import annotations

import errno
import io
import math
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mezzo.checkpoint._archives import ARCHIVES, FORMATS, is_archive, read_weights_entry
from mezzo.checkpoint._paddle_pickles import read_arrays
from mezzo.checkpoint._torch_file import read_torch_file
from mezzo.errors import MezzoError, RunError
from mezzo.files import FileError, UnsafePickle, read_bytes, write_file

#: Entries of a `.pdparams` file that are not weights.
_NAMES, _SLICES = "StructuredToParameterName@@", "UnpackBigParamInfor@@"
#: System errors that mean a bad path (WeightsError); others, as a full disk, are a failed run (RunError).
_BAD_PATH = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS)
#: Dtypes that a format can hold and torch can copy. In Paddle, uint16 is bfloat16.
_COMMON = frozenset({
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint32, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
})  # fmt: skip
_WRITABLE = {".safetensors": _COMMON | {torch.uint16}, ".pdparams": _COMMON | {torch.complex128}}
_WRITABLE_BY_TORCH = _COMMON | {torch.uint16, torch.complex32, torch.complex128, torch.float8_e8m0fnu}
_METADATA = "__metadata__"  # reserved in safetensors files
_TO_PADDLE = {"running_mean": "_mean", "running_var": "_variance"}
_BACKBONE = "backbone."
_TO_TORCH = {paddle: ours for ours, paddle in _TO_PADDLE.items()}


class WeightsError(MezzoError):
    """Weights that do not fit the model, or cannot be read."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What happened to each entry; all names are those of Paddle."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    """In the model, not in the file."""
    unexpected: tuple[str, ...] = ()
    """In the file, not in the model."""
    mismatched: tuple[str, ...] = ()
    """In both, with different shapes: 'name (shape in the file, shape in the model)'."""
    heads: tuple[str, ...] = ()
    """Mismatched entries that depend on the number of classes: not loaded."""

    def __str__(self) -> str:
        """Return the report as one line."""
        parts = [f"{len(self.loaded)} entries loaded"]
        if self.heads:
            parts.append(f"{len(self.heads)} of the heads not loaded (another number of classes): {_some(self.heads)}")
        for what in ("missing", "unexpected", "mismatched"):
            names = getattr(self, what)
            if names:
                parts.append(f"{len(names)} {what}: {_some(names)}")
        return "; ".join(parts)


def _some(names: tuple[str, ...], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def paddle_state(model: nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    """Return the weights of a model as float32 arrays with the names and layout of Paddle."""
    linear = _linear_weights(model)
    state = {}
    for key, value in model.state_dict().items():
        if not key.endswith("num_batches_tracked"):
            array = value.detach().cpu().float().numpy()
            state[_rename(key, _TO_PADDLE)] = np.ascontiguousarray(array.T if key in linear else array)
    return state


def load_paddle_state(model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> LoadReport:
    """Load arrays with Paddle's names into a model; return what happened to each.

    Heads for another number of classes are not loaded. Weights of only the backbone, without the prefix that it has in
    the model, are recognised: the rest of the model does not change, and further entries are reported.

    Args:
        model: From `create_model`, or any model with the parameter names of Paddle.
        state: Arrays by name.
        strict: Missing, unexpected and mismatched entries raise an error, and nothing is loaded.

    Raises:
        WeightsError: Entries do not fit (`strict`), or no entry fits.
    """
    own = model.state_dict()
    linear = _linear_weights(model)
    wanted = {_rename(k, _TO_PADDLE): k for k in own if not k.endswith("num_batches_tracked")}
    state, is_backbone = _with_prefix(state, wanted)
    heads = _head_keys(model)
    values: dict[str, Tensor] = {}
    mismatched: list[str] = []
    left: list[str] = []
    for name, given in state.items():
        if name not in wanted:
            continue
        key = wanted[name]
        value = _as_tensor(name, given)
        value = value.t() if key in linear and value.dim() == 2 else value
        target = own[key]
        if value.shape == target.shape:
            values[key] = value
            continue
        there = tuple(target.t().shape if key in linear else target.shape)
        line = f"{name} ({tuple(given.shape)}, {there})"
        is_head = name.startswith(heads) and value.dim() == target.dim() and value.shape[1:] == target.shape[1:]
        (left if is_head else mismatched).append(line)
    expected = [name for name in wanted if not is_backbone or name.startswith(_BACKBONE)]
    report = LoadReport(
        loaded=tuple(name for name, key in wanted.items() if key in values),
        missing=tuple(name for name in expected if name not in state),
        unexpected=tuple(name for name in state if name not in wanted),
        mismatched=tuple(mismatched),
        heads=tuple(left),
    )
    # The archive of a backbone may also contain its classifier.
    does_not_fit = report.missing or report.mismatched or (report.unexpected and not is_backbone)
    if not report.loaded or (strict and does_not_fit):
        raise WeightsError(f"the weights do not fit the model: {report}")
    model.load_state_dict(values, strict=False)
    return report


def _as_tensor(name: str, value: Any) -> Tensor:
    """Return an entry as a floating-point tensor; Paddle stores bfloat16 as uint16."""
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
        is_plain = tensor.dtype in _WRITABLE_BY_TORCH and tensor.layout == torch.strided
        if tensor.is_floating_point() and is_plain:
            return tensor
        raise WeightsError(
            f"{name}: is a {tensor.layout} tensor of {tensor.dtype}; weights must be dense and floating-point"
        )
    array = np.asarray(value)
    if array.dtype == np.uint16:
        return torch.from_numpy((array.astype(np.uint32) << 16).view(np.float32))
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise WeightsError(f"{name}: is an array of {array.dtype}; weights must be floating-point")
    return torch.from_numpy(np.array(array.astype(array.dtype.newbyteorder("=")), order="C"))


def _with_prefix(state: Mapping[str, Any], wanted: Mapping[str, str]) -> tuple[dict[str, Any], bool]:
    if any(name in wanted for name in state):
        return dict(state), False
    prefixed = {f"{_BACKBONE}{name}": value for name, value in state.items()}
    if any(name in wanted for name in prefixed):
        return prefixed, True
    return dict(state), False


def _head_keys(model: nn.Module) -> tuple[str, ...]:
    """Return how the names of parameters begin whose shape depends on the number of classes."""
    return tuple(getattr(model, "head_keys", ()))


def _rename(key: str, leaves: Mapping[str, str]) -> str:
    path, _, leaf = key.rpartition(".")
    return f"{path}.{leaves[leaf]}" if leaf in leaves and path else key


def _linear_weights(model: nn.Module) -> set[str]:
    """Return the keys of the matrices that Paddle stores transposed."""
    return {
        f"{name}.weight" if name else "weight" for name, part in model.named_modules() if isinstance(part, nn.Linear)
    }


def read_pdparams(path: str | os.PathLike[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of a `.pdparams` file, or of an archive with one, by name.

    Raises:
        WeightsError: The file cannot be read.
        UnsafePickle: It holds more than arrays. Nothing that it names was called.
    """
    file = _read_archive(Path(path)) if is_archive(Path(path)) else _File(str(path), ".pdparams", _bytes_of(path))
    if file.suffix != ".pdparams":
        raise WeightsError(f"{file.shown}: not a .pdparams file; use load_weights or convert")
    return _arrays_of(file)


def _arrays_of(file: _File) -> dict[str, np.ndarray[Any, Any]]:
    path = file.shown
    try:
        entries = read_arrays(file.data)
    except UnsafePickle as error:
        raise UnsafePickle(f"{path}: {error}") from error
    entries.pop(_NAMES, None)
    sliced = entries.pop(_SLICES, None)
    for name, how in sliced.items() if isinstance(sliced, dict) else ():
        entries[name] = _join_slices(name, how, entries, path)
    others = [name for name, value in entries.items() if not isinstance(value, np.ndarray)]
    if others:
        raise WeightsError(f"{path}: {_some(tuple(others))}: not an array; is this a .pdparams file?")
    return entries


def _join_slices(name: str, how: Any, entries: dict[str, Any], path: Any) -> np.ndarray[Any, Any]:
    """Return an array that an old file stores in pieces; remove the pieces from `entries`."""
    table: dict[str, Any] = how if isinstance(how, dict) else {}
    parts: Any = table.get("slices")
    shape: Any = table.get("OriginShape")
    is_readable = isinstance(parts, list) and isinstance(shape, list) and len(shape) < 33 and bool(parts)
    if not is_readable or not all(isinstance(part, str) for part in parts) or len(set(parts)) < len(parts):
        raise WeightsError(f"{path}: {name}: its table of pieces cannot be read")
    pieces = [entries.pop(part, None) for part in parts]
    if not all(isinstance(piece, np.ndarray) for piece in pieces) or not all(type(n) is int for n in shape):
        raise WeightsError(f"{path}: {name}: a piece of it is missing")
    try:
        joined = np.concatenate([np.ravel(piece) for piece in pieces])
        if any(n < 0 for n in shape) or math.prod(shape) != joined.size:
            raise WeightsError(f"{path}: {name}: its pieces have {joined.size} numbers, not those of its shape")
        return joined.reshape(shape)
    except (TypeError, ValueError) as error:  # numpy refuses long axes, even of an empty array
        raise WeightsError(f"{path}: {name}: its pieces do not fit together: {error}") from error


def load_pdparams(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> LoadReport:
    """Load a `.pdparams` file, or an archive with one, into a model; see `load_paddle_state` and `read_pdparams`."""
    return load_paddle_state(model, read_pdparams(path), strict=strict)


def save_pdparams(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the weights of a model (float32; masters of a decorated one) as a `.pdparams` file, whole or not at all.

    Raises:
        WeightsError: No file can be written at that place.
        RunError: The disk is full, or fails.
    """
    _write_pdparams(paddle_state(model), Path(path))


def _write_pdparams(state: Mapping[str, np.ndarray[Any, Any]], path: Path) -> None:
    content = {**state, _NAMES: {name: name for name in state}}
    _write(path, pickle.dumps(content, protocol=4))


def _write(path: Path, data: bytes) -> None:
    try:
        write_file(path, data)
    except RunError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _BAD_PATH:
            raise WeightsError(str(error)) from error
        raise


@dataclass(frozen=True, slots=True)
class _File:
    """A weights file in memory, from the disk or from an archive."""

    shown: str
    """Path for messages; in an archive with the name of the entry."""
    suffix: str
    data: bytes


def _read(path: Path) -> _File:
    if is_archive(path):
        return _read_archive(path)
    suffix = _format_of(path)
    return _File(str(path), suffix, _bytes_of(path))


def _read_archive(path: Path) -> _File:
    try:
        name, data = read_weights_entry(path)
    except FileError as error:
        raise WeightsError(str(error)) from error
    if not data:
        raise WeightsError(f"{path}: {name!r}: is empty")
    return _File(f"{path}: {name!r}", _format_of(Path(name)), data)


def _bytes_of(path: str | os.PathLike[str]) -> bytes:
    data = read_bytes(path, raising=WeightsError)
    if not data:
        raise WeightsError(f"{path}: is empty")
    return data


# Between formats


def convert(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> int:
    """Rewrite a weights file, or the one in an archive, in the format of the target's name; return the number of entries.

    `.pdparams` files have the names and layouts of Paddle, the others those of torch.

    Raises:
        WeightsError: A format is unknown, the source cannot be read, or the target path cannot be written.
        RunError: Writing failed, for example because the disk is full.
    """
    state = read_torch_state(Path(source))
    path = Path(target)
    if not path.parent.is_dir():
        raise WeightsError(f"{target}: there is no folder {str(path.parent)!r}")
    suffix = _format_of(path)
    for key, value in state.items():
        if value.dtype not in _WRITABLE.get(suffix, _WRITABLE_BY_TORCH):
            raise WeightsError(f"{source}: {key!a} is {value.dtype}, which a {suffix} file cannot hold")
    if suffix == ".pdparams":
        renamed = {_rename(key, _TO_PADDLE): key for key in state}
        reserved = {_NAMES, _SLICES} & set(renamed)
        if len(renamed) < len(state) or reserved:
            raise WeightsError(f"{source}: two entries would have the same name in Paddle, or a reserved one")
        arrays = {name: _transpose_linear(key, _as_array(state[key])) for name, key in renamed.items()}
        _write_pdparams({name: np.ascontiguousarray(value) for name, value in arrays.items()}, path)
    elif suffix == ".safetensors":
        save = _safetensors().save
        for key in state:
            if key == _METADATA or not _is_unicode(key):
                raise WeightsError(f"{source}: a .safetensors file cannot have an entry named {key!a}")
        own = {key: value.clone(memory_format=torch.contiguous_format) for key, value in state.items()}
        _write(path, save(own))
    else:
        buffer = io.BytesIO()
        torch.save(_with_one_dtype_per_storage(state), buffer)
        _write(path, buffer.getvalue())
    return len(state)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # an unpaired surrogate
        return False
    return True


def _with_one_dtype_per_storage(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy entries that share a storage with an entry of another dtype: `torch.save` refuses those."""
    kinds: dict[int, torch.dtype] = {}
    return {
        key: value
        if kinds.setdefault(value.untyped_storage().data_ptr(), value.dtype) == value.dtype
        else value.clone()
        for key, value in state.items()
    }


def _as_array(value: Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor for Paddle: floating-point values as float32, others unchanged."""
    array: np.ndarray[Any, Any] = (value.float() if value.is_floating_point() else value).numpy()
    return array


def load_weights(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> LoadReport:
    """Load a `.pdparams`, `.safetensors`, `.pt` or `.pth` file into a model; see `load_paddle_state`.

    An archive (`.tar`, `.tar.gz`, `.tgz`, `.tar.xz`, `.tar.bz2`, `.zip`) is read in memory. It must hold one file of
    weights, or one `model.pdparams` or `model.safetensors` among several.

    Raises:
        WeightsError: The file cannot be read, or the weights do not fit.
    """
    file = _read(Path(path))
    if file.suffix == ".pdparams":
        return load_paddle_state(model, _arrays_of(file), strict=strict)
    linear = _linear_weights(model)
    state = {
        _rename(key, _TO_PADDLE): value.t() if key in linear and value.dim() == 2 else value
        for key, value in _torch_state_of(file).items()
    }
    return load_paddle_state(model, state, strict=strict)


def _transpose_linear(key: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Transpose linear weights, which are [in, out] in Paddle; without the model, every 2-D `weight` counts as one."""
    return array.T if array.ndim == 2 and key.endswith("weight") else array


def read_torch_state(path: Path) -> dict[str, Tensor]:
    return _torch_state_of(_read(path))


def _torch_state_of(file: _File) -> dict[str, Tensor]:
    """Return the entries of a weights file with the names and layout of torch."""
    if file.suffix == ".pdparams":
        arrays = {key: np.ascontiguousarray(_transpose_linear(key, value)) for key, value in _arrays_of(file).items()}
        return {
            _rename(key, _TO_TORCH): _as_tensor(key, value) if value.dtype == np.uint16 else torch.from_numpy(value)
            for key, value in arrays.items()
        }
    loaded = _load_other(file)
    if not isinstance(loaded, Mapping) or not all(
        isinstance(key, str) and isinstance(value, Tensor) and value.layout == torch.strided
        for key, value in loaded.items()
    ):
        raise WeightsError(f"{file.shown}: must hold a state dict of names and dense tensors")
    return {key: value.detach() for key, value in loaded.items() if not key.endswith("num_batches_tracked")}


def _load_other(file: _File) -> Any:
    library = _safetensors() if file.suffix == ".safetensors" else None
    try:
        if library is not None:
            return library.load(file.data)
        return read_torch_file(file.data)
    except Exception as error:  # a damaged or hostile file can raise anything
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise WeightsError(f"{file.shown}: not a file of only weights: {reason}") from error


def _format_of(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        known = f"{', '.join(FORMATS)}, and archives for reading ({', '.join(ARCHIVES)})"
        raise WeightsError(f"{path}: unknown format {suffix!r}; allowed: {known}")
    return suffix


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise WeightsError("safetensors files need the package safetensors: pip install 'mezzo[vision]'") from error
    return safetensors.torch
