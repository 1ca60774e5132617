"""A history of certification runs in an SQLite file: add a run, read runs and steps."""

import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from mezzo.files import shown_path
from mezzo.tipc.history._rows import (
    RUN_COLUMNS,
    SERIES_COLUMNS,
    STEP_COLUMNS,
    Filter,
    HistoryError,
    HistoryRun,
    HistoryStep,
    Series,
)
from mezzo.tipc.history._schema import check_values, open_history, transaction

_JOINED = "steps JOIN series ON series.id = steps.series JOIN runs ON runs.id = steps.run"
# In this order: the index of the runs by start gives the newest first, and a limit ends the search early.
_NEWEST = "runs CROSS JOIN steps ON steps.run = runs.id CROSS JOIN series ON series.id = steps.series"
_RUN = ", ".join(f"runs.{name}" for name in RUN_COLUMNS)
_SERIES = ", ".join(f"series.{name}" for name in SERIES_COLUMNS)
_STEP = ", ".join(f"steps.{name}" for name in STEP_COLUMNS)


@dataclass(frozen=True, slots=True)
class AddedRun:
    """A run that is in the history now."""

    id: int
    is_new: bool
    """False: it was there before, and has not been changed."""


@dataclass(frozen=True, slots=True)
class HistoryContent:
    """Runs in the order of their start, and the steps of each series in the same order, by id of the run."""

    runs: dict[int, HistoryRun]
    series: dict[Series, list[tuple[int, HistoryStep]]]


def check_history(path: Path) -> None:
    """Raise HistoryError if runs cannot be added to a file; it is made if it does not exist."""
    with open_history(path, create=True):
        pass


def add_rows(path: Path, run: HistoryRun, steps: Sequence[HistoryStep]) -> AddedRun:
    """Add a run in one transaction: after a crash it is in the file completely, or not at all.

    A run that is in it already stays as it is, unless it was added before it had ended and has ended now.

    Raises:
        HistoryError: The file cannot be used; see `open_history`.
    """
    with open_history(path, create=True) as connection, transaction(connection):
        found = connection.execute("SELECT id, result FROM runs WHERE key = ?", (run.key,)).fetchone()
        if found is not None:
            if found[1] is not None or run.result is None:
                return AddedRun(found[0], False)
            _replace_run(connection, found[0], run)
            _insert_steps(connection, found[0], steps)
            return AddedRun(found[0], True)
        marks = ", ".join("?" * (len(RUN_COLUMNS) - 1))
        columns = ", ".join(RUN_COLUMNS[1:])
        number = connection.execute(f"INSERT INTO runs ({columns}) VALUES ({marks})", astuple(run)[1:]).lastrowid
        assert number is not None
        _insert_steps(connection, number, steps)
        return AddedRun(number, True)


def _replace_run(connection: sqlite3.Connection, number: int, run: HistoryRun) -> None:
    """Replace a run that was added before it had ended, and remove its steps."""
    connection.execute("DELETE FROM steps WHERE run = ?", (number,))
    values = ", ".join(f"{name} = ?" for name in RUN_COLUMNS[1:])
    connection.execute(f"UPDATE runs SET {values} WHERE id = ?", (*astuple(run)[1:], number))


def _insert_steps(connection: sqlite3.Connection, run: int, steps: Sequence[HistoryStep]) -> None:
    names, marks = ", ".join(SERIES_COLUMNS), ", ".join("?" * len(SERIES_COLUMNS))
    same = " AND ".join(f"{name} = ?" for name in SERIES_COLUMNS)
    columns, step_marks = ", ".join(STEP_COLUMNS), ", ".join("?" * (len(STEP_COLUMNS) + 2))
    for step in steps:
        values = astuple(step.series)
        connection.execute(f"INSERT OR IGNORE INTO series ({names}) VALUES ({marks})", values)
        (series,) = connection.execute(f"SELECT id FROM series WHERE {same}", values).fetchone()
        own = [getattr(step, name) for name in STEP_COLUMNS]
        connection.execute(f"INSERT INTO steps (series, run, {columns}) VALUES ({step_marks})", (series, run, *own))


