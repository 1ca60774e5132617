"""The command's entry: the list of subcommands, and the one place where errors become a line and an exit code."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from mezzo._version import version_of
from mezzo.cli import _export, _infer, _train
from mezzo.cli._bench import app as bench
from mezzo.cli._bisect import bisect
from mezzo.cli._build import build
from mezzo.cli._check import check
from mezzo.cli._compare import compare
from mezzo.cli._doctor import doctor
from mezzo.cli._export import export
from mezzo.cli._flags import spelled_out
from mezzo.cli._infer import infer
from mezzo.cli._models import convert, models
from mezzo.cli._tipc import app as tipc
from mezzo.cli._train import evaluate, prepare, train
from mezzo.errors import MezzoError
from mezzo.files import say

_SWITCHES = {
    "infer": _infer.SWITCHES, "export": _export.SWITCHES, "train": _train.SWITCHES, "eval": _train.SWITCHES,
}  # fmt: skip
INTERRUPTED = 130  # 128 + SIGINT, as shells report it

# typer is built on click or on its own copy of it, by version: the base of its errors is found through what it exports
_ClickError: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(check)
app.command()(compare)
app.command()(bisect)
app.command()(doctor)
app.command()(build)
app.command()(models)
app.command()(convert)
_EITHER_SPELLING = {"token_normalize_func": lambda token: token.replace("_", "-")}  # the documents use both
app.command(context_settings=_EITHER_SPELLING)(train)
app.command(name="eval", context_settings=_EITHER_SPELLING)(evaluate)
app.command(context_settings=_EITHER_SPELLING)(export)
app.command(context_settings=_EITHER_SPELLING)(infer)
app.command()(prepare)
app.add_typer(bench, name="bench")
app.add_typer(tipc, name="tipc")


def _print_version(wanted: bool) -> None:
    if wanted:
        version = version_of()
        say(f"mezzo {version}" if version else "mezzo, not installed (run from its sources)")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _mezzo(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Mixed-precision training on PyTorch, with the proof of what ran in which dtype."""
    if context.invoked_subcommand is None:
        say(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and leave the process: 0 fine, 1 a failed run, 2 bad input, 130 interrupted."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command on `arguments` (None: the process's own) and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words:
        words = spelled_out(words, _SWITCHES.get(words[0], ()))
    try:
        result = app(args=words, prog_name="mezzo", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except MezzoError as error:
        return _complain(error, error.exit_code)
    except ValueError as error:
        return _complain(error, 2)
    except _ClickError as error:
        return _complain(getattr(error, "format_message", error.__str__)(), 2)
    return result if isinstance(result, int) else 0


def _complain(message: object, exit_code: int) -> int:
    say(f"mezzo: {' '.join(str(message).split())}", err=True)
    return exit_code
