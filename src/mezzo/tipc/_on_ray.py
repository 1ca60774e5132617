"""Run steps as tasks of a Ray cluster: one task per step, which depends on the tasks of the steps that it needs.

Ray starts a task again after a worker or a node was lost, and only then: a failed training is a record, not an error of
its task. Commands run in sessions of their own, outside of Ray's process; a watcher ends them if Ray kills the worker.
"""

import logging
import os
import queue
import re
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from mezzo.errors import MezzoError, OptionError, RunError, require
from mezzo.files import one_line
from mezzo.tipc._device_pool import needed_devices
from mezzo.tipc._executor import JobEnded, JobEvent, StepJob
from mezzo.tipc._job_book import JobBook
from mezzo.tipc._needs import all_needs
from mezzo.tipc._record import Record
from mezzo.tipc._runner import PlanRun
from mezzo.tipc._worker import MAX_ATTEMPTS, run_job

_WAIT_S = 0.5
_CONNECT_S = 10.0
_MAX_PORT = 65535


def _check_address(address: str) -> None:
    """Raise an error unless somebody listens at an address: Ray itself would try for many minutes."""
    if address in ("", "auto"):
        return
    host, _, port = address.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > _MAX_PORT:
        raise OptionError(f"--on ray://{address}: must be ray://HOST:PORT, as `ray start --head` prints it")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, UnicodeError) as error:  # the second: a host that no domain name can spell
        raise RunError(
            f"no Ray at {address}: {getattr(error, 'strerror', '') or error}; `ray status` shows a running cluster"
        ) from None


def _task(path: str, index: int, env: Mapping[str, str], *needed: str | None) -> str | None:
    """Run one step in a process of Ray; return the line of its record, None if it has to be run again.

    `env` is the runner's environment. Ray's own has, for example, an OMP_NUM_THREADS that torchrun would respect.
    """
    if None in needed:
        return None
    record = run_job(path, index, [Record.parse(line) for line in needed if line is not None], env=env)
    return None if record is None else record.line()


class RayExecutor:
    """Runs steps in a Ray cluster whose machines share the runner's folder."""

    def __init__(self, address: str = "", *, memory_mb: int | None = None) -> None:
        """Connect to a cluster.

        Args:
            address: HOST:PORT of its head, or 'auto'; empty: RAY_ADDRESS, the cluster that runs here, or a new one.
            memory_mb: Memory that each step reserves; None: none.

        Raises:
            MissingExtra: Ray is not installed.
            RunError: The cluster does not answer.
        """
        require("ray", extra="ray")
        import ray

        self.ray, self.memory_mb = ray, memory_mb
        _check_address(address)
        try:
            ray.init(address=address or None, logging_level=logging.ERROR, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise RunError(f"Ray at '{address or 'this machine'}': {one_line(str(error))[:300]}") from error
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self.cores = max((int(node.get("CPU", 0)) for node in nodes), default=0)
        self.gpus = max((int(node.get("GPU", 0)) for node in nodes), default=0)
        self.description = f"Ray {ray.__version__}, {len(nodes)} nodes of up to {self.cores} cores and {self.gpus} GPUs"
        if self.cores < 1:
            raise RunError(f"{self.description}: no node has a CPU to run steps on")
        self.remote = ray.remote(_task)
        self.environment = ray.put(dict(os.environ))
        self.book = JobBook()
        self.refs: dict[tuple[PlanRun, str], Any] = {}
        self.ends: queue.Queue[tuple[StepJob, Future[str | None]]] = queue.Queue()
        self.early: list[tuple[StepJob, Future[str | None]]] = []  # ended by the loss of a step that is not known yet

    def take(self, job: StepJob) -> bool:
        """Give every job to Ray at once; Ray starts it when what it needs has ended and its resources are free."""
        jobs = self.book.add(job)
        cards, cores = needed_devices(job.step, self.cores)
        needed = [
            self.refs[job.run, name] if name in job.open_needs else job.run.records[name].line()
            for name in all_needs(job.run.plan, job.step)
        ]
        task = self.remote.options(
            name=f"{job.run.plan.model} {job.step.name}",
            num_cpus=max(1, min(cores, self.cores)),
            num_gpus=len(cards),
            memory=None if self.memory_mb is None else self.memory_mb * 2**20,
            max_retries=MAX_ATTEMPTS,
            retry_exceptions=False,
        )
        ref = task.remote(str(jobs.path), self.book.index_of(job), self.environment, *needed)
        self.refs[job.run, job.step.name] = ref
        ref.future().add_done_callback(lambda future: self.ends.put((job, future)))
        return True

    def wait(self) -> Sequence[JobEvent]:
        """Wait for the end of a task, half a second at most."""
        ended = []
        try:
            ended.append(self.ends.get(timeout=_WAIT_S))
            while True:
                ended.append(self.ends.get_nowait())
        except queue.Empty:
            pass
        ended = [*self.early, *ended]
        self.early = []
        events: list[JobEvent] = list(self.book.newly_started())
        for job, future in sorted(ended, key=lambda each: self.book.index_of(each[0])):
            if (event := self._end_of(job, future)) is None:
                self.early.append((job, future))
            else:
                events.append(event)
        return events

    def cancel(self) -> None:
        """Let running workers end their steps, and take back the tasks that wait."""
        waiting = [self.refs[key] for key, job in self.book.open.items() if not self.book.has_started(job)]
        self.book.retire()
        for ref in waiting:
            self.ray.cancel(ref)

    def close(self) -> None:
        """Leave the cluster; tasks that are left end with it."""
        if self.book.open:
            self.book.retire()
        self.ray.shutdown()

    def _end_of(self, job: StepJob, future: "Future[str | None]") -> JobEnded | None:
        """Return the end of a job; None if a step that it needs ended by the same error and has not been seen yet."""
        error, stopped = future.exception(), job.run.stop()
        line = future.result() if error is None else None
        if line is not None:
            return self.book.ended(job, Record.parse(line))
        record = self.book.folders[job.run].record(self.book.index_of(job))
        if record is not None:
            return self.book.ended(job, record)  # its worker was lost just after the end
        if any((job.run, name) in self.book.open for name in job.open_needs):
            return None
        if not self.book.has_started(job) and (stopped or self.book.lacks_need(job)):
            return self.book.returned(job)
        if stopped:
            return self.book.ended_outside(job, "interrupted", stopped)
        if error is None:
            return self.book.ended_outside(job, "interrupted", "it was interrupted in Ray")
        exceptions = self.ray.exceptions
        if isinstance(error, exceptions.RayTaskError) and isinstance(error.cause, MezzoError | OSError):
            return self.book.ended_outside(job, "failed", f"could not be run: {one_line(str(error.cause))[:300]}")
        return self.book.ended_outside(job, "failed", f"Ray lost its worker: {one_line(str(error))[:300]}")
