"""How the shell scripts read a text: a line becomes key and value, a value a list, a pair an argument.

The functions do exactly what the shell does, also with odd text: nothing is trimmed, and nothing is an error. `lint`
reports odd text.
"""

from fnmatch import fnmatchcase


def kept_lines(text: str, first: int | None = None) -> tuple[str, ...]:
    """Split a text into lines without empty ones, CR and byte order mark; the limit counts empty lines."""
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    return tuple(line for line in lines[:first] if line)


def key_of(line: str) -> str:
    """Return the part before the first colon."""
    return line.split(":", 1)[0]


def second_piece(line: str) -> str:
    """Return the part between the first and the second colon: the rule of nearly all repositories."""
    pieces = line.split(":", 2)
    return pieces[1] if len(pieces) > 1 else ""


def after_first_colon(line: str) -> str:
    """Return the part after the first colon, or the whole line without one: PaddleDetection's rule."""
    head, colon, rest = line.partition(":")
    return rest if colon else head


def items(value: str, separator: str = "|") -> list[str]:
    """Split a list as the shell does: empty items count, except after the last separator."""
    if not value:
        return []
    parts = value.split(separator)
    return parts[:-1] if parts[-1] == "" else parts


def item(value: str, index: int) -> str:
    """Return one item of a list; empty if the list is too short."""
    parts = items(value)
    return parts[index] if index < len(parts) else ""


def for_mode(value: str, mode: str) -> str:
    """Return the value of a mode in `mode=value|mode=value`; empty if there is none."""
    for each in items(value):
        pieces = each.split("=")
        if pieces[0] == mode:
            return pieces[1] if len(pieces) > 1 else ""
    return ""


def argument(key: str, value: str, joint: str = "=") -> str:
    """Return `key=value`; one blank if the key is `null`, or the value is `null`, a blank or empty."""
    if key == "null" or value in ("null", " ", ""):
        return " "
    return f"{key}{joint}{value}"


def is_set(word: str) -> bool:
    """Return whether a field names a command. The shell's test of an empty field or of one with bars fails: no."""
    fields = items(word)
    return len(fields) == 1 and fields[0] not in ("", "null")


def same(left: str, right: str, quoted: bool) -> bool:
    """Compare as `[ $left = $right ]`: with one empty side the test is an error, which counts as "no".

    With two empty sides only `=` is left, which is a non-empty word: "yes". A quoted right side does not vanish.
    """
    return left == right and (bool(left) or not quoted)


def matches(word: str, pattern: str) -> bool:
    """Compare as `[[ $word = $pattern ]]`, where the right side is a pattern."""
    return fnmatchcase(word, pattern)


def evaluated(text: str) -> str:
    """Return the command that `eval $text` runs: a `|` becomes a blank."""
    return " ".join(items(text)) if "|" in text else text


def echoed(text: str) -> str:
    """Return what `echo -e` prints: the escapes that occur in commands are replaced."""
    if "\\" not in text:
        return text
    plain = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b", "\\": "\\"}
    out: list[str] = []
    rest = iter(text)
    for char in rest:
        if char != "\\":
            out.append(char)
            continue
        following = next(rest, "")
        if following == "c":
            break
        out.append(plain.get(following, "\\" + following))
    return "".join(out)
