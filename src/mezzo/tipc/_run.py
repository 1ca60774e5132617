"""A mended plan run: what is ready starts as soon as its devices are free, and every end leaves a record at once."""

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
from mezzo.tipc._load import load_run
from mezzo.tipc._log_text import NOTICE, read_log, why
from mezzo.tipc._machine import Machine, code_hash, text_hash
from mezzo.tipc._plan import Plan, Step
from mezzo.tipc._process import Ended, end_all_of, environment, run_command, training_logs
from mezzo.tipc._profiles import PROFILES
from mezzo.tipc._record import RECORDS, RUN, Record, RunInfo, Status
from mezzo.tipc._shell import saved_to, words
from mezzo.tipc._slots import Slots
from mezzo.tipc._status import append_line, banner, status_line
from mezzo.tipc._stop import Stop
from mezzo.tipc._view import View

PASSED, FAILED, NOTHING = 0, 1, 3
_BEFORE = "steps.before.jsonl"  # what a resumed run may still take over


@dataclass(frozen=True)
class RunOptions:
    """How a plan is run."""

    keep_going: bool = False
    step_limit: float | None = None
    total_limit: float | None = None
    jobs: int = 1
    resume: bool = False


@dataclass
class _State:
    records: dict[str, Record] = field(default_factory=dict)
    shown: int = 0  # steps whose status lines are written
    renamed: dict[str, str] = field(default_factory=dict)  # weights that have another name than expected


