"""Run steps as tasks of Slurm's job arrays.

All runs go into the queue together. The tasks of an array are the same place in the plans of many runs: task 7 of every
array is a step of run 7. So `aftercorr`, which lets task 7 wait for task 7 of another array, is a dependency between
steps. Slurm keeps the order, starts what can start, and starts again what a broken node has ended.
"""

import json
import math
import shlex
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mezzo.errors import RunError
from mezzo.files import write_text
from mezzo.tipc._device_pool import needed_devices
from mezzo.tipc._executor import JobEnded, JobEvent, StepJob
from mezzo.tipc._job_book import JobBook
from mezzo.tipc._progress import last_lines
from mezzo.tipc._record import Status
from mezzo.tipc._runner import PlanRun
from mezzo.tipc._slurm_queue import (
    WAITS,
    TaskId,
    cancel,
    keep_name,
    recorded_state,
    setting,
    states,
    submit,
)

_POLL_S = (1.0, 15.0)  # a long run asks less often: an answer costs the controller time
_POLL_SHARE = 0.02  # of the time since the last step ended
_BACKSTOP_S = 120.0  # Slurm's own time limit is longer than ours, which leaves a better record
_SILENCE_S = 600.0  # a controller that does not answer for so long is gone
_OVER_MEMORY = "memory limit"  # part of two messages of slurmstepd
_NUM_LINES = 5  # of a job's output, to explain its end
_STATES: dict[str, tuple[Status, str]] = {
    "TIMEOUT": ("timeout", "Slurm ended it at the job's time limit"),
    "DEADLINE": ("timeout", "Slurm ended it at the job's deadline"),
    "OUT_OF_MEMORY": ("failed", "Slurm ended it: it used more memory than the job has"),
    "CANCELLED": ("interrupted", "it was cancelled in Slurm"),
    "NODE_FAIL": ("interrupted", "its node failed"),
    "BOOT_FAIL": ("interrupted", "its node did not start"),
    "PREEMPTED": ("interrupted", "Slurm gave its node to another job"),
}


@dataclass(frozen=True)
class ArrayKey:
    """What the tasks of an array have in common."""

    lot: int  # runs above the largest allowed number of a task are in another lot
    cpus: int
    gpus: int
    minutes: int | None
    needs: frozenset["ArrayKey"]  # the arrays whose task of the same number has to end first
    place: int  # a run has several steps with all this in common


@dataclass
class _Array:
    tasks: dict[int, StepJob] = field(default_factory=dict)
    number: int | None = None  # of the job, once it is submitted


