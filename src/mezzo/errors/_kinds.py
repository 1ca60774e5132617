"""The base class of all errors, and the kinds that several packages raise."""

import difflib
from collections.abc import Iterable

from mezzo.errors._plain import printable


class MezzoError(Exception):
    """A mistake of the user, explained in one line; subclasses name the kind."""

    exit_code = 2
    """Exit code of a command: 2 for bad input, 1 for a failed run."""

    def __str__(self) -> str:
        r"""Return the message without control characters, as it may contain names from untrusted files.

        >>> print(MezzoError("\x1b[2J\x1b]0;title\x07a.png: no such file"))
        a.png: no such file
        """
        return printable(super().__str__())


class RunError(MezzoError):
    """A run that failed with valid input: out of memory, a model that raised, a step that failed."""

    exit_code = 1


class OptionError(MezzoError):
    """An option with a value that is not allowed, or options that contradict each other."""


class DeployError(MezzoError):
    """An exported model that cannot be used."""


def unknown_choice(what: str, came: object, allowed: Iterable[str]) -> str:
    """Return a message with a wrong value, the nearest allowed one, and all allowed ones.

    >>> unknown_choice("dtype", "bfloat", ["float16", "bfloat16"])
    "unknown dtype 'bfloat'; did you mean 'bfloat16'? allowed: float16, bfloat16"
    >>> unknown_choice("level", "zzz", ["O1", "O2"])
    "unknown level 'zzz'; allowed: O1, O2"
    """
    names = list(allowed)
    close = difflib.get_close_matches(str(came), names, n=1)
    hint = f" did you mean {close[0]!r}?" if close else ""
    return f"unknown {what} {came!r};{hint} allowed: {', '.join(names)}"
