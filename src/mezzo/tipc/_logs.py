"""Read logs of any program: control characters are removed, and the size is limited."""

import os
import re
from pathlib import Path

from mezzo.files import FileError, open_regular, plain

READ_BYTES = 4 * 2**20
"""Largest number of bytes that is read; of a longer log, half of it from each end."""

TAIL_LINES = 60
LINE_CHARS = 2000
NOTICE = "mezzo tipc: "
"""Prefix of the lines that the runner writes at the head of a log."""

_RAISED = re.compile(r"(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)\b: ")


def read_log(path: Path) -> str | None:
    """Return a log as plain text, of a long one the two ends; None if it cannot be read."""
    try:
        with open_regular(path) as file:
            return _shortened(plain(_read_ends(file.fileno()).decode(errors="replace")))
    except (FileError, OSError):
        return None


def tail(text: str, lines: int = TAIL_LINES) -> str:
    r"""Return the last lines of a text.

    >>> tail("a\nb\nc\n\n", 2)
    'b\nc'
    """
    return "\n".join(text.rstrip().split("\n")[-lines:])


def one_line(text: str, chars: int = 160) -> str:
    r"""Return a text as one line, cut if it is long.

    >>> one_line("exit status 1:\n  no such file", 16)
    'exit status 1...'
    """
    words = " ".join(plain(text).split())
    return words if len(words) <= chars else f"{words[: chars - 3]}..."


def failure_line(text: str) -> str:
    r"""Return the line that says why a command failed: the error message, otherwise the last line; empty if there is none.

    A launcher prints many lines after the error of its worker.

    >>> failure_line("epoch 1\nmezzo: no such file\nTraceback ...\nChildFailedError:\n====\n")
    'mezzo: no such file'
    >>> failure_line("Traceback (most recent call last):\n  File ...\nValueError: bad\n")
    'ValueError: bad'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(NOTICE)]
    ours = [line for line in lines if line.startswith("mezzo: ")]
    raised = [line for line in lines if _RAISED.match(line) and "ChildFailedError" not in line]
    return one_line((ours or raised or lines or [""])[-1], 300)


def _read_ends(number: int) -> bytes:
    size, half = os.fstat(number).st_size, READ_BYTES // 2
    if size <= READ_BYTES:
        return os.pread(number, READ_BYTES, 0)
    gap = f"\n[... {size - 2 * half} bytes are left out here ...]\n".encode()
    return os.pread(number, half, 0) + gap + os.pread(number, half, size - half)


def _shortened(text: str) -> str:
    lines = text.split("\n")
    return "\n".join(line if len(line) <= LINE_CHARS else f"{line[:LINE_CHARS]}..." for line in lines)