class SlurmExecutor:
    """Runs steps in a Slurm queue."""

    def __init__(self, work: Path, *, cores: int, memory_mb: int | None = None, max_tasks: int | None = None) -> None:
        """Prepare a queue; nothing is submitted yet.

        Args:
            work: A folder, seen by all nodes, for tables of tasks and the output of jobs.
            cores: The cores of the largest node.
            memory_mb: Memory of each step; None: the default of the partition.
            max_tasks: The largest number of a task plus one; None: as the cluster is configured.

        """
        self.name = f"mezzo-{uuid.uuid4().hex[:12]}"
        self.work, self.cores, self.memory_mb = work / self.name, cores, memory_mb
        self.max_tasks = max_tasks or int(setting("MaxArraySize") or 1001)
        self.book = JobBook()
        self.new: list[StepJob] = []
        self.numbers: dict[PlanRun, int] = {}
        self.keys: dict[tuple[PlanRun, str], ArrayKey] = {}
        self.arrays: dict[ArrayKey, _Array] = {}
        self.tasks: dict[TaskId, StepJob] = {}
        self.num_tables = 0
        self.last_end = self.last_answer = time.monotonic()

    def take(self, job: StepJob) -> bool:
        """Take every job; `wait` submits those that came together."""
        is_new = job.run not in self.book.folders
        jobs = self.book.add(job)
        if is_new:
            keep_name(jobs, self.name)
        self.new.append(job)
        return True

    def wait(self) -> Sequence[JobEvent]:
        """Submit what is new, then look at the queue."""
        if self.new:
            self._submit()
            self.last_end = time.monotonic()
        time.sleep(min(max((time.monotonic() - self.last_end) * _POLL_SHARE, _POLL_S[0]), _POLL_S[1]))
        events: list[JobEvent] = [*self.book.newly_started(), *self._ended()]
        return events

    def cancel(self) -> None:
        """Cancel all jobs, and let running workers end."""
        self.book.retire()
        cancel(self.name)

    def close(self) -> None:
        """Cancel what is left after an error, and remove the folder of tables unless a job has printed something."""
        if self.book.open:
            self.cancel()
        if self.work.is_dir():
            for path in self.work.iterdir():
                if path.suffix == ".jsonl" or not path.stat().st_size:
                    path.unlink()
            if not any(self.work.iterdir()):
                self.work.rmdir()

    def preview(self, jobs: Sequence[StepJob]) -> list[str]:
        """Return the commands that would submit jobs; nothing is written or submitted."""
        commands = []
        for number, key in enumerate(self._grouped(jobs), 1):
            self.arrays[key].number = number
            commands.append(shlex.join(["sbatch", *self._options(key)]))
        return commands

    def _submit(self) -> None:
        new, self.new = self.new, []
        for key in self._grouped(new):
            array = self.arrays[key]
            array.number = submit(self._options(key), self._script(array))
            self.tasks |= {(array.number, task): job for task, job in array.tasks.items()}

    def _grouped(self, jobs: Sequence[StepJob]) -> list[ArrayKey]:
        """Put new jobs into arrays; return these, each after those that it needs."""
        added: list[ArrayKey] = []
        for job in jobs:
            number = self.numbers.setdefault(job.run, len(self.numbers))
            cards, cores = needed_devices(job.step, self.cores)
            limit = job.run.options.step_limit
            direct = [name for name in job.step.needs if name in job.open_needs]
            key = ArrayKey(
                lot=number // self.max_tasks,
                cpus=max(1, min(cores, self.cores)),
                gpus=len(cards),
                minutes=None if limit is None else math.ceil((limit + _BACKSTOP_S) / 60),
                needs=frozenset(self.keys[job.run, name] for name in direct),
                place=0,
            )
            task = number % self.max_tasks
            while key in self.arrays and (self.arrays[key].number is not None or task in self.arrays[key].tasks):
                key = replace(key, place=key.place + 1)  # it is submitted, or has another step of this run
            if key not in self.arrays:
                self.arrays[key] = _Array()
                added.append(key)
            self.arrays[key].tasks[task] = job
            self.keys[job.run, job.step.name] = key
        return added

    def _script(self, array: _Array) -> str:
        """Write the table of an array and return its script."""
        self.num_tables += 1
        table = self.work / f"{self.num_tables}.jsonl"
        rows = (
            json.dumps([task, str(self.book.folders[job.run].path), self.book.index_of(job)]) + "\n"
            for task, job in array.tasks.items()
        )
        write_text(table, "".join(rows))
        words = shlex.join([sys.executable, "-m", "mezzo.tipc._slurm_job", str(table)])
        return f"#!/bin/bash\nexec {words}\n"

    def _options(self, key: ArrayKey) -> list[str]:
        """Return the options of sbatch for an array."""
        tasks = self.arrays[key].tasks
        root = next(iter(tasks.values())).run.root
        options = [
            f"--job-name={self.name}",
            f"--array={_ranges(sorted(tasks))}",
            "--nodes=1",
            "--ntasks=1",
            f"--cpus-per-task={key.cpus}",
            f"--chdir={root}",
            f"--output={str(self.work).replace('%', '%%')}/%A_%a.out",
            "--requeue",
            "--kill-on-invalid-dep=yes",
        ]
        if key.gpus:
            options.append(f"--gres=gpu:{key.gpus}")
        if self.memory_mb is not None:
            options.append(f"--mem={self.memory_mb}M")
        if key.minutes is not None:
            options.append(f"--time={key.minutes}")
        if key.needs:
            numbers = sorted(self.arrays[need].number or 0 for need in key.needs)
            options.append("--dependency=" + ",".join(f"aftercorr:{number}" for number in numbers))
        return options

    def _ended(self) -> list[JobEnded]:
        try:
            known = states(self.name)
        except RunError:
            if time.monotonic() - self.last_answer > _SILENCE_S:
                raise
            return []  # the controller may be restarting; the jobs run on
        self.last_answer = time.monotonic()
        ended = []
        for task in sorted(self.tasks):  # a step has a larger number than those that it needs
            state = known.get(task) or recorded_state(task) or "UNKNOWN"
            if state not in WAITS:
                ended.append(self._end_of(self.tasks.pop(task), task, state))
        if ended:
            self.last_end = time.monotonic()
        return ended

    def _end_of(self, job: StepJob, task: TaskId, state: str) -> JobEnded:
        """Return the end of a job: its worker's record, or one that Slurm's state explains."""
        record = self.book.folders[job.run].record(self.book.index_of(job))
        if record is not None:
            return self.book.ended(job, record)
        stopped = job.run.stop()
        if not self.book.has_started(job) and (stopped or self.book.lacks_need(job)):
            return self.book.returned(job)
        if stopped:
            return self.book.ended_outside(job, "interrupted", stopped)
        printed = last_lines(self.work / f"{task[0]}_{task[1]}.out", _NUM_LINES)
        if any(_OVER_MEMORY in line.lower() for line in printed):
            state = "OUT_OF_MEMORY"  # a limit that Slurm keeps without control groups ends as FAILED
        status, reason = _STATES.get(state, ("failed", f"its job left no record (Slurm's state: {state})"))
        return self.book.ended_outside(job, status, f"{reason}: {printed[-1][:300]}" if printed else reason)


def _ranges(numbers: Sequence[int]) -> str:
    """Return numbers as the option --array has them.

    >>> _ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
