"""Run adapted plans: a step starts when what it needs has ended, and its end is recorded at once."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mezzo.errors import MezzoError, RunError
from mezzo.files import FolderInUse, folder_lock, write_text
from mezzo.tipc._executor import JobEnded, JobEvent, LocalExecutor, StepExecutor, StepJob
from mezzo.tipc._job_folder import left_records, remove_jobs
from mezzo.tipc._left_jobs import end_left_jobs
from mezzo.tipc._machine import MachineInfo, code_hash, text_hash
from mezzo.tipc._needs import all_needs, other_weights, why_blocked, with_existing_weights
from mezzo.tipc._plan import Plan, PlanStep
from mezzo.tipc._process import end_all_of
from mezzo.tipc._profiles import PROFILES
from mezzo.tipc._progress import RunListener
from mezzo.tipc._record import RECORDS, RUN, Record, RunInfo, append_line
from mezzo.tipc._run_folder import RunFolderError, load_run, read_records
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


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A plan to run, and all that its record says."""

    plan: Plan
    root: Path
    """The directory that its commands run in."""
    folder: Path
    """The folder for the records, `steps.jsonl` and `run.json`."""
    config: Path
    """The path of the configuration, for the record."""
    config_text: str
    machine: MachineInfo
    options: RunnerOptions
    notices: tuple[str, ...] = ()
    """Notices about the run as a whole."""
    code: str = ""
    """The hash of the code below `root`; empty: it is computed."""


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
    request = RunRequest(
        plan=plan,
        root=root,
        folder=folder,
        config=config,
        config_text=config_text,
        machine=machine,
        options=options,
        notices=notices,
    )
    stop = StopRequest(options.total_limit)
    with open_run(request, progress, stop) as run:
        with stop.on_signals():
            run_together([run], LocalExecutor(machine, options.jobs), stop)
        return run.finish()


@contextmanager
def open_run(request: RunRequest, progress: RunListener, stop: StopRequest) -> "Iterator[PlanRun]":
    """Lock the folder of a run, end what an earlier run has left, and begin the records.

    Raises:
        RunError: Another runner uses the folder, or it cannot be written.
    """
    folder, options = request.folder, request.options
    with _lock(folder):
        end_left_jobs(folder, progress.say)
        earlier = _earlier_records(folder) if options.resume else {}
        write_text(folder / _EARLIER, "".join(f"{record.line()}\n" for record in earlier.values()))
        remove_jobs(folder)
        if left := end_all_of(str(folder)):
            progress.say(f"ended {left} process{'es' if left > 1 else ''} of an earlier run that was killed")
        run = PlanRun(request, progress, stop, earlier)
        write_text(folder / RUN, run.info.text())
        write_text(folder / RECORDS, "")
        if request.plan.banner:
            append_line(request.root / request.plan.status_file, request.plan.banner_line)
        yield run


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
        before += read_records(folder / _EARLIER)[0]
    if (folder / RECORDS).is_file() and (folder / RUN).is_file():
        before += load_run(folder).records
    before += left_records(folder)  # of workers that outlived their runner
    return {record.hashes.get("command", ""): record for record in before if record.status == "passed"}


def run_together(runs: "Sequence[PlanRun]", executor: StepExecutor, stop: StopRequest) -> None:
    """Run all steps of plans in the order of each plan; what the executor takes runs at the same time."""
    cancelled = False
    for run in runs:
        run.advance(executor)
    while any(run.submitted for run in runs):
        if stop() and not cancelled:
            cancelled = True
            executor.cancel()
        events = executor.wait()
        for event in events:
            event.job.run.note(event)
        if any(isinstance(event, JobEnded) for event in events):
            for run in runs:  # devices may be free for another plan now
                run.advance(executor)


