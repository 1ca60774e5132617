"""Read a run back from its folder; errors name the file, the line and the fault."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mezzo.errors import MezzoError
from mezzo.files import MiB, is_regular, parse_json, read_bytes, short_repr
from mezzo.tipc._record import RECORDS, RUN, Record, RunInfo

CERTIFICATE = "certificate.json"
_MAX_BYTES = 256 * MiB


class RunFolderError(MezzoError, ValueError):
    """A folder of a run that cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CertificateCheck:
    """One line of a certificate."""

    name: str
    passed: bool | None
    """None: it was not possible to check; `text` says why."""
    measured: str
    limit: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """A run, read back from its folder."""

    directory: Path
    info: RunInfo
    records: tuple[Record, ...]
    """In the order in which the steps first ended; the last record of a step that was run again."""
    checks: tuple[CertificateCheck, ...] = ()
    """The checks of its certificate; empty if there is none."""
    notes: tuple[str, ...] = ()
    """Notes about the files, such as a record that was cut off."""

    def log_of(self, record: Record) -> Path | None:
        """Return the path of a step's log, None if it is not in the folder. The folder may have been moved.

        Only regular files inside the folder count, after following links: the records of a foreign run may name any
        file of this machine.
        """
        if not record.log:
            return None
        directory = self.directory.resolve()
        recorded = Path(record.cwd, record.log)
        places = [*_part_below(recorded, directory), recorded, self.directory / PurePosixPath(record.log).name]
        return next((place for place in places if _is_file_below(place, directory)), None)


def load_run(directory: Path | str) -> RecordedRun:
    """Read a run back.

    A killed runner may leave a last record that is cut off; it is left out and noted.

    Raises:
        RunFolderError: A file is missing or damaged; the message names file, line and fault.
    """
    directory = Path(directory)
    info_path = directory / RUN
    text = _read_text(info_path)
    try:
        info = RunInfo.parse(text)
    except ValueError as error:
        raise RunFolderError(f"{info_path}: {error}") from None
    records, notes = read_records(directory / RECORDS)
    return RecordedRun(directory=directory, info=info, records=records, checks=_read_checks(directory), notes=notes)


def find_runs(directories: Iterable[Path | str]) -> list[Path]:
    """Return the folders of runs in and below directories, each once, sorted by name.

    Raises:
        RunFolderError: A directory is missing, or holds no run.
    """
    found: dict[Path, Path] = {}
    for each in directories:
        top = Path(each)
        if not top.is_dir():
            raise RunFolderError(f"{top}: no such directory; give directories of runs, or one above them")
        runs = sorted(path.parent for path in top.rglob(RECORDS))
        if not runs:
            raise RunFolderError(f"{top}: no run in it; looked for files named {RECORDS} here and in all folders below")
        found.update({run.resolve(): run for run in runs if run.resolve() not in found})
    if not found:
        raise RunFolderError(f"no directory given; give directories with runs: folders that hold {RECORDS}")
    return list(found.values())


def _read(path: Path) -> bytes:
    if not os.path.lexists(path):
        raise RunFolderError(f"{path}: missing; a run's directory holds {RUN} and {RECORDS}")
    return read_bytes(path, limit=_MAX_BYTES, raising=RunFolderError)


def _read_text(path: Path) -> str:
    try:
        return _read(path).decode()
    except UnicodeDecodeError as error:
        raise RunFolderError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from None


def read_records(path: Path) -> tuple[tuple[Record, ...], tuple[str, ...]]:
    """Return the records of a file, the last one of each step, and notes about the file; raises RunFolderError."""
    lines = _read(path).split(b"\n")
    notes: tuple[str, ...] = ()
    if _is_cut_off(lines[-1]):  # complete lines end with a newline, so the last piece is empty
        notes = (f"{RECORDS}, line {len(lines)}: the record is cut off and left out; the runner was killed",)
        lines.pop()
    records: dict[str, Record] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = Record.parse(line.decode())
        except UnicodeDecodeError as error:
            raise RunFolderError(f"{path}, line {number}: not UTF-8: {error.reason} at byte {error.start}") from None
        except ValueError as error:
            raise RunFolderError(f"{path}, line {number}: {error}") from None
        records[record.step] = record
    return tuple(records.values()), notes


def _is_cut_off(line: bytes) -> bool:
    if not line.strip():
        return False
    try:
        parse_json(line)
    except ValueError as error:  # a character may be cut in two; too many brackets or digits are another fault
        return isinstance(error.__cause__, (json.JSONDecodeError, UnicodeDecodeError))
    return False


def _read_checks(directory: Path) -> tuple[CertificateCheck, ...]:
    path = directory / CERTIFICATE
    if not os.path.lexists(path):
        return ()
    text = _read_text(path)
    try:
        values = parse_json(text)
        if not isinstance(values, dict) or not isinstance(values.get("checks"), list):
            raise ValueError("a certificate needs a list of checks")
        return tuple(_check_of(each) for each in values["checks"])
    except ValueError as error:
        raise RunFolderError(f"{path}: {error}") from None


def _check_of(values: Any) -> CertificateCheck:
    if not isinstance(values, dict) or not isinstance(values.get("name"), str):
        raise ValueError("a check needs a name")
    passed = values.get("passed")
    if passed is not None and not isinstance(passed, bool):
        raise ValueError(f"check '{values['name']}': passed is {short_repr(passed)}, neither true, false nor null")
    measured, limit, text = (_as_text(values.get(name)) for name in ("measured", "limit", "text"))
    return CertificateCheck(name=values["name"], passed=passed, measured=measured, limit=limit, text=text)


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def _part_below(recorded: Path, directory: Path) -> list[Path]:
    """Return the possible paths of a log in a moved folder: what follows the folder's name in the old path."""
    parts = recorded.parts
    at = [place for place, part in enumerate(parts[:-1]) if part == directory.name]
    return [directory.joinpath(*parts[place + 1 :]) for place in reversed(at)]


def _is_file_below(path: Path, directory: Path) -> bool:
    return is_regular(path) and path.resolve().is_relative_to(directory)
