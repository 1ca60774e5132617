"""Run one job of a run on a machine of a cluster: the same steps, limits and records as on the runner's machine."""

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from mezzo.errors import MezzoError, RunError
from mezzo.files import say
from mezzo.tipc._job_folder import JobFolder
from mezzo.tipc._marks import WORKER_MARK, guard_this_process
from mezzo.tipc._needs import why_blocked, with_existing_weights
from mezzo.tipc._plan import CVD, PlanStep
from mezzo.tipc._record import Record
from mezzo.tipc._step_run import StepRunner, now

_OWN = (CVD, WORKER_MARK)  # variables of a worker that its steps need: the granted GPUs, the mark for the watcher
MAX_ATTEMPTS = 3
"""A step whose worker is lost so many times is a failed step: it may be the step that kills them."""
GIVEN_UP = "its run was given up"
_SIGNALS_S = 0.5  # time between the signals that the processes of one job get
_LOOK_S = 1.0  # interval at which a worker looks whether its run is still wanted


def run_job(
    path: str,
    index: int,
    needed: Iterable[Record],
    stop: Callable[[], str] = lambda: "",
    env: Mapping[str, str] | None = None,
) -> Record | None:
    """Run a step once and return its record; None if it was interrupted and has to be run again.

    Args:
        path: The folder of the jobs.
        index: The place of the step in the plan.
        needed: The records of the steps that it needs, directly or through others.
        stop: Returns why the job has to end; empty: it goes on.
        env: The environment of the runner; None: that of this process, which the cluster has taken from the runner.

    Raises:
        RunError: The run does not want the job any more, or a record cannot be written.
    """
    jobs = JobFolder(Path(path))
    if not jobs.is_valid:
        raise RunError(f"{path}: {GIVEN_UP}")
    if (record := jobs.record(index)) is not None:
        return record  # a worker has ended it, and was lost before the runner heard of it
    plan, options = jobs.read_plan()
    step, records = plan.steps[index], {each.step: each for each in needed}
    still_wanted = _StillWanted(jobs, stop)
    guard_this_process()
    runner = StepRunner(
        plan,
        Path(options.root),
        options.folder,
        options.hashes,
        options.step_limit,
        still_wanted,
        None if env is None else {**env, **{name: os.environ[name] for name in _OWN if name in os.environ}},
    )
    if not options.keep_going and (reason := why_blocked(step, records)):
        record = runner.record(step, "skipped", reason)
    elif (attempt := jobs.note_start(index, now())) > MAX_ATTEMPTS:
        record = runner.record(step, "failed", f"its worker was lost {attempt - 1} times")
    else:
        step = with_existing_weights(plan, runner.root, step, records)
        record = replace(runner.run(step, _granted_cards(step)), host=socket.gethostname())
        if record.status == "interrupted" or (_was_killed(record) and _ends_too(still_wanted)):
            return None
    try:
        jobs.write_record(index, record)
    except MezzoError as error:  # the caller may still hand the record on
        say(f"mezzo: {error}", err=True)
    return record


def _was_killed(record: Record) -> bool:
    return record.status == "failed" and record.code is not None and (record.code < 0 or record.code > 128)


def _ends_too(stop: Callable[[], str]) -> bool:
    """Return whether this worker has to end, too: a cluster sends its signal to all processes of a job, in any order."""
    deadline = time.monotonic() + _SIGNALS_S
    while not stop():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class _StillWanted:
    """Says why a job has to end: its cluster wants it, or its run was given up."""

    def __init__(self, jobs: JobFolder, stop: Callable[[], str]) -> None:
        self.jobs, self.stop, self.next_look = jobs, stop, 0.0

    def __call__(self) -> str:
        if time.monotonic() > self.next_look:
            self.next_look = time.monotonic() + _LOOK_S
            if not self.jobs.is_valid:
                return GIVEN_UP
        return self.stop()


def _granted_cards(step: PlanStep) -> dict[str, str]:
    """Return the GPUs that the cluster has granted to this process, as many as the plan's own numbers name."""
    planned, granted = step.env.get(CVD), os.environ.get(CVD)
    if not planned or not granted:
        return {}
    return {CVD: ",".join(granted.split(",")[: len(planned.split(","))])}
