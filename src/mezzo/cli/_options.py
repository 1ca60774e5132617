"""What `mezzo tipc` declares its options with, until it uses `mezzo._options` as the other commands do."""

from typing import Any

import typer

from mezzo.errors import OptionError as UsageError

__all__ = ["UsageError", "option"]


def option(help: str, *names: str) -> Any:
    """Return an option of typer."""
    return typer.Option(*names, help=help)
