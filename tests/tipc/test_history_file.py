"""The history file: two writers, kill -9, older and newer versions, and files that are not a history."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from history_rows import nights, run_row, step_row

from mezzo.cli import run as command
from mezzo.tipc.history import Filter, HistoryError, check_history, list_steps
from mezzo.tipc.history._schema import APPLICATION_ID, SCRIPTS, VERSION
from mezzo.tipc.history._store import add_rows, find_run, read_content

STEPS = 5
WRITER = f"""
import sys
sys.path[:0] = sys.argv[4:]
from pathlib import Path
from history_rows import run_row, step_row
from mezzo.tipc.history._store import add_rows
path, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
for number in range(count):
    row = run_row(number, key=f"{{name}}-{{number}}", folder=name)
    steps = [step_row(kind, reason="x" * 2000) for kind in ("train", "eval", "export", "infer", "check")]
    assert len(steps) == {STEPS}
    print(add_rows(path, row, steps).id, flush=True)
"""


def start_writer(path: Path, name: str, count: int) -> "subprocess.Popen[str]":
    words = [sys.executable, "-c", WRITER, str(path), name, str(count), str(Path(__file__).parent)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def rows_of(path: Path, query: str) -> list[tuple]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


def complete_runs(path: Path) -> set[int]:
    """Return the ids of all runs; each has all of its steps."""
    assert rows_of(path, "PRAGMA integrity_check") == [("ok",)]
    assert rows_of(path, "PRAGMA foreign_key_check") == []
    counts = rows_of(
        path, "SELECT runs.id, count(steps.run) FROM runs LEFT JOIN steps ON run = runs.id GROUP BY runs.id"
    )
    assert {count for _, count in counts} <= {STEPS}
    return {number for number, _ in counts}


def test_two_writers_lose_nothing(tmp_path):
    path = tmp_path / "history.sqlite3"
    writers = [start_writer(path, name, 30) for name in ("one", "other")]  # the file does not exist: both may make it
    acknowledged = [int(word) for writer in writers for word in writer.communicate(timeout=120)[0].split()]
    assert [writer.returncode for writer in writers] == [0, 0]
    assert len(set(acknowledged)) == 60
    assert complete_runs(path) == set(acknowledged)
    assert dict(rows_of(path, "SELECT folder, count(*) FROM runs GROUP BY folder")) == {"one": 30, "other": 30}


def test_kill_9_leaves_complete_runs_and_all_that_were_acknowledged(tmp_path):
    path = tmp_path / "history.sqlite3"
    chance = random.Random(0)
    acknowledged: set[int] = set()
    for attempt in range(4):
        writer = start_writer(path, f"killed-{attempt}", 100_000)
        other = start_writer(path, f"beside-{attempt}", 5)
        assert writer.stdout is not None
        acknowledged.add(int(writer.stdout.readline()))  # it is in the middle of its work
        time.sleep(chance.uniform(0.0, 0.3))
        os.kill(writer.pid, signal.SIGKILL)
        with writer:
            acknowledged |= {int(word) for word in writer.stdout.read().split("\n")[:-1]}
        acknowledged |= {int(word) for word in other.communicate(timeout=120)[0].split()}
        assert other.returncode == 0
    found = complete_runs(path)
    assert acknowledged <= found
    assert len(found - acknowledged) <= 4  # at most one run per kill was written and not yet acknowledged
    assert len(list_steps(path, Filter(), 0)[0]) == STEPS * len(found)


def test_a_run_is_added_once(tmp_path):
    path = tmp_path / "history.sqlite3"
    first = add_rows(path, run_row(1), [step_row()])
    again = add_rows(path, run_row(1), [step_row()])
    assert (first.is_new, again.is_new, again.id) == (True, False, first.id)
    assert rows_of(path, "SELECT count(*) FROM steps") == [(1,)]


def test_a_run_that_was_added_while_it_ran_is_replaced_when_it_has_ended(tmp_path):
    path = tmp_path / "history.sqlite3"
    add_rows(path, run_row(1, result=None, verdict="unfinished"), [step_row("train")])
    add_rows(path, run_row(2), [step_row("train")])
    ended = add_rows(
        path, run_row(1, ended="later", result=1, verdict="failed"), [step_row("train"), step_row("infer")]
    )
    assert (ended.id, ended.is_new) == (1, True)
    assert rows_of(path, "SELECT id, ended, result, verdict FROM runs WHERE id = 1") == [(1, "later", 1, "failed")]
    assert rows_of(path, "SELECT run, count(*) FROM steps GROUP BY run") == [(1, 2), (2, 1)]
    again = add_rows(path, run_row(1, result=None, verdict="unfinished"), [step_row("train")])
    assert (again.id, again.is_new) == (1, False), "a copy from the middle of the run changes nothing"
    assert rows_of(path, "SELECT count(*) FROM steps WHERE run = 1") == [(2,)]


def make_version_1(path: Path) -> None:
    """Write a file as the first version of mezzo's history was."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in SCRIPTS[0]:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("PRAGMA user_version = 1")
        connection.execute(
            "INSERT INTO runs VALUES (1, 'k', 'old', 'lite', 'c', 'mezzo', '/r', '2025-01-01T00:00:00.000+00:00', '', 0,"
            " 'passed', 'm', '', '', '0.1', '2.10', '', '', '{}')"
        )
        connection.execute("INSERT INTO series VALUES (1, 'old', 'lite', 'c', 'infer', '{}', 0, 'cpu', 'fp32')")
        connection.execute("INSERT INTO steps VALUES (1, 1, 'infer-1', 'passed', '', 0, 1.5, 3.25, NULL, NULL, '')")