def run_plan(
    plan: Plan,
    *,
    root: Path,
    folder: Path,
    config: Path,
    config_text: str,
    machine: Machine,
    options: RunOptions,
    view: View,
    notices: tuple[str, ...] = (),
) -> int:
    """Run a mended plan and return the exit status: 0 all passed, 1 something failed, 3 nothing to do, 130 or 143 ended.

    Args:
        plan: The plan.
        root: The folder its commands run in.
        folder: Records go there: `steps.jsonl`, `run.json`.
        config: The configuration's path, for the record.
        config_text: Its text.
        machine: Where it is run.
        options: How.
        view: Who is told.
        notices: What holds for the run as a whole.

    """
    with _only_one(folder):
        if left := end_all_of(str(folder)):
            view.say(f"ended {left} process{'es' if left > 1 else ''} of an earlier run that was killed")
        hashes = {"config": text_hash(config_text), "code": code_hash(root)}
        earlier = _earlier(folder) if options.resume else {}
        write_text(folder / _BEFORE, "".join(f"{record.line()}\n" for record in earlier.values()))
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
            append_line(root / plan.status_file, banner(plan))
        stop = Stop(options.total_limit)
        runner = _Runner(plan, root, folder, hashes, options, view, stop, earlier, machine)
        with stop.on_signals():
            runner.run()
        records = [runner.state.records[step.name] for step in plan.steps]
        bad = any(record.status in ("failed", "timeout", "interrupted") for record in records)
        result = FAILED if bad else PASSED if any(record.status == "passed" for record in records) else NOTHING
        if stop.signal is not None:
            result = 128 + stop.signal
        write_text(folder / RUN, replace(info, end=_now(), result=result).text())
        if stop.signal is None:
            (folder / _BEFORE).unlink(missing_ok=True)
        return result


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Hold a folder for one runner; raises RunError if there is another."""
    try:
        with folder_lock(folder, purpose="a certification", advice="wait for its end, or end it"):
            yield
    except FolderInUse as error:
        raise RunError(str(error)) from error


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")


def _earlier(folder: Path) -> dict[str, Record]:
    """Return what passed in runs whose records lie in the folder, by the hash of the command."""
    before: list[Record] = []
    if (folder / _BEFORE).is_file():  # of a run that was ended before it came to all of them
        before += [Record.parse(line) for line in (folder / _BEFORE).read_text("utf-8").splitlines()]
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
        options: RunOptions,
        view: View,
        stop: Stop,
        earlier: Mapping[str, Record],
        machine: Machine,
    ) -> None:
        self.plan, self.root, self.folder, self.hashes = plan, root, folder, hashes
        self.options, self.view, self.stop, self.earlier = options, view, stop, earlier
        self.steps = {step.name: step for step in plan.steps}
        self.state = _State()
        self.ended: queue.Queue[Record] = queue.Queue()
        self.slots = Slots(machine.gpus, machine.cores, options.jobs)

    def run(self) -> None:
        """Run all steps: in the plan's order, those side by side whose devices are free."""
        waiting = list(self.plan.steps)
        running: dict[str, Step] = {}
        while waiting or running:
            for step in list(waiting):
                record = self._decided(step)
                if record is not None:
                    waiting.remove(step)
                    self._finish(record)
                elif self._ready(step) and self.slots.take(step):
                    waiting.remove(step)
                    running[step.name] = step
                    self._start(self._renamed(step))
            if running:
                record = self.ended.get()
                self.slots.give_back(running.pop(record.step))
                self._finish(record)

    def _ready(self, step: Step) -> bool:
        return all(name in self.state.records for name in self._needs(step))

    def _needs(self, step: Step) -> list[str]:
        return [name for name in step.needs if name in self.steps]

    def _decided(self, step: Step) -> Record | None:
        """Return the record of a step that is not run: skipped, or done before."""
        if reason := self.stop():
            return self._record(step, "skipped", reason)
        if step.skip:
            return self._record(step, "skipped", step.skip)
        if not self._ready(step):
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
                self._look_elsewhere(step)
            # Only the outcome is taken over: what is run and where comes from the plan, not from a file.
            own = replace(known, command=step.text, argv=words(step.bare), cwd=str(self._folder(step)))
            return replace(own, step=step.name, resumed=True)
        return None

    def _results_exist(self, step: Step, known: Record) -> bool:
        """Tell whether what a step made is still there: its log, a training's weights, the folder of an export."""
        there = [self._folder(step) / known.log] if known.log else []
        if step.kind == "train" and step.checkpoint:
            other = self._elsewhere(step)
            there.append(self.root / step.checkpoint if other is None else other)
        if (
            step.kind == "export" and PROFILES[self.plan.profile].runs_mezzo
        ):  # of other repositories nobody knows the files
            there += [self._folder(step) / name / "deploy.yaml" for name in saved_to(step.bare)]
        return all(path.exists() or (path.parent.is_dir() and "*" in path.name) for path in there)

    def _hash(self, step: Step) -> str:
        env = sorted((name, value or "") for name, value in step.env.items())
        return text_hash(repr((step.bare, env, step.enter, self.hashes["config"], self.hashes["code"])))

    def _record(
        self, step: Step, status: Status, reason: str = "", ended: Ended | None = None, start: str = ""
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
            argv=words(step.bare) if ended else (),
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

    def _folder(self, step: Step) -> Path:
        return self.root / step.enter[0] if step.enter else self.root

    def _log_name(self, step: Step) -> str:
        return os.path.relpath(self.root / step.log, self._folder(step)) if not step.log.startswith("/") else step.log

    def _start(self, step: Step) -> None:
        self.view.started(step, self.root / step.log)
        threading.Thread(target=self._work, args=(step,), daemon=True).start()

    def _work(self, step: Step) -> None:
        """Run one step in a thread of its own; whatever happens ends in a record."""
        record = self._record(step, "failed", "the runner itself failed, see its error output")
        try:
            record = self._executed(step)
        except (OSError, ValueError) as error:
            record = self._record(step, "failed", f"could not be run: {getattr(error, 'strerror', None) or error}")
        finally:  # a thread that dies without a record would let the run wait for ever
            self.ended.put(record)

    def _executed(self, step: Step) -> Record:
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
        if status == "failed" and (line := why(read_log(log) or "")):
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

    def _elsewhere(self, step: Step) -> Path | None:
        """Return the weights under the name that the scripts fall back to; None where the expected ones are there."""
        expected = self.root / step.checkpoint
        if not step.fallback or expected.exists():
            return None
        return next((parent / step.fallback for parent in expected.parents if (parent / step.fallback).exists()), None)

    def _look_elsewhere(self, step: Step) -> None:
        """Let followers take the weights under the name that the scripts fall back to."""
        if (other := self._elsewhere(step)) is not None:
            prefix = "./" if step.checkpoint.startswith("./") else ""
            self.state.renamed[step.checkpoint] = prefix + os.path.relpath(other, self.root)

    def _renamed(self, step: Step) -> Step:
        """Return a follower with the weights that are there."""
        for old, new in self.state.renamed.items():
            step = step.reworded(old, new) if old in step.bare else step
        return step

    def _finish(self, record: Record) -> None:
        self.state.records[record.step] = record
        step = self.steps[record.step]
        if step.kind == "train" and record.status == "passed":
            self._look_elsewhere(step)
        try:
            append_line(self.folder / RECORDS, record.line())
            self._write_status()
        except MezzoError as error:
            self.view.say(f"mezzo: {error}")
        self.view.ended(record)

    def _write_status(self) -> None:
        """Write the old lines in the plan's order, as far as steps have ended."""
        for step in self.plan.steps[self.state.shown :]:
            record = self.state.records.get(step.name)
            if record is None:
                return
            self.state.shown += 1
            if step.status is not None and record.status != "skipped" and not record.resumed:
                line = status_line(self._renamed(step), record.status == "passed")
                append_line(self.root / self.plan.status_file, line)
                self.view.say(line)


def _link(known_as: Path, log: Path) -> None:
    """Let a log be found under its documented name as well, which runs of other configurations may share."""
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
