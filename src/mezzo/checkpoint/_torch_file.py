"""Reads tensors and plain containers from files of `torch.save`, without `torch.load`.

`torch.load(weights_only=True)` runs no code from the file, but a small file can make it allocate
any amount of memory, or never end. Here `mezzo.files` reads the pickle, and the sizes of all
tensors are added up before the first tensor is created.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mezzo.files import (
    PlainUnpickler,
    UnsafePickle,
    empty_dict,
    encode,
    rebuild_tree,
    report_bad_pickle,
    stored_parts,
    unpacked_limit,
)

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # of the format before torch 1.6
_LEGACY_PROTOCOL = 1001
_STORAGES = {
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128,
}  # fmt: skip
_DTYPES = {
    name: dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and not name.startswith(("q", "bits"))
}


@dataclass(frozen=True, slots=True)
class _Dtype:
    """A dtype that a file names; also the class of a storage."""

    dtype: torch.dtype | None
    """None: a storage of bytes."""


@dataclass(frozen=True, slots=True)
class _Storage:
    """The description of a storage, which several tensors may share."""

    key: str
    dtype: torch.dtype | None
    count: int


class _Ignored:
    """Stands for objects of a file that are not read, such as devices."""

    def __init__(self, *arguments: Any) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Tensor:
    """The description of a tensor in a file."""

    storage: _Storage
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def num_bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize

    def needs(self) -> int:
        """Return how many elements the storage must have at least."""
        if 0 in self.size:
            return 0
        return self.offset + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True)) + 1


def _is_counts(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) <= 64 and all(type(n) is int and 0 <= n < 2**48 for n in value)


def _tensor(
    storage: Any, offset: Any, size: Any, stride: Any, *rest: Any, dtype: torch.dtype | None = None, bits: Any = None
) -> _Tensor:
    if isinstance(bits, dict) and (bits.get("conj") or bits.get("neg")):
        kind, call = ("conjugated", "resolve_conj") if bits.get("conj") else ("negated", "resolve_neg")
        raise UnsafePickle(f"a {kind} tensor; call {call}() before saving")
    if not isinstance(storage, _Storage) or (dtype is None) != (storage.dtype is not None) or bits:
        raise UnsafePickle("a tensor without a valid storage")
    if not _is_counts((offset,)) or not _is_counts(size) or not _is_counts(stride) or len(size) != len(stride):
        raise UnsafePickle("a tensor with an invalid shape")
    return _Tensor(storage, dtype or storage.dtype or torch.uint8, offset, size, stride)


def _rebuild_v2(storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, bits: Any = None) -> _Tensor:
    return _tensor(storage, offset, size, stride, bits=bits)


def _rebuild_v3(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, bits: Any = None
) -> _Tensor:
    if not isinstance(dtype, _Dtype) or dtype.dtype is None:
        raise UnsafePickle("a tensor with an invalid dtype")
    return _tensor(storage, offset, size, stride, dtype=dtype.dtype, bits=bits)


def _rebuild_parameter(data: Any, *rest: Any) -> _Tensor:
    if not isinstance(data, _Tensor):
        raise UnsafePickle("a parameter that is not a tensor")
    return data


def _rebuild_from_type(function: Any, kind: Any, arguments: Any, state: Any = None) -> _Tensor:
    """Return a tensor that was saved with attributes; the attributes are dropped."""
    if not any(function is known for known in (_rebuild_v2, _rebuild_v3)) or not isinstance(arguments, tuple):
        raise UnsafePickle("a tensor of another class; only dense tensors are read")
    made: _Tensor = function(*arguments)
    return made


def _size(sizes: Any = ()) -> tuple[int, ...]:
    if not _is_counts(sizes):
        raise UnsafePickle("an invalid size")
    found: tuple[int, ...] = sizes
    return found


class _Reader(PlainUnpickler):
    """An unpickler of dense tensors and plain containers."""

    only = "only dense tensors and plain containers are read"
    replaced = {  # noqa: RUF012  # typed by the base class
        "torch._utils._rebuild_tensor_v2": _rebuild_v2,
        "torch._utils._rebuild_tensor_v3": _rebuild_v3,
        "torch._utils._rebuild_parameter": _rebuild_parameter,
        "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
        "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
        "torch.Tensor": _Ignored,
        "torch.nn.parameter.Parameter": _Ignored,
        "mezzo.optim._masters._Record": _Ignored,
        "torch.device": _Ignored,
        "torch.Size": _size,
        "collections.OrderedDict": empty_dict,
        "_codecs.encode": encode,
        "torch.storage.UntypedStorage": _Dtype(None),
        **{f"torch.{name}Storage": _Dtype(dtype) for name, dtype in _STORAGES.items()},
        **{f"torch.{name}": _Dtype(dtype) for name, dtype in _DTYPES.items()},
    }
    dispatch = PlainUnpickler.dispatch | {}

    def key(self, key: Any) -> Any:
        """Return a key of a dictionary if it is text, or an int as in tensor attributes."""
        return key if type(key) is int else super().key(key)

    def load_build(self) -> None:
        """Drop the state of a dictionary; a state dict stores the versions of its modules there."""
        self.stack.pop()
        if type(self.stack[-1]) not in (dict, _Ignored):
            raise UnsafePickle(f"a state of an object that is not a dictionary; {self.only}")

    def load_binpersid(self) -> None:
        """Read a storage: `('storage', class, key, device, count)`.

        The old format adds a view, which must be None.
        """
        entry = self.stack.pop()
        if (
            not isinstance(entry, tuple)
            or len(entry) not in (5, 6)
            or entry[0] != "storage"
            or entry[5:] not in ((), (None,))
        ):
            raise UnsafePickle("an invalid storage")
        _, kind, key, _device, count = entry[:5]
        if not isinstance(kind, _Dtype) or type(key) is not str or not _is_counts((count,)):
            raise UnsafePickle("an invalid storage")
        self.stack.append(_Storage(key, kind.dtype, count))

    dispatch |= {ord("Q"): load_binpersid, ord("b"): load_build}


def read_torch_file(data: bytes) -> Any:
    """Return what `torch.save` wrote: tensors on the CPU, in plain containers.

    Parameters come back as tensors, ordered dictionaries as dictionaries.

    Raises:
        UnsafePickle: The file holds anything else, is damaged, or its tensors together are larger
            than `unpacked_limit`. No function that the file names was called.
    """
    return report_bad_pickle(lambda: _read_zip(data) if data[:2] == b"PK" else _read_legacy(data))


def _read_zip(data: bytes) -> Any:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        try:
            listed = stored_parts(archive, len(data))
        except ValueError as error:
            raise UnsafePickle(str(error)) from error
        parts = {info.filename.partition("/")[2]: info for info in listed}
        if "data.pkl" not in parts:
            raise UnsafePickle("not a file of torch.save: it has no data.pkl")
        if "byteorder" in parts and archive.read(parts["byteorder"]) != b"little":
            raise UnsafePickle("its numbers are in another byte order; load and save it on the machine that wrote it")
        pickled = archive.read(parts["data.pkl"])
        tree = _Reader(io.BytesIO(pickled), unpacked_limit(len(data))).load()

        def numbers(key: str) -> bytes:
            if f"data/{key}" not in parts:
                raise UnsafePickle(f"the storage {key[:40]!r} is missing")
            return archive.read(parts[f"data/{key}"])

        return _with_tensors(tree, numbers, len(pickled), len(data))


def _read_legacy(data: bytes) -> Any:
    """Read the format before torch 1.6: five pickles, then length and numbers of each storage."""
    file = io.BytesIO(data)
    limit = unpacked_limit(len(data))
    magic, protocol, system, tree, keys = (_Reader(file, limit).load() for _ in range(5))
    if magic != _LEGACY_MAGIC or protocol != _LEGACY_PROTOCOL or not isinstance(system, dict):
        raise UnsafePickle("not a file of torch.save")
    if system.get("little_endian") is not True or not isinstance(keys, list):
        raise UnsafePickle("its numbers are in another byte order, or its list of storages cannot be read")
    entries = file.tell()
    sizes = {each.key: (each.dtype or torch.uint8).itemsize for each in _storages(tree, entries)}
    places: dict[str, tuple[int, int]] = {}
    for key in keys:
        if type(key) is not str or key not in sizes:
            raise UnsafePickle("a storage that no tensor uses")
        length = int.from_bytes(file.read(8), "little") * sizes[key]
        places[key] = (file.tell(), length)
        if file.seek(length, io.SEEK_CUR) > len(data):
            raise UnsafePickle("a storage that is longer than the file")

    def numbers(key: str) -> memoryview:
        start, length = places[key]
        return memoryview(data)[start : start + length]

    return _with_tensors(tree, numbers, entries, len(data))


def _storages(tree: Any, entries: int) -> list[_Storage]:
    found: list[_Storage] = []

    def note(said: Any) -> None:
        if isinstance(said, _Tensor):
            found.append(said.storage)

    rebuild_tree(tree, note, lambda value: None if _size_of(value) is None else 0, most_entries=entries, limit=0)
    return found


def _with_tensors(tree: Any, numbers: Callable[[str], bytes | memoryview], entries: int, packed: int) -> Any:
    stored: dict[str, bytearray] = {}  # each storage is copied once, for all its tensors and dtypes
    made: dict[tuple[str, torch.dtype], Tensor] = {}

    def make(said: Any) -> Any:
        if not isinstance(said, _Tensor):
            return said.dtype if isinstance(said, _Dtype) else None
        key = said.storage.key
        if key not in stored:
            stored[key] = bytearray(numbers(key))  # writable memory, unlike bytes
        _check_length(stored[key], said)
        flat = made.get((key, said.dtype))
        if flat is None:
            data = stored[key]
            flat = torch.frombuffer(data, dtype=said.dtype) if data else torch.empty(0, dtype=said.dtype)
            made[key, said.dtype] = flat
        if said.needs() > flat.numel():
            raise UnsafePickle(f"a tensor of shape {said.size} with {flat.numel()} numbers")
        return flat.as_strided(said.size, said.stride, said.offset)

    # Each value takes at least one byte of the pickle, unless values are repeated.
    return rebuild_tree(tree, make, _size_of, most_entries=entries + 1000, limit=unpacked_limit(packed))


def _check_length(data: bytearray, said: _Tensor) -> None:
    announced = said.storage.count * (said.storage.dtype or torch.uint8).itemsize
    if len(data) != announced or len(data) % said.dtype.itemsize:
        raise UnsafePickle(
            f"the storage {said.storage.key[:40]!r} has {len(data)} bytes, but the file declares {announced}"
        )


def _size_of(value: Any) -> int | None:
    if isinstance(value, _Dtype | _Ignored):
        return 0
    return value.num_bytes() if isinstance(value, _Tensor) else None