def test_an_older_file_is_migrated_with_all_its_rows(tmp_path):
    path = tmp_path / "history.sqlite3"
    make_version_1(path)
    ((run, step),), count = list_steps(path, Filter(), 0)
    assert (run.network, step.latency_ms, step.busy, count) == ("old", 3.25, "", 1)
    assert rows_of(path, "PRAGMA user_version") == [(VERSION,)]
    add_rows(path, run_row(1), [step_row(busy="a reason")])
    assert [step.busy for _, step in list_steps(path, Filter(), 0)[0]] == ["a reason", ""]


def test_two_writers_migrate_an_older_file_once(tmp_path):
    path = tmp_path / "history.sqlite3"
    make_version_1(path)
    writers = [start_writer(path, name, 3) for name in ("one", "other")]
    for writer in writers:
        writer.communicate(timeout=120)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert rows_of(path, "SELECT count(*) FROM runs") == [(7,)]
    assert rows_of(path, "PRAGMA user_version") == [(VERSION,)]


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from history_rows import run_row, step_row
from mezzo.tipc.history import HistoryError
from mezzo.tipc.history._store import add_rows
path = Path(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 4096,) * 2)
try:
    add_rows(path, run_row(50), [step_row(f"kind{n}", reason="x" * 2000) for n in range(50)])
except HistoryError as error:
    print(error)
