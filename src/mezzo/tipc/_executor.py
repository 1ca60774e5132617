"""Where steps run: what the runner asks of an executor, and the executor for this machine."""

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mezzo.tipc._device_pool import DevicePool
from mezzo.tipc._machine import MachineInfo
from mezzo.tipc._plan import PlanStep
from mezzo.tipc._record import Record

if TYPE_CHECKING:
    from mezzo.tipc._runner import PlanRun


@dataclass(frozen=True, eq=False)
class StepJob:
    """A step that an executor runs."""

    run: "PlanRun"
    step: PlanStep
    open_needs: tuple[str, ...] = ()
    """The steps that it needs, directly or through others, and that have not ended yet."""


@dataclass(frozen=True)
class JobStarted:
    """A job has begun to run."""

    job: StepJob


@dataclass(frozen=True)
class JobEnded:
    """A job has ended."""

    job: StepJob
    record: Record | None
    """None: it did not run and will not; the runner decides again what happens to the step."""


JobEvent = JobStarted | JobEnded


class StepExecutor(Protocol):
    """Runs steps somewhere, each once."""

    def take(self, job: StepJob) -> bool:
        """Take a job and return True; return False if it has to wait in the runner."""

    def wait(self) -> Sequence[JobEvent]:
        """Return what has happened; waits, but not much longer than a second if a cluster has nothing to tell."""

    def cancel(self) -> None:
        """Give up all jobs, since the run has to stop; `wait` still reports the end of each."""


class LocalExecutor:
    """Runs steps on this machine, each in a thread; steps run at the same time if their devices are free."""

    def __init__(self, machine: MachineInfo, jobs: int) -> None:
        self.devices = DevicePool(machine.gpus, machine.cores, jobs)
        self.events: queue.Queue[JobEvent] = queue.Queue()

    def take(self, job: StepJob) -> bool:
        """Start a step if all that it needs has ended and its devices are free."""
        if job.open_needs or not self.devices.take(job.step):
            return False
        self.events.put(JobStarted(job))
        threading.Thread(target=self._work, args=(job,), daemon=True).start()
        return True

    def wait(self) -> Sequence[JobEvent]:
        """Wait for the next event."""
        event = self.events.get()
        if isinstance(event, JobEnded):
            self.devices.give_back(event.job.step)
        return (event,)

    def cancel(self) -> None:
        """Do nothing: running commands ask for the reason to stop themselves."""

    def _work(self, job: StepJob) -> None:
        """Run one step; it always leaves a record, also after an error."""
        record = job.run.runner.record(job.step, "failed", "the runner itself failed, see its error output")
        try:
            record = job.run.runner.run(job.step)
        finally:  # without a record the run would wait for ever
            self.events.put(JobEnded(job, record))
