"""FaultLog of a configuration: collected while it is read, told all at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from mezzo.errors import MezzoError, unknown_choice
from mezzo.files import SourceMark

T = TypeVar("T")
SHOWN = 50  # maximum number of faults in a message; a wrong file has thousands


class RecipeError(MezzoError):
    """A recipe that cannot be used; the message has one line per fault, with file and line number.

    Args:
        faults: The lines.
    """

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults = tuple(faults)
        more = len(self.faults) - SHOWN
        super().__init__("\n".join(self.faults[:SHOWN] + ((f"and {more} more faults",) if more > 0 else ())))


class FaultLog:
    """The faults of a recipe so far."""

    def __init__(self) -> None:
        self._found: set[tuple[str, int, str]] = set()
        self._count = 0

    def __len__(self) -> int:
        """Return the number of calls of `add`, including repeated faults."""
        return self._count

    def add(self, mark: SourceMark, text: str) -> None:
        """Add a fault; newlines are removed."""
        self._found.add((mark.file, mark.line or 0, " ".join(text.split())))
        self._count += 1

    def raise_if_any(self) -> None:
        """Raise a `RecipeError` with all faults, sorted by place; do nothing if there is none."""
        if self._found:
            raise RecipeError(f"{SourceMark(file, line or None)}: {text}" for file, line, text in sorted(self._found))


def parsed(value: T | None) -> T:
    """Return the parsed value; parsing errors have already been raised."""
    assert value is not None
    return value


def unknown_key(what: str, key: str, allowed: Iterable[str]) -> str:
    """Return the message for an unknown key, with the nearest and all allowed ones."""
    return unknown_choice(what, key if len(key) <= 60 else key[:57] + "...", allowed)
