"""Read a command as a shell would, without running a shell."""

import re
import shlex
from dataclasses import dataclass

from mezzo.devices import DeviceError, parse_device

_EXPORT_FOLDER = re.compile(r"--save[_-](?:inference[_-])?dir[= ](\S+)")
_DEVICE_OPTION = re.compile(r"(?<!\S)(--device|--use[-_]gpu)([= ])(\S+)")


def find_shell_syntax(text: str) -> list[str]:
    """Return what would make a shell run more than one command: unquoted `;`, `&`, `|`, backquote, `$(`, `<(`, newline.

    C-style quotes (`$'...'`) are included: what they hide cannot be told without a shell.

    >>> find_shell_syntax("python a.py --x '1;2' --y \\"3;4\\" > log 2>&1")
    []
    >>> find_shell_syntax("python a.py; rm -rf x")
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
    """Return the words of a command; empty if its quotes do not close."""
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


@dataclass(frozen=True)
class DeviceOption:
    """An option of a command that chooses a device."""

    name: str
    joint: str  # `=` or a blank
    value: str

    @property
    def text(self) -> str:
        """The option as the command has it."""
        return f"{self.name}{self.joint}{self.value}"


def gpu_options(command: str) -> list[DeviceOption]:
    """Return the options that ask for a GPU.

    >>> [option.text for option in gpu_options("x --device gpu:1 --use_gpu=True --use-gpu False")]
    ['--device gpu:1', '--use_gpu=True']
    """
    options = (DeviceOption(*parts) for parts in _DEVICE_OPTION.findall(command))
    return [option for option in options if _is_gpu(option)]


def _is_gpu(option: DeviceOption) -> bool:
    if option.name != "--device":
        return option.value == "True"
    try:
        return parse_device(option.value).kind == "cuda"
    except DeviceError:
        return False


def export_folders(command: str) -> list[str]:
    """Return the folders that an export command of mezzo writes to.

    >>> export_folders("python tools/export.py --save_dir=a --x"), export_folders("x.py --save-inference-dir b")
    (['a'], ['b'])
    """
    return _EXPORT_FOLDER.findall(command)
