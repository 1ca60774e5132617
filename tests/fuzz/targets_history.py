"""Somebody else's history file through the list, the trend page, a comparison, and the adding of a run."""

from __future__ import annotations

import os
import random
import sqlite3
import sys
from contextlib import closing
from functools import cache
from pathlib import Path

from fuzzing import Target
from mutate import TEXTS, mutate_bytes

from mezzo.tipc.history import Filter, compare_runs, list_steps, steps_csv, steps_json, steps_table
from mezzo.tipc.history._store import add_rows, read_content
from mezzo.tipc.history._trend import trend_text

sys.path.insert(0, str(Path(__file__).parents[1] / "tipc"))  # the seeds are those of the tests
from history_rows import run_row, step_row

_COLUMNS = {
    "runs": ("started", "machine", "versions", "result", "id", "key", "folder", "network"),
    "series": ("labels", "kind", "place", "device"),
    "steps": ("status", "seconds", "latency_ms", "throughput", "accuracy", "busy", "run", "series", "reason"),
}
_VALUES = (None, -1, 0, 1e308, -1e308, 9e999, 2**62, b"\xff\xfe", "", "2026", "{", "[[[[", "null", '{"a": 1}', *TEXTS)


@cache
def _seed(folder: str) -> bytes:
    path = Path(folder) / "seed"
    for number in range(14):
        add_rows(path, run_row(number), [step_row(latency_ms=10.0 + number % 3), step_row("train", accuracy=0.5)])
    data = path.read_bytes()
    path.unlink()
    return data


def make_history(rng: random.Random, folder: Path) -> Path:
    path = folder / "history.sqlite3"
    data = _seed(str(folder))
    path.write_bytes(mutate_bytes(rng, data) if rng.random() < 0.5 else data)
    if rng.random() < 0.6:  # a file that SQLite takes, with values that mezzo does not write
        table = rng.choice(sorted(_COLUMNS))
        try:
            with closing(sqlite3.connect(path)) as connection, connection:
                where = f"WHERE abs(random() % 5) = {rng.randrange(5)}" if rng.random() < 0.5 else ""
                value = rng.choice(_VALUES)
                value = (
                    value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
                    if isinstance(value, str)
                    else value
                )
                connection.execute(f"UPDATE {table} SET {rng.choice(_COLUMNS[table])} = ? {where}", (value,))
        except (sqlite3.Error, OverflowError, UnicodeDecodeError):
            pass  # the bytes are damaged already, or the value has no room: the file stays hostile as it is
    return path


def read_history(path: Path) -> None:
    before = path.read_bytes()
    try:
        points, count = list_steps(path, Filter(), 0)
        for text in (steps_table(points, count), steps_csv(points), steps_json(points)):
            assert isinstance(text, str)
        trend_text(read_content(path), str(path))
        compare_runs("1", "14", path).text()
    finally:
        assert path.read_bytes() == before, "reading changed the file"
        assert os.listdir(path.parent) == [path.name]
    add_rows(path, run_row(99), [step_row()])


TARGETS = [Target("tipc-history", make_history, read_history)]
