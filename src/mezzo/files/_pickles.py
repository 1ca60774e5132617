"""Untrusted pickles: only plain containers and passive placeholders; nothing that a file names is looked up or called."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, ClassVar

from mezzo.errors import MezzoError
from mezzo.files._bounds import too_large

_MOST_LEVELS = 10


class UnsafePickle(MezzoError):
    """A weights file contains something other than arrays."""


def _opcodes(*names: str) -> dict[int, Any]:
    return {getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in names}


class PlainUnpickler(
    pickle._Unpickler
):  # the unpickler in Python: the one in C allocates any size that a file asks for
    """An unpickler of plain containers and placeholders; it has no other operations.

    Args:
        file: The pickle.
        room: Limit on the total bytes of encoded texts; a file can encode one text many times.
    """

    replaced: ClassVar[Mapping[str, Any]]
    """Placeholders by the name in the file, such as 'numpy.ndarray'."""
    stateful: ClassVar[tuple[type, ...]] = ()
    """Placeholders that accept a state."""
    only: ClassVar[str] = "only arrays and plain containers are read"
    """End of the message that refuses everything else."""

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

    def __init__(self, file: BinaryIO, room: int) -> None:
        super().__init__(file)
        self._room = room

    def find_class(self, module: str, name: str) -> Any:
        wanted = f"{module}.{name}"
        if wanted not in self.replaced:
            raise UnsafePickle(f"the file names {wanted[:60]!r}; {self.only}")
        return self.replaced[wanted]

    def load_reduce(self) -> None:
        """Call a placeholder; nothing else can be called."""
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(arguments, tuple) or not any(function is known for known in self.replaced.values()):
            raise UnsafePickle(f"a call of something else; {self.only}")
        if function is encode and arguments and isinstance(arguments[0], str):
            self._room -= len(arguments[0])
            if self._room < 0:
                raise UnsafePickle("texts in it are encoded to more bytes than the file may unpack to")
        self.stack.append(function(*arguments))

    def load_build(self) -> None:
        """Set the state of a placeholder."""
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) not in self.stateful:
            raise UnsafePickle(f"a state for something else; {self.only}")
        target.__setstate__(state)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._fill(self.stack[-1], [key, value])

    def load_setitems(self) -> None:
        items = self.pop_mark()
        self._fill(self.stack[-1], items)

    def load_dict(self) -> None:
        items = self.pop_mark()
        entries: dict[Any, Any] = {}
        self._fill(entries, items)
        self.append(entries)

    def _fill(self, target: Any, items: list[Any]) -> None:
        """Add entries; keys must be names or numbers: hashing a deep tuple could overflow the stack."""
        if type(target) is not dict:
            raise UnsafePickle("entries for an object that is not a dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[self.key(key)] = value

    def key(self, key: Any) -> Any:
        """Return a key of a dictionary; raises UnsafePickle unless it is text."""
        if type(key) is not str:
            raise UnsafePickle(f"an entry has a key of type {type(key).__name__}; keys must be text")
        return key

    def load_bytearray8(self) -> None:
        """Read bytes; the announced length must be there."""
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


def encode(text: Any, codec: Any = "latin1") -> bytes:
    """Return bytes that an old pickle protocol wrote as latin1 text."""
    if not isinstance(text, str) or not isinstance(codec, str) or codec != "latin1":
        raise UnsafePickle("text in another encoding than latin1")
    return text.encode("latin1")


def empty_dict(*args: Any) -> dict[str, Any]:
    """Return an empty dictionary; pickles fill an ordered dictionary after creating it."""
    if args:
        raise UnsafePickle("a dictionary made from something else; only arrays and plain containers are read")
    return {}


def report_bad_pickle(read: Callable[[], Any]) -> Any:
    """Call a reader of a pickle; turn any error of a damaged or hostile file into a one-line UnsafePickle."""
    try:
        return read()
    except UnsafePickle:
        raise
    except KeyError as error:  # an operation or a memo that is not there
        raise UnsafePickle("the file holds more than arrays and plain containers") from error
    except Exception as error:  # damaged operations can raise anything
        shown = " ".join(str(error).split())[:100]
        raise UnsafePickle(f"the file is not a readable pickle ({type(error).__name__}: {shown})") from error


def rebuild_tree(
    tree: Any,
    make: Callable[[Any], Any],
    size_of: Callable[[Any], int | None],
    *,
    most_entries: int,
    limit: int,
    tuples: type = tuple,
) -> Any:
    """Return a tree with arrays in place of their placeholders, after checking their total size.

    Args:
        tree: What the unpickler returned.
        make: Creates the array of a placeholder.
        size_of: Bytes of the array of a placeholder, None for everything else.
        most_entries: Maximum number of values, as a tree can refer to one of its parts many times.
        limit: Maximum total bytes of all arrays; an array that is referenced twice counts twice.
        tuples: Type that replaces tuples.

    Raises:
        UnsafePickle: A limit is exceeded, or a value is neither plain nor a placeholder.
    """
    entries = total = 0
    level = [tree]
    for _depth in range(_MOST_LEVELS):
        inner: list[Any] = []
        for node in level:
            entries += 1
            if isinstance(node, dict | list | tuple):
                if entries + len(inner) + len(node) > most_entries:
                    raise UnsafePickle(f"more than {most_entries} entries")
                inner += node.values() if isinstance(node, dict) else node
            elif (size := size_of(node)) is not None:
                total += size
            elif node is not None and not isinstance(node, str | int | float | bool | bytes):
                raise UnsafePickle(f"a {type(node).__name__.lstrip('_')}; only arrays and plain containers are read")
        level = inner
    if level:
        raise UnsafePickle(f"containers nested more than {_MOST_LEVELS - 2} deep")
    if total > limit:
        raise UnsafePickle(too_large(total, limit))
    return _rebuild(tree, make, size_of, tuples)


def _rebuild(node: Any, make: Callable[[Any], Any], size_of: Callable[[Any], int | None], tuples: type) -> Any:
    if isinstance(node, dict):
        return {key: _rebuild(value, make, size_of, tuples) for key, value in node.items()}
    if isinstance(node, list | tuple):
        made = [_rebuild(value, make, size_of, tuples) for value in node]
        return made if isinstance(node, list) else tuples(made)
    return node if size_of(node) is None else make(node)
