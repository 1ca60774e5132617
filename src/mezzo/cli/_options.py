"""What all commands with many options share."""

from typing import Any

import typer

from mezzo._errors import MezzoError


class UsageError(MezzoError):
    """Options that do not go together."""


def option(help: str, *names: str) -> Any:
    """Return an option; options are written with `-` or `_`, the command takes both."""
    return typer.Option(*names, help=help)
