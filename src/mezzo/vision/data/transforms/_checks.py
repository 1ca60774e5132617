"""Checks of the arguments of transforms; an error names the transform, the argument, its value and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mezzo._arguments import check_integer, check_number, is_number
from mezzo.files import short_repr


def probability(owner: object, name: str) -> None:
    """Raise a ValueError unless the attribute is a number from 0 to 1."""
    check_number(_label(owner, name), getattr(owner, name), at_least=0, at_most=1)


def at_least(owner: object, name: str, least: float) -> None:
    """Raise a ValueError unless the attribute is a number of at least `least`."""
    check_number(_label(owner, name), getattr(owner, name), at_least=least)


def integer(owner: object, name: str, least: int = 1, most: int = 2**31 - 1) -> None:
    """Raise a ValueError unless the attribute is an integer from `least` to `most`."""
    check_integer(_label(owner, name), getattr(owner, name), at_least=least, at_most=most)


def above_zero(owner: object, name: str) -> None:
    """Raise a ValueError unless the attribute is a number above 0."""
    check_number(_label(owner, name), getattr(owner, name), above=0)


def ordered(owner: object, low: str, high: str) -> None:
    """Raise a ValueError if the attribute `low` is above the attribute `high`."""
    if getattr(owner, low) > getattr(owner, high):
        raise fault(owner, low, f"must not be above {high}={getattr(owner, high)!r}")


def width_height(owner: object, name: str) -> tuple[int, int]:
    """Return the attribute as width and height, both positive integers."""
    pair = getattr(owner, name)
    if not is_sequence(pair, 2) or not all(type(side) is int and side > 0 for side in pair):
        raise fault(owner, name, "must be two positive integers, [width, height]")
    return pair[0], pair[1]


def colour(owner: object, name: str) -> tuple[int, int, int]:
    """Return the attribute, one number or three, as a grey or RGB value.

    Images stay uint8, so 127.5, the usual padding, becomes 128: half a grey level from an image of floats.
    """
    value = getattr(owner, name)
    values = [value] * 3 if is_number(value) else value
    if not is_sequence(values, 3) or not all(is_number(v) and 0 <= v <= 255 for v in values):
        raise fault(owner, name, "must be a number from 0 to 255, or three of them")
    red, green, blue = (round(v) for v in values)
    return red, green, blue


def fault(owner: object, name: str, rule: str) -> ValueError:
    """Return the error that says which argument of which transform breaks a rule."""
    return ValueError(f"{_label(owner, name)}={short_repr(getattr(owner, name), 200)}: {rule}")


def _label(owner: object, name: str) -> str:
    return f"{type(owner).__name__}: {name}"


def is_sequence(value: Any, length: int) -> bool:
    """Return whether a value is a list or tuple of that length."""
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) == length
