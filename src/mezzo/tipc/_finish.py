"""What is done once after all steps of a run, by whatever runs them: pictures for its page, and its place in the history."""

from collections.abc import Callable
from pathlib import Path

from mezzo.errors import MezzoError
from mezzo.tipc._pictures import write_pictures
from mezzo.tipc._run_folder import load_run
from mezzo.tipc.history import add_run


def finish_run(folder: Path, history: Path | None, report: Callable[[str], object]) -> None:
    """Write the pictures of a run, and add it to a history.

    The run has its result by now: a fault is reported in one line and changes nothing of it.

    Args:
        folder: The folder of the run.
        history: The file; None: no history.
        report: Shows a line.
    """
    try:
        write_pictures(load_run(folder), report)
    except MezzoError as error:
        report(f"mezzo: {error}")
    if history is None:
        return
    try:
        added = add_run(history, folder)
    except MezzoError as error:
        report(f"mezzo: {error} (the run is complete; 'mezzo tipc history --add {folder}' adds it later)")
    else:
        report(f"history: run {added.id} in {history}")
