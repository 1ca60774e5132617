"""Reads the pickles that Paddle saves weights in, without running anything that they name.

Such files come from the internet. Only numpy arrays in plain containers are accepted, and not even numpy's own functions
are called by the file: what it names is replaced by passive objects, which are turned into arrays afterwards.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from typing import Any

import numpy as np

from mezzo._errors import MezzoError

_NUMERIC = "biufc"


class UnsafePickle(MezzoError):
    """A weights file holds something else than arrays."""


class _Dtype:
    """What a file says of a dtype."""

    def __init__(self, *description: Any) -> None:
        self.name = description[0] if description else None
        self.order = "|"

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1 and isinstance(state[1], str):
            self.order = state[1]

    def make(self) -> np.dtype[Any]:
        try:
            dtype = np.dtype(self.name if isinstance(self.name, str) else None)
        except TypeError as error:
            raise UnsafePickle(f"an array of dtype {self.name!r}; weights are numbers") from error
        if not isinstance(self.name, str) or dtype.kind not in _NUMERIC:
            raise UnsafePickle(f"an array of dtype {self.name!r}; weights are numbers")
        return dtype.newbyteorder(">") if self.order == ">" else dtype.newbyteorder("<")


class _Array:
    """What a file says of an array."""

    state: Any = None

    def __init__(self, *ignored: Any) -> None:
        # numpy would allocate the shape that is given here; the state that follows has the real one.
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def make(self) -> np.ndarray[Any, Any]:
        if not isinstance(self.state, tuple) or len(self.state) != 5:
            raise UnsafePickle("an array without its numbers")
        _, shape, dtype, is_fortran, data = self.state
        if not isinstance(dtype, _Dtype) or not isinstance(data, bytes | bytearray):
            raise UnsafePickle("an array of objects; weights are numbers")
        if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
            raise UnsafePickle(f"an array of shape {shape!r}")
        made = dtype.make()
        if math.prod(shape) * made.itemsize != len(data):
            raise UnsafePickle(f"an array of shape {shape} with {len(data)} bytes of {made}")
        array = np.frombuffer(data, dtype=made).reshape(shape, order="F" if is_fortran else "C")
        return array.astype(made.newbyteorder("="))  # a copy of its own, in this machine's byte order


def _encode(text: Any, codec: Any = "latin1") -> bytes:
    """Old protocols write bytes as text; nothing else is encoded here."""
    if not isinstance(text, str) or codec != "latin1":
        raise UnsafePickle(f"text in the encoding {codec!r}")
    return text.encode("latin1")


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


_REPLACED = {
    **{f"numpy.{core}.multiarray._reconstruct": _Array for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _from_buffer for core in ("core", "_core")},
    **{f"{builtins}.bytes": _no_bytes for builtins in ("__builtin__", "builtins")},
    "numpy.ndarray": _Array,
    "numpy.dtype": _Dtype,
    "_codecs.encode": _encode,
    "collections.OrderedDict": OrderedDict,
}


class _Reader(pickle._Unpickler):  # the one in Python: the one in C allocates what a file asks for
    """An unpickler that knows arrays and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        wanted = f"{module}.{name}"
        if wanted not in _REPLACED:
            raise UnsafePickle(f"the file names {wanted}; only numpy arrays and plain containers are read")
        return _REPLACED[wanted]

    def persistent_load(self, pid: Any) -> Any:
        raise UnsafePickle("the file refers to objects outside of it; only numpy arrays and plain containers are read")


def read_arrays(data: bytes) -> dict[str, Any]:
    """Return the dictionary that a pickle holds: arrays, and plain values beside them.

    Raises:
        UnsafePickle: It holds anything else, or is damaged. Nothing that it names was called.
    """
    try:
        loaded = _Reader(io.BytesIO(data)).load()
        if not isinstance(loaded, dict):
            raise UnsafePickle(f"the file holds a {type(loaded).__name__}; must be a dictionary of arrays")
        return {_key(key): _value(value, depth=0) for key, value in loaded.items()}
    except UnsafePickle:
        raise
    except Exception as error:  # a damaged or hostile file fails in as many ways as there are operations
        raise UnsafePickle(f"the file is no readable pickle ({type(error).__name__}: {error})") from error


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise UnsafePickle(f"an entry is called {key!r}; names are text")
    return key


def _value(value: Any, depth: int) -> Any:
    if isinstance(value, _Array):
        return value.make()
    if value is None or isinstance(value, str | int | float | bool | bytes):
        return value
    if depth > 8:
        raise UnsafePickle("containers nested more than eight deep")
    if isinstance(value, dict):
        return {_key(key): _value(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_value(item, depth + 1) for item in value]
    raise UnsafePickle(f"a {type(value).__name__}; only numpy arrays and plain containers are read")
