"""The tables of a history file, its versions, and how a file is opened: a file from elsewhere is hostile input.

A file is taken only if its application id, its version and the text of every table and index are those that mezzo writes:
a foreign trigger or view could act when a run is added. A file that is refused is never changed.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from mezzo.files import check_regular, one_line, open_regular, report_write_errors, shown_path
from mezzo.tipc.history._rows import HistoryError

APPLICATION_ID = 0x6D7A7469
"""Marks a file of mezzo, by SQLite's `application_id`."""
WAIT_S = 60.0
"""How long a writer waits for another one; adding a run takes milliseconds."""
_DAMAGED = "is damaged ({}); nothing was changed: move it away, or restore a copy"
_MAGIC = b"SQLite format 3\0"
_LONGEST = 16 << 20  # bytes of one value

SCRIPTS: tuple[tuple[str, ...], ...] = (
    (  # version 1
        """CREATE TABLE runs (
 id INTEGER PRIMARY KEY,
 key TEXT NOT NULL UNIQUE,
 network TEXT NOT NULL, mode TEXT NOT NULL, config TEXT NOT NULL, profile TEXT NOT NULL, folder TEXT NOT NULL,
 started TEXT NOT NULL, ended TEXT NOT NULL, result INTEGER, verdict TEXT NOT NULL,
 machine TEXT NOT NULL, gpu TEXT NOT NULL, driver TEXT NOT NULL,
 mezzo TEXT NOT NULL, torch TEXT NOT NULL, commit_id TEXT NOT NULL, code TEXT NOT NULL, versions TEXT NOT NULL)""",
        """CREATE TABLE series (
 id INTEGER PRIMARY KEY,
 network TEXT NOT NULL, mode TEXT NOT NULL, config TEXT NOT NULL, kind TEXT NOT NULL, labels TEXT NOT NULL,
 place INTEGER NOT NULL, device TEXT NOT NULL, precision TEXT NOT NULL,
 UNIQUE (network, mode, config, kind, labels, place, device, precision))""",
        """CREATE TABLE steps (
 series INTEGER NOT NULL REFERENCES series (id), run INTEGER NOT NULL REFERENCES runs (id),
 step TEXT NOT NULL, status TEXT NOT NULL, reason TEXT NOT NULL, resumed INTEGER NOT NULL,
 seconds REAL NOT NULL, latency_ms REAL, throughput REAL, accuracy REAL, accuracy_name TEXT NOT NULL,
 PRIMARY KEY (series, run)) WITHOUT ROWID""",
        "CREATE INDEX steps_of_run ON steps (run)",
        "CREATE INDEX runs_by_start ON runs (started)",
    ),
    (  # version 2: why the speed of a step means nothing; empty if it does
        "ALTER TABLE steps ADD COLUMN busy TEXT NOT NULL DEFAULT ''",
    ),
    (  # version 3: the node of a cluster that ran a step; empty if the runner's own machine did
        "ALTER TABLE steps ADD COLUMN host TEXT NOT NULL DEFAULT ''",
    ),
)
"""Statements that make a file of version n from one of version n - 1. A new file takes all of them: one way to the end."""

VERSION = len(SCRIPTS)

_LARGEST = "1e15"
_COLUMNS = (
    (
        "runs",
        "key network mode config profile folder started ended verdict machine gpu driver".split()
        + "mezzo torch commit_id code versions".split(),
        ("result",),
    ),
    ("series", "network mode config kind labels device precision".split(), ("place",)),
    (
        "steps",
        "step status reason accuracy_name busy host".split(),
        ("seconds", "latency_ms", "throughput", "accuracy", "resumed"),
    ),
)
"""Columns of text and of numbers of each table."""


@contextmanager
def open_history(path: Path, *, create: bool) -> Iterator[sqlite3.Connection]:
    """Open a history file, bring it to this version, and close it at the end.

    Args:
        path: The file.
        create: Make it if it does not exist, or is empty.

    Raises:
        HistoryError: It is missing, is no history, is damaged, was written by a newer mezzo, or is locked for too long.
        RunError: Its folder cannot be made.
    """
    if create:
        with report_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(path):
        _check_file(path, may_be_empty=create)
    elif not create:
        raise HistoryError(
            f"{shown_path(path)}: no such file; 'mezzo tipc run' and 'matrix' write it, and 'mezzo tipc history --add DIR' "
            "adds earlier runs"
        )
    with report_errors(path), closing(_connect(path, create=create)) as connection:
        _bring_up(connection, path)
        yield connection


