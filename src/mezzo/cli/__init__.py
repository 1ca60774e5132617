"""The `mezzo` command: parse, call one function, exit code."""

from mezzo.cli._app import app, main, run
from mezzo.cli._generate import add_command

__all__ = ["main", "run", "app", "add_command"]
