"""The structure of a state as JSON, without its tensors.

Numbers, strings, booleans, None and lists are stored directly. Other values are objects with one key:
`{"dict": [[key, value], ...]}`, `{"tuple": [...]}`, `{"float": bits}` (infinities and NaN), `{"tensor": name}`.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mezzo.checkpoint._errors import CheckpointError

Tree: TypeAlias = Any
"""Tensors, numbers, strings, booleans, None; lists, tuples, and dicts of these with str or int keys."""

MOST_LEVELS = 100  # a deeper state contains itself, or comes from a hostile file
_BITS = re.compile("[0-9a-fA-F]{16}")  # bytes.fromhex() would skip spaces
MOST_INT_BITS = 4096  # Python refuses to read decimal numbers much longer than this


class Packer:
    """Separates a state into JSON and tensors.

    Attributes:
        tensors: The tensors by name; a name is the path in the state.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def pack(self, value: Tree, path: tuple[str, ...] = ()) -> Any:
        """Return a value as JSON data."""
        if len(path) > MOST_LEVELS:
            raise CheckpointError(f"state: nested deeper than {MOST_LEVELS} levels at {_dotted(path[:4])}...")
        if isinstance(value, Tensor):
            return self._take_out(value, path)
        if isinstance(value, Mapping):
            return {"dict": [[_key(key, path), self.pack(item, (*path, str(key)))] for key, item in value.items()]}
        if isinstance(value, (list, tuple)):
            items = [self.pack(item, (*path, str(index))) for index, item in enumerate(value)]
            return items if isinstance(value, list) else {"tuple": items}
        return _pack_leaf(value, path)

    def _take_out(self, value: Tensor, path: tuple[str, ...]) -> dict[str, Any]:
        name = _dotted(path)
        while name in self.tensors or name == "__metadata__":  # "a.b" is also the path of b in a
            name += "'"
        _refuse_without_values(value, name)
        self.tensors[name] = value.detach()
        return {"tensor": name}


def _pack_leaf(value: Any, path: tuple[str, ...]) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int) and value.bit_length() <= MOST_INT_BITS:
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    raise CheckpointError(
        f"state: {_dotted(path)} is a {type(value).__name__}, which a checkpoint cannot hold; allowed are tensors, numbers, "
        "strings, bools, None, lists, tuples and dicts"
    )


def _key(key: object, path: tuple[str, ...]) -> object:
    if isinstance(key, str) or (isinstance(key, int) and not isinstance(key, bool)):
        return key
    raise CheckpointError(f"state: {_dotted(path)} has the key {key!r}; keys are strings or whole numbers")


def _refuse_without_values(value: Tensor, name: str) -> None:
    is_sharded = hasattr(value, "full_tensor")
    if value.layout != torch.strided or value.is_quantized or value.is_meta or is_sharded:
        raise CheckpointError(
            f"state: {name} is a {type(value).__name__} ({value.layout}, {value.dtype}, on {value.device}); a checkpoint "
            "holds dense tensors: convert it first"
        )


def _dotted(path: tuple[str, ...]) -> str:
    """Return a path as one name that can be written in any encoding."""
    return ".".join(path).encode("utf-8", "backslashreplace").decode()


def unpack(node: Any, tensor: Callable[[str], Tensor], level: int = 0) -> Tree:
    """Return the value that JSON data represents.

    Args:
        node: From `Packer.pack`, or any other JSON data.
        tensor: Returns the tensor of a name.
        level: Depth in the state.

    Raises:
        ValueError: It is invalid; the message says why.
    """
    if level > MOST_LEVELS:
        raise ValueError(f"nested deeper than {MOST_LEVELS} levels")
    if isinstance(node, list):
        return [unpack(item, tensor, level + 1) for item in node]
    if not isinstance(node, dict):
        return node
    if len(node) != 1:
        raise ValueError(f"an object has {len(node)} keys, not one")
    ((kind, content),) = node.items()
    if kind == "dict" and isinstance(content, list):
        return _unpack_dict(content, tensor, level)
    if kind == "tuple" and isinstance(content, list):
        return tuple(unpack(item, tensor, level + 1) for item in content)
    if kind == "tensor" and isinstance(content, str):
        return tensor(content)
    if kind == "float" and isinstance(content, str) and _BITS.fullmatch(content):
        number: float = struct.unpack(">d", bytes.fromhex(content))[0]
        return number
    raise ValueError(f"an object of the unknown kind {kind[:40]!r}")


def _unpack_dict(pairs: list[Any], tensor: Callable[[str], Tensor], level: int) -> dict[str | int, Tree]:
    result: dict[str | int, Tree] = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in (str, int):
            raise ValueError("a dict has an entry that is not a key with a value")
        if pair[0] in result:
            raise ValueError(f"a dict has the key {str(pair[0])[:40]!r} twice")
        result[pair[0]] = unpack(pair[1], tensor, level + 1)
    return result
