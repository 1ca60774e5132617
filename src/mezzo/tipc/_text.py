"""The shell's small rules: how a line becomes key and value, a value a list, and a pair an argument.

Nothing is trimmed and nothing is an error here: what the shell scripts do with odd text is the measure; the lint says
what is odd.
"""

from fnmatch import fnmatchcase


def kept_lines(text: str, first: int | None = None) -> tuple[str, ...]:
    """Cut the text into lines; the limit counts physical lines, empty ones are dropped after it. CR and a BOM go."""
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    return tuple(line for line in lines[:first] if line)


def key_of(line: str) -> str:
    """Return what stands before the first colon."""
    return line.split(":", 1)[0]


def second_piece(line: str) -> str:
    """Return what stands between the first and the second colon: the rule of nearly all repositories."""
    pieces = line.split(":", 2)
    return pieces[1] if len(pieces) > 1 else ""


def after_first_colon(line: str) -> str:
    """Return all that follows the first colon, the whole line where there is none: PaddleDetection's rule."""
    head, colon, rest = line.partition(":")
    return rest if colon else head


def items(value: str, separator: str = "|") -> list[str]:
    """Split a list as the shell does: empty items count, but the one behind a last separator does not."""
    if not value:
        return []
    parts = value.split(separator)
    return parts[:-1] if parts[-1] == "" else parts


def item(value: str, index: int) -> str:
    """Return one item of a list, empty where the list is too short."""
    parts = items(value)
    return parts[index] if index < len(parts) else ""


def for_mode(value: str, mode: str) -> str:
    """Read `mode=value|mode=value`: the first item of that mode wins, its second piece is the value; empty if there is none."""
    for each in items(value):
        pieces = each.split("=")
        if pieces[0] == mode:
            return pieces[1] if len(pieces) > 1 else ""
    return ""


def argument(key: str, value: str, joint: str = "=") -> str:
    """Make `key=value`, or one blank where the key is `null` or the value is `null`, a blank or nothing."""
    if key == "null" or value in ("null", " ", ""):
        return " "
    return f"{key}{joint}{value}"


def says(word: str) -> bool:
    """Tell whether a tested field names a command: the test of an empty one, or one with bars, is an error: 'no'."""
    fields = items(word)
    return len(fields) == 1 and fields[0] not in ("", "null")


def same(left: str, right: str, quoted: bool) -> bool:
    """Compare as `[ $left = $right ]`: an empty side is an error that counts as 'no'.

    Where both sides vanish a lone `=` is left, which is a word and therefore 'yes'; a quoted right side does not vanish.
    """
    return left == right and (bool(left) or not quoted)


def matches(word: str, pattern: str) -> bool:
    """Compare as `[[ $word = $pattern ]]`, where the right side is a pattern."""
    return fnmatchcase(word, pattern)


def evaluated(text: str) -> str:
    """Return what `eval $text` hands to the shell: a `|` becomes a blank."""
    return " ".join(items(text)) if "|" in text else text


def echoed(text: str) -> str:
    """Return what `echo -e` prints of a text: the escapes that occur in commands."""
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
