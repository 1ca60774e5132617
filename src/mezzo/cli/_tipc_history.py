"""`mezzo tipc history` and `mezzo tipc compare`: what earlier certification runs measured."""

from pathlib import Path
from typing import Annotated

import typer

from mezzo.cli._options import UsageError, option
from mezzo.files import say

History = Annotated[
    Path | None,
    option(
        "The history file, or 'off' [the variable MEZZO_HISTORY, or test_tipc/output/history.sqlite3].", "--history"
    ),
]


def _existing(given: Path | None) -> Path:
    from mezzo.tipc.history import history_path

    path = history_path(given, Path.cwd())
    if path is None:
        raise UsageError("the history is turned off ('off'); name a file with --history FILE")
    return path


def history(
    network: Annotated[str | None, option("Only this network.", "--network")] = None,
    step: Annotated[str | None, option("Only this step (infer-1) or kind (infer).", "--step")] = None,
    device: Annotated[str | None, option("Only cpu, gpu, or a part of a GPU's name.", "--device")] = None,
    precision: Annotated[str | None, option("Only this precision, such as fp32 or 'O1 fp16'.", "--precision")] = None,
    limit: Annotated[int, option("Number of steps, the newest first; 0: all.", "--limit")] = 50,
    form: Annotated[str, option("table, csv or json (one object per line).", "--format")] = "table",
    page: Annotated[Path | None, option("Write the trend page to this file instead of a list.", "--page")] = None,
    add: Annotated[
        list[Path] | None, option("First add the run of this folder, or all runs below it; can be repeated.", "--add")
    ] = None,
    file: History = None,
) -> int:
    """List the steps of earlier runs, or write the trend page about them."""
    from mezzo.errors import unknown_choice
    from mezzo.tipc.history import Filter, list_steps, steps_csv, steps_json, steps_table, write_trend_page

    if form not in ("table", "csv", "json"):
        raise UsageError(unknown_choice("--format", form, ("table", "csv", "json")))
    if limit < 0:
        raise UsageError(f"--limit {limit}: must be 0 or more")
    path, chosen = _existing(file), Filter(network, step, device, precision)
    if add:
        _add(path, add)
    if page is not None:
        say(write_trend_page(path, page, chosen))
        return 0
    points, count = list_steps(path, chosen, limit)
    if not points:
        say("mezzo: no step of the history is chosen; omit an option, or list all with 'mezzo tipc history'", err=True)
        return 3
    say(
        steps_table(points, count)
        if form == "table"
        else steps_json(points)
        if form == "json"
        else steps_csv(points)[:-1]
    )
    return 0


def _add(path: Path, folders: list[Path]) -> None:
    from mezzo.tipc import find_runs
    from mezzo.tipc.history import add_run

    for folder in find_runs(folders):
        added = add_run(path, folder)
        say(f"{folder}: run {added.id}{'' if added.is_new else ', which was there before'}", err=True)


def compare(
    before: Annotated[str, typer.Argument(metavar="RUN", help="Folder of a run, or its id in the history.")],
    after: Annotated[str, typer.Argument(metavar="RUN", help="Another run of the same network.")],
    as_json: Annotated[bool, option("Print JSON.", "--json")] = False,
    file: History = None,
) -> int:
    """Compare two runs: exit status 1 if something broke, or became slower or less accurate beyond noise."""
    from mezzo.tipc.history import compare_runs

    result = compare_runs(before, after, _existing(file))
    say(result.as_json() if as_json else result.text())
    return 1 if result.is_worse else 0
