"""Run an adapted plan: a step starts when its devices are free, and its end is recorded at once."""

import os
import queue
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from mezzo.errors import MezzoError, RunError
from mezzo.files import FolderInUse, folder_lock, write_text
from mezzo.tipc._device_pool import DevicePool
from mezzo.tipc._machine import MachineInfo, code_hash, text_hash
from mezzo.tipc._plan import Plan, PlanStep
from mezzo.tipc._process import end_all_of
from mezzo.tipc._profiles import PROFILES
from mezzo.tipc._progress import RunListener
from mezzo.tipc._record import RECORDS, RUN, Record, RunInfo, append_line
from mezzo.tipc._run_folder import load_run
from mezzo.tipc._shell import export_folders
from mezzo.tipc._step_run import StepRunner, now
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
    progress: RunListener,
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
            start=now(),
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
        scheduler = _Scheduler(plan, root, folder, hashes, options, progress, stop, earlier, machine)
        with stop.on_signals():
            scheduler.run()
        records = [scheduler.state.records[step.name] for step in plan.steps]
        bad = any(record.status in ("failed", "timeout", "interrupted") for record in records)
        result = FAILED if bad else PASSED if any(record.status == "passed" for record in records) else NOTHING
        if stop.signal is not None:
            result = 128 + stop.signal
        write_text(folder / RUN, replace(info, end=now(), result=result).text())
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


def _earlier_records(folder: Path) -> dict[str, Record]:
    """Return the records of steps that passed in earlier runs, by the hash of the command."""
    before: list[Record] = []
    if (folder / _EARLIER).is_file():  # an earlier resumed run was interrupted
        before += [Record.parse(line) for line in (folder / _EARLIER).read_text("utf-8").splitlines()]
    if (folder / RECORDS).is_file() and (folder / RUN).is_file():
        before += load_run(folder).records
    return {record.hashes.get("command", ""): record for record in before if record.status == "passed"}


class _Scheduler:
    """Starts the steps of a plan when their devices are free, and writes records and status lines."""

    def __init__(
        self,
        plan: Plan,
        root: Path,
        folder: Path,
        hashes: Mapping[str, str],
        options: RunnerOptions,
        progress: RunListener,
        stop: StopRequest,
        earlier: Mapping[str, Record],
        machine: MachineInfo,
    ) -> None:
        self.plan, self.root, self.folder = plan, root, folder
        self.options, self.progress, self.stop, self.earlier = options, progress, stop, earlier
        self.step_runner = StepRunner(plan, root, str(folder), hashes, options.step_limit, stop)
        self.steps = {step.name: step for step in plan.steps}
        self.state = _State()
        self.ended: queue.Queue[Record] = queue.Queue()
        self.devices = DevicePool(machine.gpus, machine.cores, options.jobs)

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
                elif self._is_ready(step) and self.devices.take(step):
                    waiting.remove(step)
                    running[step.name] = step
                    self._start(self._renamed(step))
            if running:
                record = self.ended.get()
                self.devices.give_back(running.pop(record.step))
                self._finish(record)

    def _is_ready(self, step: PlanStep) -> bool:
        return all(name in self.state.records for name in self._needs(step))

    def _needs(self, step: PlanStep) -> list[str]:
        return [name for name in step.needs if name in self.steps]

    def _without_running(self, step: PlanStep) -> Record | None:
        """Return the record of a step that is skipped or was done before; None: it has to run, or to wait."""
        if reason := self.stop():
            return self.step_runner.record(step, "skipped", reason)
        if step.skip:
            return self.step_runner.record(step, "skipped", step.skip)
        if not self._is_ready(step):
            return None
        for name in self._needs(step):
            before = self.state.records[name]
            if before.status != "passed" and not self.options.keep_going:
                return self.step_runner.record(step, "skipped", f"{name} {before.status}")
        step = self._renamed(step)
        known = self.earlier.get(self.step_runner.hash_of(step))
        unchanged = all(self.state.records[name].resumed for name in self._needs(step))
        if known is not None and unchanged and self._results_exist(step, known):
            if step.kind == "train":
                self._note_other_weights(step)
            # Only the outcome is taken from the file; command and directory come from the plan.
            own = replace(known, command=step.text, argv=step.words, cwd=str(self.step_runner.directory(step)))
            return replace(own, step=step.name, resumed=True)
        return None

    def _results_exist(self, step: PlanStep, known: Record) -> bool:
        """Return whether the results of a step still exist: its log, the weights, the exported model."""
        there = [self.step_runner.directory(step) / known.log] if known.log else []
        if step.kind == "train" and step.checkpoint:
            other = self._other_weights(step)
            there.append(self.root / step.checkpoint if other is None else other)
        # The files that exports of other repositories write are not known.
        if step.kind == "export" and PROFILES[self.plan.profile].runs_mezzo:
            there += [self.step_runner.directory(step) / name / "deploy.yaml" for name in export_folders(step.bare)]
        return all(path.exists() or (path.parent.is_dir() and "*" in path.name) for path in there)

    def _start(self, step: PlanStep) -> None:
        self.progress.started(step, self.root / step.log)
        threading.Thread(target=self._work, args=(step,), daemon=True).start()

    def _work(self, step: PlanStep) -> None:
        """Run one step in its own thread; it always leaves a record, also after an error."""
        record = self.step_runner.record(step, "failed", "the runner itself failed, see its error output")
        try:
            record = self.step_runner.run(step)
        finally:  # without a record the run would wait for ever
            self.ended.put(record)

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
