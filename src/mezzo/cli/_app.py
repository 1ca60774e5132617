"""The entry point: the list of commands, and the place where errors become a line and an exit code."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from mezzo._version import version_of
from mezzo.cli._bench import app as bench
from mezzo.cli._bisect import bisect
from mezzo.cli._build import build
from mezzo.cli._check import check
from mezzo.cli._compare import compare
from mezzo.cli._doctor import doctor
from mezzo.cli._export import export
from mezzo.cli._generate import add_command
from mezzo.cli._infer import infer
from mezzo.cli._models import convert, models
from mezzo.cli._tipc import app as tipc
from mezzo.cli._train import evaluate, prepare, train
from mezzo.errors import MezzoError
from mezzo.files import say

INTERRUPTED = 130  # 128 + SIGINT, as shells report it

# typer is built on click or on its own copy of it, by version: the base of its errors is found through what it exports
_ClickError: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
for _command in (check, compare, bisect, doctor, build, models, convert, train, export, infer, prepare):
    add_command(app, _command)
add_command(app, evaluate, "eval")
app.add_typer(bench, name="bench")
app.add_typer(tipc, name="tipc", short_help="Certify train, eval, export and infer by TIPC files.")


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
    """Mixed-precision training on PyTorch, and reports of what ran in which dtype."""
    if context.invoked_subcommand is None:
        say(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0 success, 1 a failed run, 2 bad input, 130 interrupted."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments` (None: those of the process) and return its exit code."""
    try:
        result = app(
            args=list(sys.argv[1:] if arguments is None else arguments), prog_name="mezzo", standalone_mode=False
        )
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except MezzoError as error:
        return _report_error(error, error.exit_code)
    except ValueError as error:
        return _report_error(error, 2)
    except _ClickError as error:
        return _report_error(getattr(error, "format_message", error.__str__)(), 2)
    return result if isinstance(result, int) else 0


def _report_error(message: object, exit_code: int) -> int:
    say(f"mezzo: {' '.join(str(message).split())}", err=True)
    return exit_code
