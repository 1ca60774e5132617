"""Run one step of a plan and make its record."""

import datetime
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mezzo.files import plain
from mezzo.tipc._logs import NOTICE, failure_line, read_log
from mezzo.tipc._machine import text_hash
from mezzo.tipc._plan import Plan, PlanStep
from mezzo.tipc._process import Ended, environment, run_command, training_logs
from mezzo.tipc._record import Record, Status


def now() -> str:
    """Return the time as a record has it."""
    return datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")


@dataclass(frozen=True)
class StepRunner:
    """Runs the steps of a plan and makes their records."""

    plan: Plan
    root: Path
    owner: str
    """The name by which the processes of a killed runner are found."""
    hashes: Mapping[str, str]
    """Of the configuration and the code."""
    time_limit: float | None
    stop: Callable[[], str]
    """Returns why the run has to end; empty: it goes on."""
    base_env: Mapping[str, str] | None = None
    """The environment that steps change; None: that of this process."""

    def hash_of(self, step: PlanStep) -> str:
        """Return a hash of everything that the result of a step depends on."""
        env = sorted((name, value or "") for name, value in step.env.items())
        return text_hash(repr((step.bare, env, step.enter, self.hashes["config"], self.hashes["code"])))

    def record(
        self, step: PlanStep, status: Status, reason: str = "", ended: Ended | None = None, start: str = ""
    ) -> Record:
        """Return the record of a step; without `ended` it was not run."""
        return Record(
            step=step.name,
            kind=step.kind,
            model=self.plan.model,
            mode=self.plan.mode,
            labels=dict(step.labels),
            command=step.text,
            status=status,
            reason=reason,
            argv=step.words if ended else (),
            env={name: value for name, value in step.env.items() if value is not None},
            cwd=str(self.directory(step)),
            start=start,
            end=now() if ended else "",
            seconds=round(ended.seconds, 3) if ended else 0.0,
            code=ended.code if ended else None,
            log=self._log_name(step) if ended else "",
            needs=step.needs,
            notices=step.notices,
            hashes={**self.hashes, "command": self.hash_of(step)},
            load=dict(ended.load) if ended else {},
        )

    def directory(self, step: PlanStep) -> Path:
        """Return the directory that a step runs in."""
        return self.root / step.enter[0] if step.enter else self.root

    def _log_name(self, step: PlanStep) -> str:
        return os.path.relpath(self.root / step.log, self.directory(step)) if not step.log.startswith("/") else step.log

    def run(self, step: PlanStep, granted: Mapping[str, str] | None = None) -> Record:
        """Run a step; errors of the system become a failed record.

        Args:
            step: The step.
            granted: Variables that take the place of the plan's own, such as the GPUs that a cluster has granted.

        """
        try:
            return self._run(step, granted or {})
        except (OSError, ValueError) as error:
            return self.record(step, "failed", f"could not be run: {getattr(error, 'strerror', None) or error}")

    def _run(self, step: PlanStep, granted: Mapping[str, str]) -> Record:
        start, folder = now(), self.directory(step)
        if not folder.is_dir():
            return self.record(step, "failed", f"there is no folder {folder}")
        log = self.root / step.log
        ended = run_command(
            step.bare,
            env={**environment(step, self.base_env), **granted},
            cwd=folder,
            log=log,
            head="".join(f"{NOTICE}{plain(notice)}\n" for notice in step.notices),
            limit=self.time_limit,
            stop=self.stop,
            owner=self.owner,
        )
        for name in step.known_as:
            _link(self.root / name, log)
        status, reason = _verdict(ended)
        if status == "failed" and (line := failure_line(read_log(log) or "")):
            reason = f"{reason}: {line}"
        record = self.record(step, status, reason, ended, start)
        if (logs := training_logs(step, folder)) is not None:
            record = replace(record, old_verdict=bool(logs) and all(path.is_file() for path in logs))
        if ended.left_behind:
            notice = (
                f"left {ended.left_behind} process{'es' if ended.left_behind > 1 else ''} running, which were ended"
            )
            record = replace(record, notices=(*record.notices, notice))
        return record


def _link(known_as: Path, log: Path) -> None:
    """Link a documented path to a log; runs of other configurations may share that path."""
    if not log.is_file():
        return
    known_as.parent.mkdir(parents=True, exist_ok=True)
    part = known_as.with_name(f".{known_as.name}.{os.getpid()}.{threading.get_ident()}")
    part.symlink_to(os.path.relpath(log, known_as.parent))
    os.replace(part, known_as)


def _verdict(ended: Ended) -> tuple[Status, str]:
    if ended.stopped.startswith("longer"):
        return "timeout", ended.stopped
    if ended.stopped:
        return "interrupted", ended.stopped
    if ended.log_error:
        return "failed", f"its log could not be written: {ended.log_error}"
    if ended.code == 0:
        return "passed", ""
    number = -ended.code if ended.code is not None and ended.code < 0 else (ended.code or 0) - 128
    if number in {each.value for each in signal.Signals}:
        return "failed", f"ended by {signal.Signals(number).name}"
    return "failed", f"exit status {ended.code}"
