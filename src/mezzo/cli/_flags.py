"""Switches in the documents' spelling: `--benchmark=True`, `--use-gpu=False`, and bare."""

from collections.abc import Sequence
from typing import Any

import typer

_WORDS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


class Flag(int):
    """The value of a switch; typer would make an option of type bool stand alone."""


NO, YES = Flag(0), Flag(1)


def read_switch(text: object) -> Flag:
    """Return what a word says; typer also asks about the default, a Flag."""
    word = str(text).lower()
    if word not in _WORDS:
        raise typer.BadParameter(f"{text!r}: must be True or False")
    return YES if _WORDS[word] else NO


def switch(help: str, *names: str) -> Any:
    """Return an option that takes True or False; `spelled_out` lets it stand alone too."""
    return typer.Option(*names, help=help, parser=read_switch, metavar="BOOL")


def spelled_out(arguments: Sequence[str], switches: Sequence[str]) -> list[str]:
    """Return a command line in which every switch has its word.

    >>> spelled_out(["--benchmark", "--device", "cpu", "--use_trt", "False"], ["--benchmark", "--use-trt"])
    ['--benchmark', 'True', '--device', 'cpu', '--use_trt', 'False']
    """
    names = set(switches)
    done: list[str] = []
    for place, word in enumerate(arguments):
        done.append(word)
        following = arguments[place + 1].lower() if place + 1 < len(arguments) else ""
        if word.replace("_", "-") in names and following not in _WORDS:
            done.append("True")
    return done