def check_values(connection: sqlite3.Connection, path: Path) -> None:
    """Raise HistoryError unless every value has its type and range: SQLite would return whatever bytes a file holds."""
    for table, texts, numbers in _COLUMNS:
        wrong = [f"typeof({name}) <> 'text'" for name in texts]
        wrong += [f"({name} IS NOT NULL AND {_is_wrong(name)})" for name in numbers]
        query = f"SELECT count(*) FROM {table} WHERE {' OR '.join(wrong)}"
        if found := connection.execute(query).fetchone()[0]:
            fault = f"{found} rows of '{table}' hold values that mezzo does not write"
            raise HistoryError(f"{shown_path(path)}: {_DAMAGED.format(fault)}")
    if connection.execute("PRAGMA foreign_key_check").fetchone() is not None:
        raise HistoryError(f"{shown_path(path)}: {_DAMAGED.format('it has steps of runs that are not there')}")


def _is_wrong(name: str) -> str:
    return f"(typeof({name}) NOT IN ('real', 'integer') OR {name} < -{_LARGEST} OR {name} > {_LARGEST})"


@contextmanager
def report_errors(path: Path) -> Iterator[None]:
    """Turn an error of SQLite into a one-line `HistoryError` that names the file and what to do."""
    name = shown_path(path)
    try:
        yield
    except UnicodeDecodeError as error:  # of a message of SQLite that quotes a damaged file, in place of its own error
        raise HistoryError(f"{name}: {_DAMAGED.format('it holds text that is not UTF-8')}") from error
    except sqlite3.Error as error:
        reason = one_line(str(error))
        code = getattr(error, "sqlite_errorcode", None) or 0
        if code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            advice = f"another process has held it for {WAIT_S:.0f} s; try again, or give another file with --history"
        elif code & 0xFF in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
            advice = f"{reason}; it must be writable, with its folder, or give another file with --history"
        elif code & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            advice = f"{reason}; check the disk, then try again: nothing was changed"
        else:
            advice = _DAMAGED.format(reason)
        raise HistoryError(f"{name}: {advice}") from error


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Hold the only write lock: all statements inside are in the file afterwards, or none."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _check_file(path: Path, *, may_be_empty: bool) -> None:
    check_regular(path, raising=HistoryError)
    with open_regular(path, raising=HistoryError) as file:
        head = file.read(len(_MAGIC))
    if head != _MAGIC and not (may_be_empty and not head):
        what = "is empty" if not head else "is not an SQLite file"
        raise HistoryError(
            f"{shown_path(path)}: {what}, so it is no history of mezzo; give another file with --history"
        )


def _connect(path: Path, *, create: bool) -> sqlite3.Connection:
    # The rollback journal, not WAL: it is safe on network file systems, and leaves one file.
    url = f"file:{quote(os.fsencode(os.path.abspath(path)))}?mode={'rwc' if create else 'rw'}"
    connection = sqlite3.connect(url, uri=True, timeout=WAIT_S, isolation_level=None)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)
    for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "synchronous = FULL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _bring_up(connection: sqlite3.Connection, path: Path) -> None:
    """Check what a file holds, and bring an empty or older one to this version in one transaction."""
    if _checked_version(connection, path) == VERSION:
        return
    with transaction(connection):
        version = _checked_version(connection, path)  # another process may have been faster
        for script in SCRIPTS[version:]:
            for statement in script:
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {VERSION}")


def _checked_version(connection: sqlite3.Connection, path: Path) -> int:
    """Return the version of a file, 0 if it is empty; raises HistoryError unless it is exactly what mezzo writes."""
    name = shown_path(path)
    application, version = (
        connection.execute(f"PRAGMA {each}").fetchone()[0] for each in ("application_id", "user_version")
    )
    schema = _schema(connection)
    if not schema and application == version == 0:
        return 0
    if application != APPLICATION_ID or version < 1:
        raise HistoryError(f"{name}: an SQLite file, but no history of mezzo; give another file with --history")
    if version > VERSION:
        raise HistoryError(
            f"{name}: written by a newer mezzo (version {version} of the file, this mezzo reads up to {VERSION}); "
            "update mezzo, or give another file with --history"
        )
    if strange := sorted({each[1] for each in schema ^ _expected_schema(version)}):
        raise HistoryError(
            f"{name}: its tables are not those of mezzo ({one_line(', '.join(strange))[:100]}); nothing was changed; "
            "give another file with --history"
        )
    return int(version)


def _schema(connection: sqlite3.Connection) -> set[tuple[str, str, str]]:
    # An index without a text belongs to a UNIQUE or PRIMARY KEY of a table, whose text is compared.
    rows = connection.execute("SELECT type, name, sql FROM sqlite_master WHERE NOT (type = 'index' AND sql IS NULL)")
    return {(str(kind), str(name), str(sql)) for kind, name, sql in rows}


def _expected_schema(version: int) -> set[tuple[str, str, str]]:
    with closing(sqlite3.connect(":memory:")) as connection:
        for script in SCRIPTS[:version]:
            for statement in script:
                connection.execute(statement)
        return _schema(connection)
