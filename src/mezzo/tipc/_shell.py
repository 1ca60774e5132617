"""Looking at a command text as a shell would, without a shell."""

import re
import shlex

_SAVED = re.compile(r"--save[_-](?:inference[_-])?dir[= ](\S+)")


def dangerous(text: str) -> list[str]:
    """Return what would make a shell run more than the command: unquoted `;`, `&`, `|`, backquote, `$(`, `<(`, newline.

    Quotes in C's way (`$'...'`) are among them: what they hide cannot be told without a shell.

    >>> dangerous("python a.py --x '1;2' --y \\"3;4\\" > log 2>&1")
    []
    >>> dangerous("python a.py; rm -rf x")
    [';']
    """
    found: list[str] = []
    quote = ""
    place = 0
    while place < len(text):
        char, after = text[place], text[place + 1 : place + 2]
        if char == "\\" and quote != "'":
            place += 2
            continue
        if quote:
            if char == quote:
                quote = ""
            elif quote == '"' and (char == "`" or (char == "$" and after == "(")):
                found.append("$(" if char == "$" else char)
        elif char in "'\"" and text[place - 1 : place] != "$":
            quote = char
        elif char == "&" and place and text[place - 1] in "<>":
            pass  # 2>&1
        elif char in ";&|`\n":
            found.append("newline" if char == "\n" else char)
        elif (char in "$<>" and after == "(") or (char == "$" and after in ("'", '"')):
            found.append(char + after)
        place += 1
    return found


def words(text: str) -> tuple[str, ...]:
    """Return the words of a command, as far as that can be told without running a shell; empty if quotes do not close."""
    try:
        return tuple(shlex.split(text))
    except ValueError:
        return ()


def option_values(command: str, *names: str) -> list[str]:
    """Return the values of options in a command; names are written with `-`, commands may have `_`.

    >>> option_values("train.py --config  a.yml --data_path='b c' --config=d.yml", "--config", "--data-path")
    ['a.yml', 'b c', 'd.yml']
    """
    parts, found = words(command), []
    for place, word in enumerate(parts):
        name, equals, value = word.partition("=")
        if name.startswith("--") and name.replace("_", "-") in names:
            found.append(value if equals else "".join(parts[place + 1 : place + 2]))
    return [value for value in found if value]


def saved_to(command: str) -> list[str]:
    """Return the folders that an export command of ours is told to write to.

    >>> saved_to("python tools/export.py --save_dir=a --x"), saved_to("tools/export_model.py --save-inference-dir b")
    (['a'], ['b'])
    """
    return _SAVED.findall(command)
