"""Where the history is: an option, a variable of the environment, or the output folder of the repository."""

import os
from pathlib import Path

DEFAULT = Path("test_tipc/output/history.sqlite3")
"""Relative to the repository that is certified: beside the folders of its runs."""
VARIABLE = "MEZZO_HISTORY"
OFF = "off"


def history_path(given: Path | None, root: Path) -> Path | None:
    """Return the history file; None if it is turned off.

    Args:
        given: By the option `--history`; `off` turns it off.
        root: The repository, usually the working directory.

    >>> history_path(Path("nightly.sqlite3"), Path("repo")), history_path(Path("off"), Path("repo"))
    (PosixPath('nightly.sqlite3'), None)
    """
    chosen = str(given) if given is not None else os.environ.get(VARIABLE, "")
    if chosen == OFF:
        return None
    return Path(chosen) if chosen else root / DEFAULT
