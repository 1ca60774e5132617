"""The records of a run: one JSON line per step, written as soon as the step has ended."""

import errno
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from mezzo.files import report_write_errors
from mezzo.tipc._json_fields import parse_fields

Status = Literal["passed", "failed", "timeout", "skipped", "interrupted"]

RECORDS = "steps.jsonl"
RUN = "run.json"
MAX_SECONDS = 1e9
"""No step takes 30 years."""


@dataclass(frozen=True)
class Record:
    """A step that has ended or was skipped."""

    step: str  # name of the step in its plan: "train-1", "infer-cpu-3"; unique in a run
    kind: str  # prepare, train, eval, export, quantise, extract, infer, check
    model: str
    mode: str
    labels: Mapping[str, str]  # what makes it different from similar steps: devices, trainer, precision, batch ...
    command: str  # as the status line shows it
    status: Status
    reason: str = ""  # why it failed or was skipped; empty if it passed
    argv: tuple[str, ...] = ()  # program and arguments; empty if it was not run
    env: Mapping[str, str] = field(default_factory=dict)  # differences from the runner's environment
    cwd: str = ""
    start: str = ""  # ISO 8601 with zone; empty if it was not run
    end: str = ""
    seconds: float = 0.0
    code: int | None = None  # exit status; None if it was not run or the runner killed it
    log: str = ""  # path, relative to cwd
    needs: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()  # what was changed, and why: another interpreter, CPU processes, smaller crops
    old_verdict: bool | None = None  # the script's own verdict; None if it is the exit status
    resumed: bool = False  # taken from an earlier run
    hashes: Mapping[str, str] = field(default_factory=dict)  # of config, code and command
    host: str = ""  # the machine of a cluster that it ran on; empty: the runner's own
    load: Mapping[str, str] = field(default_factory=dict)  # how busy the machine was: `LoadSampler.load`

    def line(self) -> str:
        """Return the record as one line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @staticmethod
    def parse(line: str) -> "Record":
        """Read a line back; raises ValueError that names what is wrong."""
        record = parse_fields(Record, line, "record")
        if not 0 <= record.seconds < MAX_SECONDS:
            raise ValueError(f"'seconds' is {record.seconds:g}, not a number from 0 to {MAX_SECONDS:.0e}")
        return record


@dataclass(frozen=True)
class RunInfo:
    """Facts about a whole run; `run.json` beside the records."""

    config: str
    mode: str
    profile: str
    model: str
    command_line: tuple[str, ...]
    start: str
    end: str  # empty during the run
    result: int | None  # exit status of the runner; None during the run
    machine: Mapping[str, str]  # host's operating system, CPU, GPUs, cores, memory
    versions: Mapping[str, str]  # mezzo, torch, python, cuda ...
    hashes: Mapping[str, str]  # config and code
    notices: tuple[str, ...] = ()
    skipped_combinations: tuple[str, ...] = ()  # combinations that the script skips, with the reason

    def text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self), ensure_ascii=False, indent=1) + "\n"

    @staticmethod
    def parse(text: str) -> "RunInfo":
        """Read it back; raises ValueError that names what is wrong."""
        return parse_fields(RunInfo, text, "run")


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, which is made if needed; raises RunError if that fails. No part of it is left then."""
    data = (line + "\n").encode("utf-8", "surrogateescape")
    with report_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                written = file.write(data)
                if written != len(data):  # the disk became full within the line
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with suppress(OSError):  # a file that cannot be cut is no regular file
                    file.truncate(size)
                raise
