"""Options described once, as fields of a dataclass beside the code that they control.

A field has its type and its default as always; `Option` in its annotation adds the help text, the
spellings and the limits. The command line (`mezzo.cli`), the checks (`check_options`) and the tables
of the documentation (docs/_tables.py) are made from these.

>>> from typing import Annotated
>>> @dataclass(frozen=True, kw_only=True)
... class Options:
...     workers: Annotated[int, Option("Processes that read data.", "--workers", "-j", at_least=0)] = 2
>>> [(each.name, each.spellings, each.default_text) for each in options_of(Options)]
[('workers', ('--workers', '-j'), '2')]
"""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

from mezzo._arguments import check_at_least
from mezzo.errors import OptionError, unknown_choice

REQUIRED: Any = dataclasses.MISSING


class Option:
    """What a command line must know about a setting besides its type and default.

    Args:
        help: One or two sentences; the default is added to them.
        spellings: Names such as `--workers` and `-j`; none: made of the name of the field.
        choices: The allowed words, which are checked and completed.
        suggest: Returns words to complete a value with; others are allowed too.
        at_least: The smallest allowed number.
        default_text: How the help shows the default, if not as it is.
        parse: Returns the value of a text; None: by the type of the field.
        metavar: What stands for the value in the help.
        is_argument: The value is given by its position, without a name.
    """

    def __init__(
        self,
        help: str,
        *spellings: str,
        choices: tuple[str, ...] = (),
        suggest: Callable[[], Iterable[str]] | None = None,
        at_least: float | None = None,
        default_text: str | None = None,
        parse: Callable[[str], Any] | None = None,
        metavar: str | None = None,
        is_argument: bool = False,
    ) -> None:
        self.help, self.spellings, self.choices, self.suggest = help, spellings, choices, suggest
        self.at_least, self.default_text, self.parse = at_least, default_text, parse
        self.metavar, self.is_argument = metavar, is_argument

    def words(self) -> Iterable[str]:
        """Return the words that a shell completes a value with."""
        return self.choices if self.suggest is None else self.suggest()


class Subset:
    """Which options of a dataclass a command has.

    Args:
        names: Fields; none: all.
        defaults: Defaults of the command, instead of those of the dataclass.
    """

    def __init__(self, *names: str, **defaults: Any) -> None:
        self.names, self.defaults = names, defaults


@dataclass(frozen=True, slots=True)
class Described:
    """A setting with its `Option`."""

    name: str
    type: Any
    default: Any
    """`REQUIRED` if there is none."""
    option: Option

    @property
    def spellings(self) -> tuple[str, ...]:
        """The names on a command line, the preferred one first."""
        return self.option.spellings or (f"--{self.name.replace('_', '-')}",)

    @property
    def default_text(self) -> str:
        """The default as the help shows it; '' if there is nothing to show."""
        value = self.default
        if self.option.default_text is not None:
            return self.option.default_text
        if value is REQUIRED or value is None or value is False or value == ():
            return ""
        if isinstance(value, tuple):
            return (" " if isinstance(value[0], int) else ",").join(map(str, value))
        return f"{value:g}" if isinstance(value, float) else str(value)

    @property
    def help(self) -> str:
        """The help with the default."""
        return f"{self.option.help} [default: {self.default_text}]" if self.default_text else self.option.help


def describe(name: str, annotation: Any, default: Any) -> Described | None:
    """Return a setting that is annotated with an `Option`; None for any other."""
    own, *extra = get_args(annotation) if hasattr(annotation, "__metadata__") else (annotation,)
    option = next((each for each in extra if isinstance(each, Option)), None)
    return None if option is None else Described(name, own, default, option)


def options_of(cls: Any) -> tuple[Described, ...]:
    """Return the fields of a dataclass that have an `Option`, those of its bases first."""
    return _options_of(cls)


@cache
def _options_of(cls: Any) -> tuple[Described, ...]:
    hints = get_type_hints(cls, include_extras=True)
    found = (describe(field.name, hints[field.name], field.default) for field in dataclasses.fields(cls))
    return tuple(each for each in found if each is not None)


def yaml_keys(cls: Any) -> tuple[str, ...]:
    """Return the spellings of all options as keys of a YAML file write them: `save_interval`."""
    names = (spelling for each in options_of(cls) for spelling in each.spellings if spelling.startswith("--"))
    return tuple(name.removeprefix("--").replace("-", "_") for name in names)


def check_options(options: Any) -> None:
    """Raise OptionError for a value that is below its limit or not among its choices.

    >>> from typing import Annotated
    >>> @dataclass
    ... class Options:
    ...     level: Annotated[str, Option("How much is half.", choices=("O1", "O2"))] = "O1"
    >>> check_options(Options("O4"))
    Traceback (most recent call last):
    ...
    mezzo.errors._kinds.OptionError: unknown level 'O4'; allowed: O1, O2
    """
    for each in options_of(type(options)):
        check_value(each, getattr(options, each.name), each.name)


def check_value(setting: Described, value: Any, name: str) -> None:
    """Raise OptionError for a value that is below its limit or not among its choices; None passes."""
    option = setting.option
    if option.at_least is not None:
        check_at_least(name, value, option.at_least, raising=OptionError)
    if option.choices and value is not None:
        for word in value if isinstance(value, tuple) else (value,):
            if word not in option.choices:
                raise OptionError(unknown_choice(name, word, option.choices))


def split_commas(text: str) -> tuple[str, ...]:
    """Return the words of a list with commas.

    >>> split_commas("fp16, int8")
    ('fp16', 'int8')
    """
    return tuple(word.strip() for word in text.split(",") if word.strip())


FP8_HELP = "Settings of FP8 products at level O3, such as emulate,gradient=e4m3."


def parse_settings(text: str) -> dict[str, bool | int | str]:
    """Return settings from a list with commas; a name without a value is True.

    >>> parse_settings("emulate,min_size=0,gradient=e4m3")
    {'emulate': True, 'min_size': 0, 'gradient': 'e4m3'}
    """
    pairs = (word.partition("=") for word in split_commas(text))
    return {name.replace("-", "_"): _value(value) if equals else True for name, equals, value in pairs}


def _value(text: str) -> bool | int | str:
    words = {"true": True, "false": False}
    return int(text) if text.removeprefix("-").isdecimal() else words.get(text.lower(), text)
