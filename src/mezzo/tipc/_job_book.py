"""What executors on clusters share: the folder of jobs of each run, and records of steps that their worker cannot write.

A cluster takes every step at once, with its dependencies, and all its machines see the runner's folder. A worker runs a
step as the runner's own machine would (`run_job`) and writes the record; only what ends a worker from outside is
recorded here.
"""

import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from mezzo.tipc._executor import JobEnded, JobStarted, StepJob
from mezzo.tipc._job_folder import JobFolder, JobOptions
from mezzo.tipc._needs import all_needs
from mezzo.tipc._process import Ended
from mezzo.tipc._record import Record, Status
from mezzo.tipc._runner import PlanRun

_LOOK_S = 2.0  # interval at which the runner looks which steps have started


class JobBook:
    """The jobs that a cluster has taken, and what is known of them."""

    def __init__(self) -> None:
        self.folders: dict[PlanRun, JobFolder] = {}
        self.open: dict[tuple[PlanRun, str], StepJob] = {}
        self.lost: set[tuple[PlanRun, str]] = set()
        """Steps that ended without a record of a worker."""
        self._shown: set[tuple[PlanRun, str]] = set()
        self._next_look = 0.0

    def add(self, job: StepJob) -> JobFolder:
        """Add a job and return its folder, which is made for the first job of a run; raises RunError if that fails."""
        run = job.run
        if run not in self.folders:
            runner, options = run.runner, run.options
            shared = JobOptions(str(run.root), str(run.folder), runner.hashes, options.step_limit, options.keep_going)
            self.folders[run] = JobFolder.create(run.folder, run.plan, shared)
        for name in all_needs(run.plan, job.step):
            if name in run.records:
                self._share_record(run, name)
        self.open[run, job.step.name] = job
        self.lost.discard((run, job.step.name))
        return self.folders[run]

    def _share_record(self, run: PlanRun, name: str) -> None:
        """Let workers see a record that the runner has made or has taken from an earlier run."""
        index = list(run.steps).index(name)
        if self.folders[run].record(index) is None:
            self.folders[run].write_record(index, run.records[name])

    def index_of(self, job: StepJob) -> int:
        """Return the place of a job's step in its plan."""
        return list(job.run.steps).index(job.step.name)

    def ended(self, job: StepJob, record: Record | None) -> JobEnded:
        """Take a job out of the book."""
        del self.open[job.run, job.step.name]
        return JobEnded(job, record)

    def ended_outside(self, job: StepJob, status: Status, reason: str) -> JobEnded:
        """Take a job out of the book whose worker was ended from outside."""
        self.lost.add((job.run, job.step.name))
        start = self.folders[job.run].start_of(self.index_of(job))
        if start is None:
            return self.ended(job, job.run.runner.record(job.step, status, reason))
        seconds = datetime.now().astimezone() - datetime.fromisoformat(start.start)
        ended = Ended(None, max(0.0, seconds.total_seconds()))
        record = job.run.runner.record(job.step, status, reason, ended, start.start)
        return self.ended(job, replace(record, host=start.host))

    def returned(self, job: StepJob) -> JobEnded:
        """Take a job out of the book that has not run; the runner decides again."""
        self.lost.add((job.run, job.step.name))
        return self.ended(job, None)

    def lacks_need(self, job: StepJob) -> bool:
        """Return whether a step that a job needs ended without a record of its worker, so that it cannot start."""
        return any((job.run, name) in self.lost for name in job.open_needs)

    def has_started(self, job: StepJob) -> bool:
        """Return whether a worker has begun to run a job."""
        return self.folders[job.run].start_of(self.index_of(job)) is not None

    def newly_started(self) -> Iterable[JobStarted]:
        """Return the jobs that have started since the last look; looks every two seconds."""
        if time.monotonic() < self._next_look:
            return []
        self._next_look = time.monotonic() + _LOOK_S
        found = []
        started = {run: self.folders[run].started() for run in {run for run, _ in self.open}}
        for key, job in self.open.items():
            if key not in self._shown and self.index_of(job) in started[job.run]:
                self._shown.add(key)
                found.append(JobStarted(job))
        return found

    def retire(self) -> None:
        """End all workers: they find no plan any more."""
        self.folders = {run: jobs.retire() if jobs.is_valid else jobs for run, jobs in self.folders.items()}