def find_run(path: Path, number: int) -> HistoryRun:
    """Return a run by its id; raises HistoryError if there is none."""
    with open_history(path, create=False) as connection:
        check_values(connection, path)
        row = connection.execute(f"SELECT {_RUN} FROM runs WHERE id = ?", (number,)).fetchone()
        last = connection.execute("SELECT max(id) FROM runs").fetchone()[0]
    if row is None:
        known = f"it has the runs 1 to {last}" if last else "it is empty"
        raise HistoryError(f"{shown_path(path)}: no run {number}; {known} ('mezzo tipc history' lists them)")
    return HistoryRun(*row)


def list_steps(path: Path, chosen: Filter, limit: int) -> tuple[list[tuple[HistoryRun, HistoryStep]], int]:
    """Return the newest steps, the newest run first, and the number of all that the filter chooses; limit 0: all."""
    where, values = chosen.where()
    newest = f"SELECT {_RUN}, {_SERIES}, {_STEP} FROM {_NEWEST} WHERE {where} ORDER BY runs.started DESC, runs.id DESC"
    with open_history(path, create=False) as connection:
        check_values(connection, path)
        (count,) = connection.execute(f"SELECT count(*) FROM {_JOINED} WHERE {where}", values).fetchone()
        rows = connection.execute(f"{newest}, steps.series LIMIT ?", (*values, limit or -1)).fetchall()
    at, to = len(RUN_COLUMNS), len(RUN_COLUMNS) + len(SERIES_COLUMNS)
    return [(HistoryRun(*row[:at]), _step(Series(*row[at:to]), row[to:])) for row in rows], count


def read_content(path: Path, chosen: Filter | None = None, last: int | None = None) -> HistoryContent:
    """Return all runs and the series that a filter chooses, each in the order of the runs' start.

    Args:
        path: The history.
        chosen: The filter; None: all.
        last: Of each series and machine, only so many of the newest steps; None: all.

    Raises:
        HistoryError: The file cannot be used; see `open_history`.
    """
    where, values = (chosen or Filter()).where()
    # Joined only if the filter needs it: the primary key of `steps` is the order that is wanted.
    tables = _JOINED if chosen is not None and chosen != Filter() else "steps"
    steps = f"SELECT steps.series, steps.run, {_STEP} FROM {tables} WHERE {where} ORDER BY steps.series"
    with open_history(path, create=False) as connection:
        check_values(connection, path)
        ordered = connection.execute(f"SELECT {_RUN} FROM runs ORDER BY started, id").fetchall()
        kinds = {row[0]: Series(*row[1:]) for row in connection.execute(f"SELECT id, {_SERIES} FROM series")}
        rows = connection.execute(steps, values).fetchall()
    runs = {row[0]: HistoryRun(*row) for row in ordered}
    place = {run: order for order, run in enumerate(runs)}
    content = {}
    for number, group in groupby(rows, key=itemgetter(0)):
        entries = sorted(group, key=lambda row: place[row[1]])
        kept = entries if last is None else _newest(entries, runs, last)
        content[kinds[number]] = [(row[1], _step(kinds[number], row[2:])) for row in kept]
    return HistoryContent(runs, content)


def _newest(rows: Sequence[tuple[Any, ...]], runs: Mapping[int, HistoryRun], last: int) -> list[tuple[Any, ...]]:
    """Return the last rows of each machine, in the same order."""
    counts: Counter[str] = Counter()
    kept = []
    for row in reversed(rows):
        machine = runs[row[1]].machine
        counts[machine] += 1
        if counts[machine] <= last:
            kept.append(row)
    return kept[::-1]


def _step(series: Series, values: Sequence[object]) -> HistoryStep:
    step, status, reason, resumed, *numbers = values
    return HistoryStep(series, step, status, reason, bool(resumed), *numbers)  # type: ignore[arg-type]  # check_values
