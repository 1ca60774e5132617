"""Logs are foreign text: colours, control characters, gigabytes. Here they become plain and bounded."""

import os
import re
from pathlib import Path

READ_BYTES = 4 * 2**20
"""Of a longer log, half of this is read from each end."""

TAIL_LINES = 60
LINE_CHARS = 2000

# A command of a terminal: colours and cursor moves, titles and links (bounded: an open one must not hide what follows).
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b\n]{0,512}(?:\x07|\x1b\\)|[@-Z\\^_])")
# What XML forbids, what a browser does not show, and what turns the direction of the text that follows.
_INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def plain(text: str) -> str:
    r"""Return a text without escape sequences and control characters; every end of a line is a newline.

    What is left may stand in XML and in UTF-8; it is not escaped.

    >>> plain("\x1b[33m Run successfully\x1b[0m\r\nnext\x00")
    ' Run successfully\nnext'
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _INVISIBLE.sub("", _ESCAPES.sub("", text))


def read_log(path: Path) -> str | None:
    """Return what a log says, plain; of a long one the two ends. None if there is no such file to read."""
    try:
        if not path.is_file():  # a pipe or a device would never end
            return None
        with path.open("rb") as file:
            return _shortened(plain(_read_ends(file.fileno()).decode(errors="replace")))
    except OSError:
        return None


def tail(text: str, lines: int = TAIL_LINES) -> str:
    r"""Return the last lines of a text.

    >>> tail("a\nb\nc\n\n", 2)
    'b\nc'
    """
    return "\n".join(text.rstrip().split("\n")[-lines:])


def one_line(text: str, chars: int = 160) -> str:
    r"""Return a text as one line, its end left out where it is long.

    >>> one_line("exit status 1:\n  no such file", 16)
    'exit status 1...'
    """
    words = " ".join(plain(text).split())
    return words if len(words) <= chars else f"{words[: chars - 3]}..."


def _read_ends(number: int) -> bytes:
    size, half = os.fstat(number).st_size, READ_BYTES // 2
    if size <= READ_BYTES:
        return os.pread(number, READ_BYTES, 0)
    gap = f"\n[... {size - 2 * half} bytes are left out here ...]\n".encode()
    return os.pread(number, half, 0) + gap + os.pread(number, half, size - half)


def _shortened(text: str) -> str:
    lines = text.split("\n")
    return "\n".join(line if len(line) <= LINE_CHARS else f"{line[:LINE_CHARS]}..." for line in lines)
