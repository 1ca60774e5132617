"""The `mezzo` command: parse, call one function, exit code."""

from mezzo.cli._app import main

__all__ = ["main"]
