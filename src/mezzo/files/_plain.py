"""Printing of untrusted text: everything that mezzo prints goes through here."""

import sys

from mezzo.errors import one_line, plain, short_repr

__all__ = ["one_line", "plain", "say", "short_repr"]


def say(*texts: object, err: bool = False, end: str = "\n") -> None:
    """Print text without control characters, as it may contain names from untrusted files.

    Args:
        texts: Joined by spaces; newlines and tabs are allowed.
        err: Print to standard error.
        end: What follows the text.
    """
    stream = sys.stderr if err else sys.stdout
    text = plain(" ".join(map(str, texts)))
    encoding = getattr(stream, "encoding", None) or "utf-8"  # an ASCII terminal must not raise an error
    print(text.encode(encoding, "backslashreplace").decode(encoding), end=end, file=stream, flush=True)
