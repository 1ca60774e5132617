"""Reads the pickles in which Paddle saves weights, without calling anything that they name.

Such files come from the internet. Only numpy arrays in plain containers are accepted. Every name in the file is
replaced by a passive object; these objects are turned into arrays afterwards.
"""

from __future__ import annotations

import io
import math
import re
from typing import Any

import numpy as np

from mezzo.files import (
    PlainUnpickler,
    UnsafePickle,
    empty_dict,
    encode,
    rebuild_tree,
    report_bad_pickle,
    unpacked_limit,
)

#: Dtypes as numpy names them in pickles: numbers of known sizes.
_NUMERIC = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|c8|c16)")
_MOST_DIMENSIONS = 32
_MOST_ENTRIES = 1_000_000


class _ArrayDtype:
    """The description of a dtype in a file."""

    def __init__(self, *description: Any) -> None:
        self.name = description[0] if description else None
        self.order = "|"

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1 and isinstance(state[1], str):
            self.order = state[1]

    def make(self) -> np.dtype[Any]:
        if not isinstance(self.name, str) or not _NUMERIC.fullmatch(self.name):
            shown = self.name[:20] if isinstance(self.name, str) else type(self.name).__name__
            raise UnsafePickle(f"an array of dtype {shown!r}; weights are numbers")
        dtype = np.dtype(self.name)
        return dtype.newbyteorder(">") if self.order == ">" else dtype.newbyteorder("<")


class _Array:
    """The description of an array in a file."""

    def __init__(self, *ignored: Any) -> None:
        # numpy would allocate the shape given here; the real one is in the state that follows.
        self.state: Any = None
        self._array: np.ndarray[Any, Any] | None = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def make(self) -> np.ndarray[Any, Any]:
        """Return the array; the same object on every call, as a file may refer to it twice."""
        if self._array is None:
            self._array = self._make()
        return self._array

    def num_bytes(self) -> int:
        """Return the size of the array before allocating it."""
        data = self.state[-1] if isinstance(self.state, tuple) and self.state else None
        return len(data) if isinstance(data, bytes | bytearray) else 0

    def _make(self) -> np.ndarray[Any, Any]:
        if not isinstance(self.state, tuple) or len(self.state) != 5:
            raise UnsafePickle("an array without its numbers")
        _, shape, dtype, is_fortran, data = self.state
        if not isinstance(dtype, _ArrayDtype) or not isinstance(data, bytes | bytearray):
            raise UnsafePickle("an array of objects; weights are numbers")
        if not isinstance(shape, tuple) or len(shape) > _MOST_DIMENSIONS:
            raise UnsafePickle("an array with an invalid shape")
        if not all(type(n) is int and 0 <= n < 2**48 for n in shape):
            raise UnsafePickle("an array with an invalid shape")
        kind = dtype.make()
        if math.prod(shape) * kind.itemsize != len(data):
            raise UnsafePickle(f"an array of shape {shape} with {len(data)} bytes of {kind}")
        array = np.frombuffer(data, dtype=kind).reshape(shape, order="F" if is_fortran else "C")
        return array.astype(kind.newbyteorder("="))  # a copy of its own, in this machine's byte order


def _no_bytes(*args: Any) -> bytes:
    """Return empty bytes: old pickle protocols write them as a call without arguments."""
    if args:
        raise UnsafePickle("a call of bytes() with arguments; only numpy arrays and plain containers are read")
    return b""


def _from_buffer(data: Any = None, dtype: Any = None, shape: Any = None, order: Any = "C") -> _Array:
    """Return an array as pickle protocol 5 describes it."""
    array = _Array()
    array.state = (1, shape, dtype, order == "F", data)
    return array


_REPLACED: dict[str, Any] = {
    **{f"numpy.{core}.multiarray._reconstruct": _Array for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _from_buffer for core in ("core", "_core")},
    **{f"{builtins}.bytes": _no_bytes for builtins in ("__builtin__", "builtins")},
    "numpy.ndarray": _Array,
    "numpy.dtype": _ArrayDtype,
    "_codecs.encode": encode,
    "collections.OrderedDict": empty_dict,
}


class _ArrayUnpickler(PlainUnpickler):
    """An unpickler of arrays and plain containers."""

    replaced = _REPLACED
    stateful = (_Array, _ArrayDtype)
    only = "only numpy arrays and plain containers are read"


def read_arrays(data: bytes) -> dict[str, Any]:
    """Return the dictionary in a pickle: arrays and plain values.

    Raises:
        UnsafePickle: It holds anything else, is damaged, or its arrays together exceed `unpacked_limit`. Nothing that it
            names was called.
    """
    loaded: dict[str, Any] = report_bad_pickle(lambda: _read_arrays(data))
    return loaded


def _read_arrays(data: bytes) -> dict[str, Any]:
    limit = unpacked_limit(len(data))
    loaded = _ArrayUnpickler(io.BytesIO(data), limit).load()
    if not isinstance(loaded, dict):
        raise UnsafePickle(f"the file holds a {type(loaded).__name__}; must be a dictionary of arrays")
    return dict(rebuild_tree(loaded, _Array.make, _size_of, most_entries=_MOST_ENTRIES, limit=limit, tuples=list))


def _size_of(value: Any) -> int | None:
    return value.num_bytes() if isinstance(value, _Array) else None
