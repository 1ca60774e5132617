"""Reads the pickles that Paddle saves weights in, without running anything that they name.

Such files come from the internet. Only numpy arrays in plain containers are accepted, and not even numpy's own functions
are called by the file: what it names is replaced by passive objects, which are turned into arrays afterwards.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from mezzo._errors import MezzoError

#: Dtypes as numpy names them in pickles: numbers of known sizes.
_NUMERIC = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|c8|c16)")
_MOST_DIMENSIONS = 32
_MOST_ENTRIES = 1_000_000


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


def _encode(text: Any, codec: Any = "latin1") -> bytes:
    """Old protocols write bytes as text; nothing else is encoded here."""
    if not isinstance(text, str) or not isinstance(codec, str) or codec != "latin1":
        raise UnsafePickle("text in another encoding than latin1")
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


def _no_items(*args: Any) -> dict[str, Any]:
    """An ordered dictionary is made empty and filled afterwards."""
    if args:
        raise UnsafePickle("a dictionary made from something else; only numpy arrays and plain containers are read")
    return {}


_REPLACED: dict[str, Any] = {
    **{f"numpy.{core}.multiarray._reconstruct": _Array for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _from_buffer for core in ("core", "_core")},
    **{f"{builtins}.bytes": _no_bytes for builtins in ("__builtin__", "builtins")},
    "numpy.ndarray": _Array,
    "numpy.dtype": _Dtype,
    "_codecs.encode": _encode,
    "collections.OrderedDict": _no_items,
}


def _opcodes(*names: str) -> dict[int, Any]:
    return {getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in names}


class _Reader(pickle._Unpickler):  # the one in Python: the one in C allocates what a file asks for
    """An unpickler of arrays and plain containers: other operations do not exist here."""

    stack: list[Any]
    append: Any
    read: Any
    pop_mark: Any

    dispatch = _opcodes(
        *"PROTO FRAME MARK STOP POP POP_MARK PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET MEMOIZE".split(),
        *"NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT".split(),
        *"STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8".split(),
        *"BINBYTES SHORT_BINBYTES BINBYTES8".split(),
        *"EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT".split(),
        *"GLOBAL STACK_GLOBAL".split(),
    )

    def find_class(self, module: str, name: str) -> Any:
        wanted = f"{module}.{name}"
        if wanted not in _REPLACED:
            raise UnsafePickle(f"the file names {wanted[:60]}; only numpy arrays and plain containers are read")
        return _REPLACED[wanted]

    def load_reduce(self) -> None:
        """Call a stand-in; nothing else can be called."""
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(arguments, tuple) or not any(function is known for known in _REPLACED.values()):
            raise UnsafePickle("a call of something that is no array")
        self.stack.append(function(*arguments))

    def load_build(self) -> None:
        """Give a stand-in its state."""
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) not in (_Array, _Dtype):
            raise UnsafePickle("a state for something that is no array")
        target.__setstate__(state)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._fill(self.stack[-1], [key, value])

    def load_setitems(self) -> None:
        items = self.pop_mark()
        self._fill(self.stack[-1], items)

    def load_dict(self) -> None:
        items = self.pop_mark()
        made: dict[str, Any] = {}
        self._fill(made, items)
        self.append(made)

    def _fill(self, target: Any, items: list[Any]) -> None:
        """Names alone are keys: the hash of a deep tuple would run for ever, or out of stack."""
        if type(target) is not dict:
            raise UnsafePickle("entries for something that is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_key(key)] = value

    def load_bytearray8(self) -> None:
        """Take bytes; the length is believed only as far as there are bytes."""
        length = int.from_bytes(self.read(8), "little")
        data = self.read(length)
        if len(data) < length:
            raise UnsafePickle("more bytes announced than there are")
        self.append(bytes(data))

    dispatch |= {
        pickle.REDUCE[0]: load_reduce,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.DICT[0]: load_dict,
        pickle.BYTEARRAY8[0]: load_bytearray8,
    }


def read_arrays(data: bytes) -> dict[str, Any]:
    """Return the dictionary that a pickle holds: arrays, and plain values beside them.

    Raises:
        UnsafePickle: It holds anything else, or is damaged. Nothing that it names was called.
    """
    try:
        loaded = _Reader(io.BytesIO(data)).load()
        if not isinstance(loaded, dict):
            raise UnsafePickle(f"the file holds a {type(loaded).__name__}; must be a dictionary of arrays")
        budget = iter(range(_MOST_ENTRIES))
        return {_key(key): _value(value, 0, budget) for key, value in loaded.items()}
    except UnsafePickle:
        raise
    except KeyError as error:
        raise UnsafePickle("the file holds more than numpy arrays and plain containers") from error
    except Exception as error:  # a damaged or hostile file fails in as many ways as there are operations
        raise UnsafePickle(f"the file is no readable pickle ({type(error).__name__}: {str(error)[:100]})") from error


def _key(key: Any) -> str:
    if type(key) is not str:
        raise UnsafePickle(f"an entry is called by a {type(key).__name__}; names are text")
    return key


def _value(value: Any, depth: int, budget: Iterator[int]) -> Any:
    if next(budget, None) is None:
        raise UnsafePickle(f"more than {_MOST_ENTRIES} entries")
    if isinstance(value, _Array):
        return value.make()
    if value is None or isinstance(value, str | int | float | bool | bytes):
        return value
    if depth > 8:
        raise UnsafePickle("containers nested more than eight deep")
    if isinstance(value, dict):
        return {_key(key): _value(item, depth + 1, budget) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_value(item, depth + 1, budget) for item in value]
    raise UnsafePickle(f"a {type(value).__name__}; only numpy arrays and plain containers are read")
