"""Cleans untrusted text: removes colours and control characters, and unifies line ends."""

import re

# Terminal commands: colours, cursor moves, titles and links. Lengths are bounded: an open one must not hide what follows.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b\n]{0,512}(?:\x07|\x1b\\)|[@-Z\\^_])")
# Characters that XML forbids, that browsers do not show, or that change the direction of text.
_INVISIBLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)


def plain(text: str) -> str:
    r"""Return a text without escape sequences and control characters; all line ends become newlines.

    The result is valid in XML and UTF-8, but not escaped.

    >>> plain("\x1b[33m Run successfully\x1b[0m\r\nnext\x00")
    ' Run successfully\nnext'
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _INVISIBLE.sub("", _ESCAPES.sub("", text))


def printable(text: str) -> str:
    r"""Return a plain text with invisible characters replaced by their codes.

    >>> printable("a\u200b.png:\tno such file\n")
    'a\\u200b.png: no such file\n'
    """
    text = plain(text).replace("\t", " ")
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)


def one_line(text: object) -> str:
    r"""Return a name as one printable line, without newlines.

    >>> one_line("a\x1b[31mb\nc.png")
    'ab c.png'
    """
    name = str(text)
    return name if name.isprintable() else " ".join(printable(name).split())


def short_repr(value: object, limit: int = 60) -> str:
    """Return `repr(value)` for a message, cut to `limit` characters.

    >>> short_repr("abc"), short_repr("x" * 100, limit=10)
    ("'abc'", "'xxxxxx...")
    """
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "a very large number"
    return text if len(text) <= limit else text[: limit - 3] + "..."
