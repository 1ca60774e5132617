"""Reads the pickles that Paddle saves weights in, without running anything that they name.

Such files come from the internet. Only numpy arrays in plain containers are accepted, and not even numpy's own functions
are called by the file: what it names is replaced by passive objects, which are turned into arrays afterwards.
"""

from __future__ import annotations

import io
import math
import re
from typing import Any

import numpy as np

from mezzo.files import PlainUnpickler, UnsafePickle, encode, explained_pickle, no_items, rebuilt, unpacked_limit

#: Dtypes as numpy names them in pickles: numbers of known sizes.
_NUMERIC = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|c8|c16)")
_MOST_DIMENSIONS = 32
_MOST_ENTRIES = 1_000_000


class _Dtype:
    """What a file says of a dtype."""

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
    """What a file says of an array."""

    def __init__(self, *ignored: Any) -> None:
        # numpy would allocate the shape that is given here; the state that follows has the real one.
        self.state: Any = None
        self._made: np.ndarray[Any, Any] | None = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def make(self) -> np.ndarray[Any, Any]:
        """Return the array; the same one however often a file refers to it."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def num_bytes(self) -> int:
        """Return the size of the array, before it is made."""
        data = self.state[-1] if isinstance(self.state, tuple) and self.state else None
        return len(data) if isinstance(data, bytes | bytearray) else 0

    def _make(self) -> np.ndarray[Any, Any]:
        if not isinstance(self.state, tuple) or len(self.state) != 5:
            raise UnsafePickle("an array without its numbers")
        _, shape, dtype, is_fortran, data = self.state
        if not isinstance(dtype, _Dtype) or not isinstance(data, bytes | bytearray):
            raise UnsafePickle("an array of objects; weights are numbers")
        if not isinstance(shape, tuple) or len(shape) > _MOST_DIMENSIONS:
            raise UnsafePickle("an array of no readable shape")
        if not all(type(n) is int and 0 <= n < 2**48 for n in shape):
            raise UnsafePickle("an array of no readable shape")
        made = dtype.make()
        if math.prod(shape) * made.itemsize != len(data):
            raise UnsafePickle(f"an array of shape {shape} with {len(data)} bytes of {made}")
        array = np.frombuffer(data, dtype=made).reshape(shape, order="F" if is_fortran else "C")
        return array.astype(made.newbyteorder("="))  # a copy of its own, in this machine's byte order


def _no_bytes(*args: Any) -> bytes:
    """Old protocols write empty bytes as a call without arguments."""
    if args:
        raise UnsafePickle("bytes made from something else; only numpy arrays and plain containers are read")
    return b""


def _from_buffer(data: Any = None, dtype: Any = None, shape: Any = None, order: Any = "C") -> _Array:
    """How protocol 5 writes an array."""
    array = _Array()
    array.state = (1, shape, dtype, order == "F", data)
    return array


_REPLACED: dict[str, Any] = {
    **{f"numpy.{core}.multiarray._reconstruct": _Array for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _from_buffer for core in ("core", "_core")},
    **{f"{builtins}.bytes": _no_bytes for builtins in ("__builtin__", "builtins")},
    "numpy.ndarray": _Array,
    "numpy.dtype": _Dtype,
    "_codecs.encode": encode,
    "collections.OrderedDict": no_items,
}


class _Reader(PlainUnpickler):
    """An unpickler of arrays and plain containers."""

    replaced = _REPLACED
    stateful = (_Array, _Dtype)
    only = "only numpy arrays and plain containers are read"


def read_arrays(data: bytes) -> dict[str, Any]:
    """Return the dictionary that a pickle holds: arrays, and plain values beside them.

    Raises:
        UnsafePickle: It holds anything else, is damaged, or its arrays are larger than `unpacked_limit` together. Nothing that
            it names was called.
    """
    loaded: dict[str, Any] = explained_pickle(lambda: _read_arrays(data))
    return loaded


def _read_arrays(data: bytes) -> dict[str, Any]:
    limit = unpacked_limit(len(data))
    loaded = _Reader(io.BytesIO(data), limit).load()
    if not isinstance(loaded, dict):
        raise UnsafePickle(f"the file holds a {type(loaded).__name__}; must be a dictionary of arrays")
    return dict(rebuilt(loaded, _Array.make, _size_of, most_entries=_MOST_ENTRIES, limit=limit, tuples=list))


def _size_of(value: Any) -> int | None:
    return value.num_bytes() if isinstance(value, _Array) else None
