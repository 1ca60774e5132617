"""`mezzo check`: the abilities of this machine's hardware, and whether AMP is usable."""

import json

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mezzo.cli._common import Dtype, Json
from mezzo.dtypes import HALF_SPELLINGS
from mezzo.files import plain, say


def check(
    as_json: Json = False,
    dtype: Dtype = "float16",
) -> int:
    """Show whether AMP is usable on this machine.

    Exit code: 0 if it is in --dtype, 1 if not.
    """
    from mezzo.amp import (
        check_environment,
        library_path,  # torch takes seconds to import: not for --version and --help
    )

    dtype = HALF_SPELLINGS[dtype]
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
