"""Checks of arguments and options; each error shows the value and the allowed range."""

from __future__ import annotations

import itertools
import math

from mezzo.errors import short_repr

LARGEST = 2**31 - 1


def check_at_least(name: str, value: float | None, least: float = 1, *, raising: type[Exception] = ValueError) -> None:
    """Raise an error if a number is below a limit; None passes.

    >>> check_at_least("batch_size", 0)
    Traceback (most recent call last):
    ...
    ValueError: batch_size=0: must be at least 1
    """
    if value is not None and not value >= least:  # NaN fails too
        raise raising(f"{name}={value}: must be at least {least}")


def is_number(value: object) -> bool:
    """Return whether a value is a finite number; True and False are not."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False


def check_number(
    name: str, value: object, *, at_least: float = -math.inf, above: float = -math.inf, at_most: float = math.inf
) -> float:
    """Return a finite number within limits as a float.

    Raises:
        ValueError: It is not a finite number, or outside the limits.

    >>> check_number("lr", 1, above=0)
    1.0
    >>> check_number("lr", "1e", above=0)
    Traceback (most recent call last):
    ...
    ValueError: lr='1e': must be a number above 0
    """
    if is_number(value):
        found = float(value)  # type: ignore[arg-type]
        if found >= at_least and found > above and found <= at_most:
            return found
    if math.isfinite(at_least) and math.isfinite(at_most):
        wanted = f" from {at_least:g} to {at_most:g}"
    else:
        limits = (("of at least", at_least), ("above", above), ("and at most", at_most))
        wanted = "".join(f" {word} {limit:g}" for word, limit in limits if math.isfinite(limit))
    raise ValueError(f"{name}={short_repr(value)}: must be a number{wanted}")


def check_integer(name: str, value: object, *, at_least: int = 0, at_most: int = LARGEST) -> int:
    """Return an integer within limits.

    Raises:
        ValueError: It is not an integer, or outside the limits.

    >>> check_integer("iters", 0.5, at_least=1)
    Traceback (most recent call last):
    ...
    ValueError: iters=0.5: must be an integer of at least 1
    """
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
        is_open = at_most == LARGEST and (not isinstance(value, int) or value <= LARGEST)
        wanted = f"of at least {at_least}" if is_open else f"from {at_least} to {at_most}"
        raise ValueError(f"{name}={short_repr(value)}: must be an integer {wanted}")
    return value


def check_numbers(name: str, value: object, *, at_least: float = -math.inf) -> tuple[float, ...]:
    """Return a list of numbers as a tuple.

    Raises:
        ValueError: It is not a list, or an entry is not a number of at least `at_least`.
    """
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name}={short_repr(value)}: must be a list of numbers")
    return tuple(check_number(f"{name}[{i}]", item, at_least=at_least) for i, item in enumerate(value))


def check_integers(
    name: str, value: object, *, count: int | None = None, at_least: int = 1, at_most: int = LARGEST
) -> tuple[int, ...]:
    """Return a list of integers as a tuple.

    Raises:
        ValueError: It is not a list, is empty, does not have `count` entries, or an entry is outside the limits.
    """
    if not isinstance(value, (list, tuple)) or not value or count not in (None, len(value)):
        wanted = "integers" if count is None else f"{count} integers"
        raise ValueError(f"{name}={short_repr(value)}: must be a list of {wanted}")
    return tuple(
        check_integer(f"{name}[{i}]", item, at_least=at_least, at_most=at_most) for i, item in enumerate(value)
    )


def check_increasing(name: str, value: object) -> tuple[int, ...]:
    """Return a list of strictly increasing integers as a tuple.

    Raises:
        ValueError: It is not such a list.
    """
    found = check_integers(name, value, at_least=0)
    if any(later <= earlier for earlier, later in itertools.pairwise(found)):
        raise ValueError(f"{name}={short_repr(value)}: each must be larger than the one before")
    return found


def check_flag(name: str, value: object) -> bool:
    """Return True or False.

    Raises:
        ValueError: The value is neither.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name}={short_repr(value)}: must be True or False")
    return value
