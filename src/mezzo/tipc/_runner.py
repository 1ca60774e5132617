"""Run an adapted plan: a step starts when its devices are free, and its end is recorded at once."""

import datetime
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from mezzo.errors import MezzoError, RunError
from mezzo.files import FolderInUse, folder_lock, plain, write_text
from mezzo.tipc._device_pool import DevicePool
from mezzo.tipc._logs import NOTICE, failure_line, read_log
from mezzo.tipc._machine import MachineInfo, code_hash, text_hash
from mezzo.tipc._plan import Plan, PlanStep
from mezzo.tipc._process import Ended, end_all_of, environment, run_command, training_logs
from mezzo.tipc._profiles import PROFILES
from mezzo.tipc._progress import Progress
from mezzo.tipc._record import RECORDS, RUN, Record, RunInfo, Status, append_line
from mezzo.tipc._run_folder import load_run
from mezzo.tipc._shell import export_folders
from mezzo.tipc._stop_request import StopRequest

PASSED, FAILED, NOTHING = 0, 1, 3
_EARLIER = "steps.before.jsonl"  # records of earlier runs that a resumed run has not reached yet


@dataclass(frozen=True)
class RunnerOptions:
    """How a plan is run."""

    keep_going: bool = False
    """Run steps whose needed steps failed."""
    step_limit: float | None = None
    """Seconds for one step."""
    total_limit: float | None = None
    """Seconds for all steps."""
    jobs: int = 1
    """Steps that may run at the same time."""
    resume: bool = False
    """Do not repeat steps that passed before and have not changed."""


@dataclass
class _State:
    records: dict[str, Record] = field(default_factory=dict)
    num_status_lines: int = 0  # steps whose status lines are written
    renamed: dict[str, str] = field(default_factory=dict)  # weights under another name than expected