class PlanRun:
    """One plan that is being run: decides what happens to its steps, and writes records and status lines."""

    def __init__(
        self, request: RunRequest, progress: RunListener, stop: StopRequest, earlier: Mapping[str, Record]
    ) -> None:
        self.request, self.progress, self.stop, self.earlier = request, progress, stop, earlier
        self.plan, self.root, self.folder, self.options = request.plan, request.root, request.folder, request.options
        hashes = {"config": text_hash(request.config_text), "code": request.code or code_hash(request.root)}
        self.runner = StepRunner(self.plan, self.root, str(self.folder), hashes, self.options.step_limit, stop)
        self.info = _run_info(request, hashes)
        self.steps = {step.name: step for step in self.plan.steps}
        self.waiting = dict(self.steps)
        self.submitted: dict[str, StepJob] = {}
        self.records: dict[str, Record] = {}
        self.num_status_lines = 0  # steps whose status lines are written

    def advance(self, executor: StepExecutor) -> None:
        """Record the steps that need not run, and offer the others to the executor."""
        for step in list(self.waiting.values()):
            record = self._without_running(step)
            if record is not None:
                del self.waiting[step.name]
                self._finish_step(record)
                continue
            needs = all_needs(self.plan, step)
            if any(name in self.waiting for name in needs):
                continue
            open_needs = tuple(name for name in needs if name not in self.records)
            job = StepJob(self, step if open_needs else self._renamed(step), open_needs)
            if executor.take(job):
                self.submitted[step.name] = job
                del self.waiting[step.name]

    def note(self, event: JobEvent) -> None:
        """Show the start of a step, or record its end."""
        name = event.job.step.name
        if not isinstance(event, JobEnded):
            self.progress.started(event.job.step, self.root / event.job.step.log)
            return
        del self.submitted[name]
        if event.record is None:
            self.waiting[name] = self.steps[name]
        else:
            self._finish_step(event.record)

    def finish(self) -> int:
        """Write the result of the run and return it as an exit status."""
        records = [self.records[step.name] for step in self.plan.steps]
        bad = any(record.status in ("failed", "timeout", "interrupted") for record in records)
        result = FAILED if bad else PASSED if any(record.status == "passed" for record in records) else NOTHING
        if self.stop.signal is not None:
            result = 128 + self.stop.signal
        self._complete_records()
        write_text(self.folder / RUN, replace(self.info, end=now(), result=result).text())
        remove_jobs(self.folder)
        if self.stop.signal is None:
            (self.folder / _EARLIER).unlink(missing_ok=True)
        return result

    def _without_running(self, step: PlanStep) -> Record | None:
        """Return the record of a step that is skipped or was done before; None: it has to run, or to wait."""
        if reason := self.stop():
            return self.runner.record(step, "skipped", reason)
        if step.skip:
            return self.runner.record(step, "skipped", step.skip)
        needs = [name for name in step.needs if name in self.steps]
        if not all(name in self.records for name in needs):
            return None
        if not self.options.keep_going and (reason := why_blocked(step, self.records)):
            return self.runner.record(step, "skipped", reason)
        step = self._renamed(step)
        known = self.earlier.get(self.runner.hash_of(step))
        unchanged = all(self.records[name].resumed for name in needs)
        if known is not None and unchanged and self._results_exist(step, known):
            # Only the outcome is taken from the file; command and directory come from the plan.
            own = replace(known, command=step.text, argv=step.words, cwd=str(self.runner.directory(step)))
            return replace(own, step=step.name, resumed=True)
        return None

    def _results_exist(self, step: PlanStep, known: Record) -> bool:
        """Return whether the results of a step still exist: its log, the weights, the exported model."""
        there = [self.runner.directory(step) / known.log] if known.log else []
        if step.kind == "train" and step.checkpoint:
            other = other_weights(self.root, step)
            there.append(self.root / step.checkpoint if other is None else other)
        # The files that exports of other repositories write are not known.
        if step.kind == "export" and PROFILES[self.plan.profile].runs_mezzo:
            there += [self.runner.directory(step) / name / "deploy.yaml" for name in export_folders(step.bare)]
        return all(path.exists() or (path.parent.is_dir() and "*" in path.name) for path in there)

    def _renamed(self, step: PlanStep) -> PlanStep:
        return with_existing_weights(self.plan, self.root, step, self.records)

    def _finish_step(self, record: Record) -> None:
        self.records[record.step] = record
        try:
            append_line(self.folder / RECORDS, record.line())
            self._write_status()
        except MezzoError as error:
            self.progress.say(f"mezzo: {error}")
        self.progress.ended(record)

    def _complete_records(self) -> None:
        """Write all records again if the file lacks some: its folder was removed during the run, or the disk was full."""
        path, lines = self.folder / RECORDS, [record.line() for record in self.records.values()]
        try:
            found = read_records(path)[0]
        except RunFolderError:  # missing, or damaged from outside
            found = ()
        if len(found) < len(lines):
            self.progress.say(f"mezzo: {path}: {len(lines) - len(found)} records were missing and are written again")
            write_text(path, "".join(f"{line}\n" for line in lines))

    def _write_status(self) -> None:
        """Write the status lines of ended steps, in the order of the plan."""
        for step in self.plan.steps[self.num_status_lines :]:
            record = self.records.get(step.name)
            if record is None:
                return
            self.num_status_lines += 1
            if step.status is not None and record.status != "skipped" and not record.resumed:
                line = self._renamed(step).status_line(record.status == "passed")
                append_line(self.root / self.plan.status_file, line)
                self.progress.say(line)


def _run_info(request: RunRequest, hashes: Mapping[str, str]) -> RunInfo:
    return RunInfo(
        config=str(request.config),
        mode=request.plan.mode,
        profile=request.plan.profile,
        model=request.plan.model,
        command_line=tuple(sys.argv),
        start=now(),
        end="",
        result=None,
        machine=request.machine.facts,
        versions=request.machine.versions,
        hashes=hashes,
        notices=request.notices,
        skipped_combinations=request.plan.left_out,
    )
