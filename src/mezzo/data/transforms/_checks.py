"""Arguments of transforms, checked when they are made: who, which argument, what came, what is allowed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from mezzo.files import short


def probability(owner: object, name: str) -> None:
    """Raise a ValueError unless the attribute is a number from 0 to 1."""
    value = getattr(owner, name)
    if not is_number(value) or not 0 <= value <= 1:
        raise fault(owner, name, "must be a probability, 0 to 1")


def at_least(owner: object, name: str, least: float, *, whole: bool = False) -> None:
    """Raise a ValueError unless the attribute is a number, or a whole one, of at least `least`."""
    value = getattr(owner, name)
    if not is_number(value) or value < least or (whole and not isinstance(value, int)):
        raise fault(owner, name, f"must be {'an integer' if whole else 'a number'} of at least {least}")


def above_zero(owner: object, name: str) -> None:
    """Raise a ValueError unless the attribute is a number above 0."""
    value = getattr(owner, name)
    if not is_number(value) or value <= 0:
        raise fault(owner, name, "must be a number above 0")


def ordered(owner: object, low: str, high: str) -> None:
    """Raise a ValueError if the attribute `low` is above the attribute `high`."""
    if getattr(owner, low) > getattr(owner, high):
        raise fault(owner, low, f"must not be above {high}={getattr(owner, high)!r}")


def width_height(owner: object, name: str) -> tuple[int, int]:
    """Return the attribute as width and height, both positive integers."""
    pair = getattr(owner, name)
    if not is_sequence(pair, 2) or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in pair):
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


def label_value(owner: object, name: str) -> None:
    """Raise a ValueError unless the attribute is an integer from 0 to 255."""
    value = getattr(owner, name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 255:
        raise fault(owner, name, "must be an integer from 0 to 255")


def fault(owner: object, name: str, rule: str) -> ValueError:
    """Return the error that says which argument of which transform breaks a rule."""
    return ValueError(f"{type(owner).__name__}: {name}={short(getattr(owner, name), 200)} {rule}")


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_sequence(value: Any, length: int) -> bool:
    """Return whether a value is a list or tuple of that length."""
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) == length
