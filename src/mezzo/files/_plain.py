"""Foreign text made plain: no colours, no control characters, one kind of line end."""

import re
import sys

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


def say(*texts: object, err: bool = False) -> None:
    """Print a line without control characters: everything that mezzo prints may hold a name from somebody's file.

    Args:
        texts: Joined by spaces; may hold newlines and tabs.
        err: Print to standard error.
    """
    print(plain(" ".join(map(str, texts))), file=sys.stderr if err else sys.stdout, flush=True)