def run_plan(
    plan: Plan,
    *,
    root: Path,
    folder: Path,
    config: Path,
    config_text: str,
    machine: MachineInfo,
    options: RunnerOptions,
    progress: Progress,
    notices: tuple[str, ...] = (),
) -> int:
    """Run an adapted plan; return 0 if all passed, 1 after a failure, 3 if nothing ran, 128 + N after signal N.

    Args:
        plan: The plan.
        root: The directory that its commands run in.
        folder: The folder for the records, `steps.jsonl` and `run.json`.
        config: The path of the configuration, for the record.
        config_text: The text of the configuration.
        machine: This machine.
        options: How it is run.
        progress: Shows what happens.
        notices: Notices about the run as a whole.

    """
    with _lock(folder):
        if left := end_all_of(str(folder)):
            progress.say(f"ended {left} process{'es' if left > 1 else ''} of an earlier run that was killed")
        hashes = {"config": text_hash(config_text), "code": code_hash(root)}
        earlier = _earlier_records(folder) if options.resume else {}
        write_text(folder / _EARLIER, "".join(f"{record.line()}\n" for record in earlier.values()))
        info = RunInfo(
            config=str(config),
            mode=plan.mode,
            profile=plan.profile,
            model=plan.model,
            command_line=tuple(sys.argv),
            start=_now(),
            end="",
            result=None,
            machine=machine.facts,
            versions=machine.versions,
            hashes=hashes,
            notices=notices,
            skipped_combinations=plan.left_out,
        )
        write_text(folder / RUN, info.text())
        write_text(folder / RECORDS, "")
        if plan.banner:
            append_line(root / plan.status_file, plan.banner_line)
        stop = StopRequest(options.total_limit)
        runner = _Runner(plan, root, folder, hashes, options, progress, stop, earlier, machine)
        with stop.on_signals():
            runner.run()
        records = [runner.state.records[step.name] for step in plan.steps]
        bad = any(record.status in ("failed", "timeout", "interrupted") for record in records)
        result = FAILED if bad else PASSED if any(record.status == "passed" for record in records) else NOTHING
        if stop.signal is not None:
            result = 128 + stop.signal
        write_text(folder / RUN, replace(info, end=_now(), result=result).text())
        if stop.signal is None:
            (folder / _EARLIER).unlink(missing_ok=True)
        return result


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lock a folder; raises RunError if another runner uses it."""
    try:
        with folder_lock(folder, purpose="a certification", advice="wait for its end, or end it"):
            yield
    except FolderInUse as error:
        raise RunError(str(error)) from error


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")


def _earlier_records(folder: Path) -> dict[str, Record]:
    """Return the records of steps that passed in earlier runs, by the hash of the command."""
    before: list[Record] = []
    if (folder / _EARLIER).is_file():  # an earlier resumed run was interrupted
        before += [Record.parse(line) for line in (folder / _EARLIER).read_text("utf-8").splitlines()]
    if (folder / RECORDS).is_file() and (folder / RUN).is_file():
        before += load_run(folder).records
    return {record.hashes.get("command", ""): record for record in before if record.status == "passed"}


class _Runner:
    def __init__(
        self,
        plan: Plan,
        root: Path,
        folder: Path,
        hashes: Mapping[str, str],
        options: RunnerOptions,
        progress: Progress,
        stop: StopRequest,
        earlier: Mapping[str, Record],
        machine: MachineInfo,
    ) -> None:
        self.plan, self.root, self.folder, self.hashes = plan, root, folder, hashes
        self.options, self.progress, self.stop, self.earlier = options, progress, stop, earlier
        self.steps = {step.name: step for step in plan.steps}
        self.state = _State()
        self.ended: queue.Queue[Record] = queue.Queue()
        self.slots = DevicePool(machine.gpus, machine.cores, options.jobs)

    def run(self) -> None:
        """Run all steps in the order of the plan; steps with free devices run at the same time."""
        waiting = list(self.plan.steps)
        running: dict[str, PlanStep] = {}
        while waiting or running:
            for step in list(waiting):
                record = self._without_running(step)
                if record is not None:
                    waiting.remove(step)
                    self._finish(record)
                elif self._is_ready(step) and self.slots.take(step):
                    waiting.remove(step)
                    running[step.name] = step
                    self._start(self._renamed(step))
            if running:
                record = self.ended.get()
                self.slots.give_back(running.pop(record.step))
                self._finish(record)

    def _is_ready(self, step: PlanStep) -> bool:
        return all(name in self.state.records for name in self._needs(step))

    def _needs(self, step: PlanStep) -> list[str]:
        return [name for name in step.needs if name in self.steps]

    def _without_running(self, step: PlanStep) -> Record | None:
        """Return the record of a step that is skipped or was done before; None: it has to run, or to wait."""
        if reason := self.stop():
            return self._record(step, "skipped", reason)
        if step.skip:
            return self._record(step, "skipped", step.skip)
        if not self._is_ready(step):
            return None
        for name in self._needs(step):
            before = self.state.records[name]
            if before.status != "passed" and not self.options.keep_going:
                return self._record(step, "skipped", f"{name} {before.status}")
        step = self._renamed(step)
        known = self.earlier.get(self._hash(step))
        unchanged = all(self.state.records[name].resumed for name in self._needs(step))
        if known is not None and unchanged and self._results_exist(step, known):
            if step.kind == "train":
                self._note_other_weights(step)
            # Only the outcome is taken from the file; command and directory come from the plan.
            own = replace(known, command=step.text, argv=step.words, cwd=str(self._folder(step)))
            return replace(own, step=step.name, resumed=True)
        return None

    def _results_exist(self, step: PlanStep, known: Record) -> bool:
        """Return whether the results of a step still exist: its log, the weights, the exported model."""
        there = [self._folder(step) / known.log] if known.log else []
        if step.kind == "train" and step.checkpoint:
            other = self._other_weights(step)
            there.append(self.root / step.checkpoint if other is None else other)
        # The files that exports of other repositories write are not known.
        if step.kind == "export" and PROFILES[self.plan.profile].runs_mezzo:
            there += [self._folder(step) / name / "deploy.yaml" for name in export_folders(step.bare)]
        return all(path.exists() or (path.parent.is_dir() and "*" in path.name) for path in there)

    def _hash(self, step: PlanStep) -> str:
        env = sorted((name, value or "") for name, value in step.env.items())
        return text_hash(repr((step.bare, env, step.enter, self.hashes["config"], self.hashes["code"])))

    def _record(
        self, step: PlanStep, status: Status, reason: str = "", ended: Ended | None = None, start: str = ""
    ) -> Record:
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
            cwd=str(self._folder(step)),
            start=start,
            end=_now() if ended else "",
            seconds=round(ended.seconds, 3) if ended else 0.0,
            code=ended.code if ended else None,
            log=self._log_name(step) if ended else "",
            needs=step.needs,
            notices=step.notices,
            hashes={**self.hashes, "command": self._hash(step)},
        )

    def _folder(self, step: PlanStep) -> Path:
        return self.root / step.enter[0] if step.enter else self.root

    def _log_name(self, step: PlanStep) -> str:
        return os.path.relpath(self.root / step.log, self._folder(step)) if not step.log.startswith("/") else step.log

    def _start(self, step: PlanStep) -> None:
        self.progress.started(step, self.root / step.log)
        threading.Thread(target=self._work, args=(step,), daemon=True).start()

    def _work(self, step: PlanStep) -> None:
        """Run one step in its own thread; a record is made whatever happens."""
        record = self._record(step, "failed", "the runner itself failed, see its error output")
        try:
            record = self._execute(step)
        except (OSError, ValueError) as error:
            record = self._record(step, "failed", f"could not be run: {getattr(error, 'strerror', None) or error}")
        finally:  # without a record the run would wait for ever
            self.ended.put(record)

    def _execute(self, step: PlanStep) -> Record:
        start, folder = _now(), self._folder(step)
        if not folder.is_dir():
            return self._record(step, "failed", f"there is no folder {folder}")
        log = self.root / step.log
        limit, owner = self.options.step_limit, str(self.folder)
        ended = run_command(
            step.bare,
            env=environment(step),
            cwd=folder,
            log=log,
            head="".join(f"{NOTICE}{plain(notice)}\n" for notice in step.notices),
            limit=limit,
            stop=self.stop,
            owner=owner,
        )
        for name in step.known_as:
            _link(self.root / name, log)
        status, reason = _verdict(ended)
        if status == "failed" and (line := failure_line(read_log(log) or "")):
            reason = f"{reason}: {line}"
        record = self._record(step, status, reason, ended, start)
        if (logs := training_logs(step, folder)) is not None:
            record = replace(record, old_verdict=bool(logs) and all(path.is_file() for path in logs))
        if ended.left_behind:
            notice = (
                f"left {ended.left_behind} process{'es' if ended.left_behind > 1 else ''} running, which were ended"
            )
            record = replace(record, notices=(*record.notices, notice))
        return record

    def _other_weights(self, step: PlanStep) -> Path | None:
        """Return the weights that the scripts fall back to; None if the expected file exists."""
        expected = self.root / step.checkpoint
        if not step.fallback or expected.exists():
            return None
        return next((parent / step.fallback for parent in expected.parents if (parent / step.fallback).exists()), None)

    def _note_other_weights(self, step: PlanStep) -> None:
        """Make later steps use the weights that the scripts fall back to."""
        if (other := self._other_weights(step)) is not None:
            prefix = "./" if step.checkpoint.startswith("./") else ""
            self.state.renamed[step.checkpoint] = prefix + os.path.relpath(other, self.root)

    def _renamed(self, step: PlanStep) -> PlanStep:
        """Return a step with the paths of the weights that exist."""
        for old, new in self.state.renamed.items():
            step = step.with_text(old, new) if old in step.bare else step
        return step

    def _finish(self, record: Record) -> None:
        self.state.records[record.step] = record
        step = self.steps[record.step]
        if step.kind == "train" and record.status == "passed":
            self._note_other_weights(step)
        try:
            append_line(self.folder / RECORDS, record.line())
            self._write_status()
        except MezzoError as error:
            self.progress.say(f"mezzo: {error}")
        self.progress.ended(record)

    def _write_status(self) -> None:
        """Write the status lines of ended steps, in the order of the plan."""
        for step in self.plan.steps[self.state.num_status_lines :]:
            record = self.state.records.get(step.name)
            if record is None:
                return
            self.state.num_status_lines += 1
            if step.status is not None and record.status != "skipped" and not record.resumed:
                line = self._renamed(step).status_line(record.status == "passed")
                append_line(self.root / self.plan.status_file, line)
                self.progress.say(line)


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
