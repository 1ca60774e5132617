"""The folder through which a runner and the workers of a cluster share the jobs of a run.

`jobs/TOKEN/plan.json` in the folder of a run holds the plan; `007.start.json` tells that step 7 has started, and
`007.record.json` is its record. The token is new for each run. A worker goes on only while `plan.json` is there: so
removing the folder ends all workers of a run, also of one whose runner was killed.
"""

import json
import os
import re
import shutil
import socket
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mezzo.files import FileError, MiB, open_regular, parse_json, read_bytes, write_text
from mezzo.tipc._json_fields import make_from_fields, parse_fields
from mezzo.tipc._plan import Plan
from mezzo.tipc._record import Record
from mezzo.tipc._run_folder import RunFolderError

JOBS = "jobs"
_PLAN = "plan.json"
_TOKEN = re.compile(r"\.?[0-9a-f]{12}")  # of a run; with a dot if its jobs were retired
_START = re.compile(r"(\d+)\.start\.json")
_MAX_BYTES = 64 * MiB


@dataclass(frozen=True)
class JobOptions:
    """What a worker has to know beside the plan."""

    root: str
    folder: str
    hashes: Mapping[str, str] = field(default_factory=dict)
    step_limit: float | None = None
    keep_going: bool = False


@dataclass(frozen=True)
class JobStart:
    """When and where a step has started, and how often."""

    start: str
    host: str
    attempt: float = 1


@dataclass(frozen=True)
class JobFolder:
    """The jobs of one run."""

    path: Path

    @staticmethod
    def create(folder: Path, plan: Plan, options: JobOptions) -> "JobFolder":
        """Write the plan of a run for its workers; raises RunError if that fails."""
        made = JobFolder(folder / JOBS / uuid.uuid4().hex[:12])
        text = json.dumps({"plan": asdict(plan), "options": asdict(options)}, ensure_ascii=False)
        write_text(made.path / _PLAN, text)
        return made

    @property
    def num_open(self) -> int:
        """The number of steps that have started and have no record."""
        return sum(self.record(index) is None for index in self.started())

    @property
    def is_valid(self) -> bool:
        """Whether the run still wants its jobs."""
        try:
            with open_regular(self.path / _PLAN):  # a network file system looks again when a file is opened
                return True
        except FileError:
            return False

    def read_plan(self) -> tuple[Plan, JobOptions]:
        """Return the plan and the options; raises RunFolderError if they are missing or damaged."""
        path = self.path / _PLAN
        try:
            values = parse_json(read_bytes(path, limit=_MAX_BYTES, raising=RunFolderError))
            if not isinstance(values, dict):
                raise ValueError("a plan is an object")
            plan = make_from_fields(Plan, values.get("plan"), "plan")
            return plan, make_from_fields(JobOptions, values.get("options"), "job")
        except ValueError as error:
            raise RunFolderError(f"{path}: {error}") from None

    def write_record(self, index: int, record: Record) -> None:
        """Write the record of a step, unless the run was given up; raises RunError if that fails."""
        if self.is_valid:
            write_text(self._record(index), f"{record.line()}\n")

    def record(self, index: int) -> Record | None:
        """Return the record of a step; None if it has not ended."""
        return _read_record(self._record(index))

    def note_start(self, index: int, start: str) -> int:
        """Note that a step starts; return how often it has been started by now."""
        before = self.start_of(index)
        attempt = 1 if before is None else int(before.attempt) + 1
        noted = JobStart(start, socket.gethostname(), attempt)
        write_text(self.path / f"{index:03d}.start.json", json.dumps(asdict(noted)))
        return attempt

    def start_of(self, index: int) -> JobStart | None:
        """Return when a step has started; None if it has not."""
        path = self.path / f"{index:03d}.start.json"
        if not path.exists():
            return None
        try:
            return parse_fields(JobStart, read_bytes(path, limit=MiB, raising=RunFolderError), "start")
        except ValueError as error:
            raise RunFolderError(f"{path}: {error}") from None

    def started(self) -> set[int]:
        """Return the indices of the steps that have started."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return set()
        return {int(match[1]) for name in names if (match := _START.fullmatch(name))}

    def retire(self) -> "JobFolder":
        """Let the workers find no plan any more, which ends them; return the folder under its new name."""
        path = self.path.with_name(f".{self.path.name}")
        os.replace(self.path, path)
        return JobFolder(path)

    def _record(self, index: int) -> Path:
        return self.path / f"{index:03d}.record.json"


def retire_jobs(folder: Path) -> list[JobFolder]:
    """End the jobs that an earlier run has left, and return their folders."""
    jobs = folder / JOBS
    # `jobs` may be a link to a folder of somebody else, or hold files of the system.
    paths = sorted(path for path in jobs.iterdir() if _TOKEN.fullmatch(path.name)) if jobs.is_dir() else []
    left = [JobFolder(path) for path in paths if path.is_dir() and not path.is_symlink()]
    return [each if each.path.name.startswith(".") else each.retire() for each in left]


def left_records(folder: Path) -> list[Record]:
    """Return the records that workers have left in retired folders and that no runner has read."""
    paths = sorted((folder / JOBS).glob("*/[0-9]*.record.json"))
    return [record for path in paths if (record := _read_record(path)) is not None]


def remove_jobs(folder: Path) -> None:
    """Remove the jobs of a run, with all that workers have noted."""
    retire_jobs(folder)
    shutil.rmtree(folder / JOBS, ignore_errors=True)


def _read_record(path: Path) -> Record | None:
    if not path.exists():
        return None
    try:
        return Record.parse(read_bytes(path, limit=_MAX_BYTES, raising=RunFolderError).decode())
    except ValueError as error:
        raise RunFolderError(f"{path}: {error}") from None
