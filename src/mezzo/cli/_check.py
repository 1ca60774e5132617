"""`mezzo check`: what the hardware here can do, and whether AMP is usable on it."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mezzo.files import plain, say


def check(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON alone.")] = False,
    dtype: Annotated[str, typer.Option(help="float16 or bfloat16: the dtype that AMP shall run in.")] = "float16",
) -> int:
    """Show what this machine can do; exit code 0 if AMP is usable here in the dtype, 1 if not."""
    from mezzo.amp import (
        check_environment,
        library_path,  # torch takes seconds to import: not for --version and --help
    )
    from mezzo.cli._choice import check_dtype

    dtype = check_dtype(dtype)
    environment = check_environment()
    is_usable = environment.can_run_amp(dtype)
    is_compiled = library_path().exists()
    if as_json:
        more = {"dtype": dtype, "amp_usable": is_usable, "kernels_compiled": is_compiled}
        say(json.dumps({**environment.to_dict(), **more}, indent=2))
    else:
        usable = (f"AMP in {dtype}", "usable" if is_usable else "not usable")
        kernels = ("kernels", "compiled" if is_compiled else "in Python ('mezzo build' compiles them)")
        _print_rows([*environment.rows(), kernels, usable])
    return 0 if is_usable else 1


def _print_rows(rows: list[tuple[str, str]]) -> None:
    console = Console()
    if not console.is_terminal:
        width = max(len(what) for what, _ in rows)
        for what, value in rows:
            say(f"{what:<{width}}  {value}")
        return
    table = Table(show_header=False)
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    console.print(table)