"""


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path):
    path = tmp_path / "history.sqlite3"
    nights(path, [10.0] * 5)
    words = [sys.executable, "-c", FULL_DISK, str(path), str(Path(__file__).parent)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "check the disk, then try again: nothing was changed" in done.stdout
    assert done.stdout.count("\n") == 1
    assert rows_of(path, "PRAGMA integrity_check") == [("ok",)]
    assert len(read_content(path).runs) == 5


def test_a_migration_that_fails_changes_nothing(tmp_path, monkeypatch):
    path = tmp_path / "history.sqlite3"
    make_version_1(path)
    before = path.read_bytes()
    monkeypatch.setattr("mezzo.tipc.history._schema.SCRIPTS", (*SCRIPTS, ("CREATE TABLE a (b)", "no statement")))
    monkeypatch.setattr("mezzo.tipc.history._schema.VERSION", VERSION + 1)
    with pytest.raises(HistoryError):
        check_history(path)
    assert path.read_bytes() == before


def test_a_newer_file_is_refused_in_one_line(tmp_path, capsys):
    path = tmp_path / "history.sqlite3"
    check_history(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 9")
    before = path.read_bytes()
    assert command(["tipc", "history", "--history", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "newer mezzo (version 9" in said
    assert path.read_bytes() == before


def foreign(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE runs (a)")


def with_trigger(path: Path) -> None:
    check_history(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TRIGGER sqlite1evil AFTER INSERT ON runs BEGIN DELETE FROM steps; END")


def with_view(path: Path) -> None:
    check_history(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DROP TABLE steps")
        connection.execute("CREATE VIEW steps AS SELECT 1 AS series, 2 AS run")


def cut_off(path: Path) -> None:
    nights(path, [10.0] * 60)
    path.write_bytes(path.read_bytes()[:5000])


def overwritten(path: Path) -> None:
    nights(path, [10.0] * 60)
    data = bytearray(path.read_bytes())
    data[4096:] = random.Random(0).randbytes(len(data) - 4096)
    path.write_bytes(data)


def wrong_types(path: Path) -> None:
    nights(path, [10.0])
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE steps SET latency_ms = 'fast'")


def infinite(path: Path) -> None:
    nights(path, [10.0])
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE steps SET seconds = 9e999")


def steps_of_no_run(path: Path) -> None:
    nights(path, [10.0])
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM runs")


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda path: path.write_bytes(b"SQLite format 3\0" + b"\xff" * 4096), "damaged"),
        (lambda path: path.write_text("a text"), "not an SQLite file"),
        (lambda path: path.mkdir(), "is a folder"),
        (lambda path: os.mkfifo(path), "named pipe"),
        (foreign, "no history of mezzo"),
        (with_trigger, "sqlite1evil"),
        (with_view, "steps"),
        (cut_off, "damaged"),
        (overwritten, "damaged"),
        (wrong_types, "damaged"),
        (infinite, "damaged"),
        (steps_of_no_run, "damaged"),
    ],
)
@pytest.mark.parametrize("words", [["history"], ["history", "--page", "trend.html"], ["compare", "1", "2"]])
def test_a_file_that_is_no_history_is_one_line_and_stays_as_it_is(make, word, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "history.sqlite3"
    make(path)
    before = path.read_bytes() if path.is_file() else None
    assert command(["tipc", *words, "--history", str(path)]) == 2
    said = capsys.readouterr()
    assert word in said.err
    assert "history.sqlite3" in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert (path.read_bytes() if path.is_file() else None) == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["history.sqlite3"]


def test_a_missing_file_and_a_missing_run_say_what_to_do(tmp_path, capsys):
    path = tmp_path / "history.sqlite3"
    assert command(["tipc", "history", "--history", str(path)]) == 2
    assert "--add DIR" in capsys.readouterr().err
    assert not path.exists()
    nights(path, [10.0, 11.0])
    with pytest.raises(HistoryError, match="no run 7; it has the runs 1 to 2"):
        find_run(path, 7)


def test_an_empty_file_becomes_a_history(tmp_path):
    path = tmp_path / "history.sqlite3"
    path.touch()
    nights(path, [10.0])
    assert len(read_content(path).runs) == 1


def test_a_writer_that_waits_too_long_says_so(tmp_path, monkeypatch):
    path = tmp_path / "history.sqlite3"
    check_history(path)
    monkeypatch.setattr("mezzo.tipc.history._schema.WAIT_S", 0.1)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(HistoryError, match="another process"):
            add_rows(path, run_row(1), [])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_file_that_cannot_be_written_says_so(tmp_path):
    path = tmp_path / "history.sqlite3"
    nights(path, [10.0])
    path.chmod(0o444)
    with pytest.raises(HistoryError, match="must be writable"):
        add_rows(path, run_row(2), [])
