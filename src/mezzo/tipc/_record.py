"""What a run leaves behind: one record a step, written as a JSON line as soon as the step has ended."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from mezzo.files import parse_json, short_repr

Status = Literal["passed", "failed", "timeout", "skipped", "interrupted"]
STATUSES: tuple[str, ...] = get_args(Status)

RECORDS = "steps.jsonl"
RUN = "run.json"


@dataclass(frozen=True)
class Record:
    """A step that has ended, or was not run: what was to be done, what was done, and where to read on."""

    step: str  # name of the step in its plan: "train-1", "infer-cpu-3"; unique in a run
    kind: str  # prepare, train, eval, export, quantise, extract, infer, check
    model: str
    mode: str
    labels: Mapping[str, str]  # what tells it from its neighbours: devices, trainer, device, precision, batch ...
    command: str  # as the status line shows it
    status: Status
    reason: str = ""  # why it failed or was skipped; empty if it passed
    argv: tuple[str, ...] = ()  # the words the shell made of the command; empty if it was not run
    env: Mapping[str, str] = field(default_factory=dict)  # what differs from the runner's own environment
    cwd: str = ""
    start: str = ""  # ISO 8601 with zone; empty if it was not run
    end: str = ""
    seconds: float = 0.0
    code: int | None = None  # exit status; None if it was not run or killed by us
    log: str = ""  # path, relative to cwd where it lies below
    needs: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()  # what was changed, and why: another interpreter, CPU processes, smaller crops
    old_verdict: bool | None = None  # what the shell's own test would have said; None where it is the exit status
    resumed: bool = False  # taken from an earlier run
    hashes: Mapping[str, str] = field(default_factory=dict)  # of config, code and command

    def line(self) -> str:
        """Return the record as one line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @staticmethod
    def parse(line: str) -> "Record":
        """Read a line back; raises ValueError that names what is wrong."""
        try:
            values = parse_json(line)
        except ValueError as error:
            raise ValueError(f"not a line of JSON: {str(error).removeprefix('not JSON: ')}") from None
        return record_of(values)


def record_of(values: Any) -> Record:
    """Make a record of what JSON holds; raises ValueError that names what is wrong."""
    known = {each.name for each in fields(Record)}
    if not isinstance(values, dict) or not {"step", "kind", "model", "mode", "labels", "command", "status"} <= set(
        values
    ):
        raise ValueError("a record needs step, kind, model, mode, labels, command and status")
    if values["status"] not in STATUSES:
        raise ValueError(f"status {short_repr(values['status'])} is none of {', '.join(STATUSES)}")
    kept = {name: value for name, value in values.items() if name in known}  # a newer mezzo may write more
    for name in ("labels", "env", "hashes"):
        if not isinstance(kept.get(name, {}), dict):
            raise ValueError(f"'{name}' is no object")
        kept[name] = dict(kept.get(name, {}))
    for name in ("argv", "needs", "notices"):
        if not isinstance(kept.get(name, []), list):
            raise ValueError(f"'{name}' is no list")
        kept[name] = tuple(kept.get(name, ()))
    return Record(**kept)


@dataclass(frozen=True)
class RunInfo:
    """What holds for all steps of a run; `run.json` beside the records."""

    config: str
    mode: str
    profile: str
    model: str
    command_line: tuple[str, ...]
    start: str
    end: str  # empty while it goes on
    result: int | None  # exit status of the runner, None while it goes on
    machine: Mapping[str, str]  # host's operating system, CPU, GPUs, cores, memory
    versions: Mapping[str, str]  # mezzo, torch, python, cuda ...
    hashes: Mapping[str, str]  # config and code
    notices: tuple[str, ...] = ()
    skipped_combinations: tuple[str, ...] = ()  # what the matrix leaves out by rule, with the reason

    def text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self), ensure_ascii=False, indent=1) + "\n"

    @staticmethod
    def parse(text: str) -> "RunInfo":
        """Read it back; raises ValueError that names what is wrong."""
        try:
            values = parse_json(text)
        except ValueError as error:
            raise ValueError(f"not JSON: {str(error).removeprefix('not JSON: ')}") from None
        names = {each.name for each in fields(RunInfo)}
        needed = names - {"notices", "skipped_combinations"}
        if not isinstance(values, dict) or not needed <= set(values):
            raise ValueError(f"a run needs {', '.join(sorted(needed))}")
        kept = {name: value for name, value in values.items() if name in names}
        for name in ("command_line", "notices", "skipped_combinations"):
            if not isinstance(kept.get(name, []), list):
                raise ValueError(f"'{name}' is no list")
            kept[name] = tuple(kept.get(name, ()))
        return RunInfo(**kept)
