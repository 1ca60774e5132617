"""Numbers of a configuration, checked: what came, what is allowed."""

from __future__ import annotations

import itertools
import math

from mezzo.files import short

LARGEST = 2**31 - 1


def number(
    what: str, value: object, *, at_least: float = -math.inf, above: float = -math.inf, at_most: float = math.inf
) -> float:
    """Return a value as a finite float, or raise.

    Raises:
        ValueError: It is no number, or outside of the limits.

    >>> number("lr", 1, above=0)
    1.0
    >>> number("lr", "1e", above=0)
    Traceback (most recent call last):
    ...
    ValueError: lr='1e': must be a number above 0
    """
    limits = [
        f"{word} {limit:g}"
        for word, limit in (("of at least", at_least), ("above", above), ("of at most", at_most))
        if math.isfinite(limit)
    ]
    wanted = " ".join(["must be a number", " and ".join(limits)]).strip()
    found = _finite(value)
    if found is None or found < at_least or found <= above or found > at_most:
        raise ValueError(f"{what}={short(value)}: {wanted}")
    return found


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number beyond the range of floats
        return None


def whole(what: str, value: object, *, at_least: int = 0, at_most: int = LARGEST) -> int:
    """Return a value as a whole number within limits, or raise.

    Raises:
        ValueError: It is none.

    >>> whole("iters", 0.5, at_least=1)
    Traceback (most recent call last):
    ...
    ValueError: iters=0.5: must be a whole number from 1 to 2147483647
    """
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
        raise ValueError(f"{what}={short(value)}: must be a whole number from {at_least} to {at_most}")
    return value


def numbers(what: str, value: object, *, at_least: float = -math.inf) -> tuple[float, ...]:
    """Return a list of numbers as a tuple, or raise.

    Raises:
        ValueError: It is no list, or has something else in it.
    """
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{what}={short(value)}: must be a list of numbers")
    return tuple(number(f"{what}[{i}]", item, at_least=at_least) for i, item in enumerate(value))


def wholes(what: str, value: object, *, count: int | None = None, at_most: int = LARGEST) -> tuple[int, ...]:
    """Return a list of whole numbers of at least 1 as a tuple, or raise.

    Raises:
        ValueError: It is no list, has something else in it, or not `count` entries.
    """
    if not isinstance(value, (list, tuple)) or not value or count not in (None, len(value)):
        wanted = "whole numbers" if count is None else f"{count} whole numbers"
        raise ValueError(f"{what}={short(value)}: must be a list of {wanted}")
    return tuple(whole(f"{what}[{i}]", item, at_least=1, at_most=at_most) for i, item in enumerate(value))


def increasing(what: str, value: object) -> tuple[int, ...]:
    """Return a list of whole numbers that grow as a tuple, or raise.

    Raises:
        ValueError: It is no such list.
    """
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"{what}={short(value)}: must be a list of whole numbers")
    found = tuple(whole(f"{what}[{i}]", item) for i, item in enumerate(value))
    if any(later <= earlier for earlier, later in itertools.pairwise(found)):
        raise ValueError(f"{what}={short(value)}: each must be larger than the one before")
    return found


def flag(what: str, value: object) -> bool:
    """Return True or False, or raise.

    Raises:
        ValueError: It is neither.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{what}={short(value)}: must be True or False")
    return value
