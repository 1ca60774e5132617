"""Foreign text on the terminal: everything that mezzo prints goes through here."""

import sys

from mezzo.errors import one_line, plain, short_repr

__all__ = ["one_line", "plain", "say", "short_repr"]


def say(*texts: object, err: bool = False, end: str = "\n") -> None:
    """Print a line without control characters: everything that mezzo prints may hold a name from somebody's file.

    Args:
        texts: Joined by spaces; may hold newlines and tabs.
        err: Print to standard error.
        end: What follows the text.
    """
    stream = sys.stderr if err else sys.stdout
    text = plain(" ".join(map(str, texts)))
    encoding = getattr(stream, "encoding", None) or "utf-8"  # a terminal in ASCII must not end a run
    print(text.encode(encoding, "backslashreplace").decode(encoding), end=end, file=stream, flush=True)
