"""The history of certification runs: one SQLite file, lists, comparisons and a trend page.

Reading it does not import torch; `add_run` does, for the numbers in logs, and is loaded when it is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mezzo.tipc.history._compare import RunComparison, compare_runs
from mezzo.tipc.history._place import DEFAULT, history_path
from mezzo.tipc.history._rows import Filter, HistoryError, HistoryRun, HistoryStep
from mezzo.tipc.history._store import check_history, list_steps
from mezzo.tipc.history._tables import steps_csv, steps_json, steps_table
from mezzo.tipc.history._trend import write_trend_page

if TYPE_CHECKING:
    from mezzo.tipc.history._collect import add_run

__all__ = [
    "DEFAULT",
    "Filter",
    "HistoryError",
    "HistoryRun",
    "HistoryStep",
    "RunComparison",
    "add_run",
    "check_history",
    "compare_runs",
    "history_path",
    "list_steps",
    "steps_csv",
    "steps_json",
    "steps_table",
    "write_trend_page",
]


def __getattr__(name: str) -> Any:
    if name == "add_run":
        return importlib.import_module("mezzo.tipc.history._collect").add_run
    raise AttributeError(f"module 'mezzo.tipc.history' has no attribute {name!r}")
