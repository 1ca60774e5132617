"""What all commands with many options share."""

from typing import Any

import typer

from mezzo.errors import MezzoError


class UsageError(MezzoError):
    """Options that do not go together."""


FP8_HELP = "O3: settings of FP8 products, as in emulate,gradient=e4m3."
_WORDS = {"true": True, "false": False}


def read_fp8(text: str | None) -> dict[str, bool | int | str] | None:
    """Return the settings of an `Fp8Recipe` that an option names; a name alone is switched on.

    >>> read_fp8("emulate,min_size=0,gradient=e4m3")
    {'emulate': True, 'min_size': 0, 'gradient': 'e4m3'}
    """
    if text is None:
        return None
    pairs = (part.strip().partition("=") for part in text.split(",") if part.strip())
    return {name.replace("-", "_"): _value(value) if equals else True for name, equals, value in pairs}


def _value(text: str) -> bool | int | str:
    return int(text) if text.removeprefix("-").isdecimal() else _WORDS.get(text.lower(), text)


def option(help: str, *names: str) -> Any:
    """Return an option; options are written with `-` or `_`, the command takes both."""
    return typer.Option(*names, help=help)
