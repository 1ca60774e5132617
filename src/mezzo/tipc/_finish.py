"""What is done once after all steps of a run: it is added to the history."""

from collections.abc import Callable
from pathlib import Path

from mezzo.errors import MezzoError
from mezzo.tipc.history import add_run


def finish_run(folder: Path, history: Path | None, report: Callable[[str], object]) -> None:
    """Add the run of a folder to a history.

    The run has its result by now: a fault is reported in one line and changes nothing of it.

    Args:
        folder: The folder of the run.
        history: The file; None: no history.
        report: Shows a line.
    """
    if history is None:
        return
    try:
        added = add_run(history, folder)
    except MezzoError as error:
        report(f"mezzo: {error} (the run is complete; 'mezzo tipc history --add {folder}' adds it later)")
    else:
        report(f"history: run {added.id} in {history}")
