"""Untrusted JSON, with limits on size, depth and numbers; every error is one line."""

from __future__ import annotations

import json
import math
import os
from typing import Any

from mezzo.errors import MezzoError
from mezzo.files._errors import FileError
from mezzo.files._read import MAX_TEXT, read_bytes, shown_path

MAX_DEPTH = 200
_INT_BITS = 64


def parse_json(text: str | bytes, *, max_depth: int = MAX_DEPTH, int_bits: int = _INT_BITS) -> Any:
    """Parse a JSON text.

    Args:
        text: Bytes are decoded as UTF-8; unpaired surrogates are accepted.
        max_depth: How deep lists and objects may be nested.
        int_bits: Integers of more bits are refused, as they could overflow later.

    Raises:
        ValueError: It is not JSON, is nested too deep, or has a number that is too large. One line.

    >>> parse_json('{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    >>> parse_json("[" * 300 + "]" * 300)
    Traceback (most recent call last):
        ...
    ValueError: nested more than 200 levels deep
    """
    try:
        decoded = text.decode("utf-8", "surrogatepass") if isinstance(text, bytes) else text
        tree = json.loads(
            decoded,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=lambda digits: _whole(digits, int_bits),
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"nested more than {max_depth} levels deep") from error
    _refuse_deep(tree, max_depth)
    return tree


def read_json(
    path: str | os.PathLike[str],
    *,
    limit: int = MAX_TEXT,
    raising: type[MezzoError] = FileError,
    max_depth: int = MAX_DEPTH,
    int_bits: int = _INT_BITS,
) -> Any:
    """Parse a JSON file; see `parse_json`.

    Raises:
        MezzoError: Of class `raising`: the file cannot be read, or is not JSON; the message names it.
    """
    data = read_bytes(path, limit=limit, raising=raising)
    try:
        return parse_json(data, max_depth=max_depth, int_bits=int_bits)
    except ValueError as error:
        raise raising(f"{shown_path(path)}: {error}") from error


def _refuse_deep(tree: Any, max_depth: int) -> None:
    """Raise if lists and objects are nested too deep for recursive functions."""
    level, depth = [tree], 0
    while level := [node for node in level if isinstance(node, (dict, list))]:
        depth += 1
        if depth > max_depth:
            raise ValueError(f"nested more than {max_depth} levels deep")
        level = [child for node in level for child in (node.values() if isinstance(node, dict) else node)]


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"not JSON: {name} is not allowed")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {digits[:40]} is too large")
    return number


def _whole(digits: str, bits: int) -> int:
    if len(digits) > bits or int(digits).bit_length() > bits:  # a digit has more than three bits
        raise ValueError(f"the number {digits[:40]} is too large")
    return int(digits)
