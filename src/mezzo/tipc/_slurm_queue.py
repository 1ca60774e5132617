"""Slurm's own commands: submit, look, cancel. Every answer is checked, and an error is one line."""

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence

from mezzo.errors import RunError
from mezzo.files import FileError, one_line, read_text
from mezzo.tipc._job_folder import JobFolder

WAITS = frozenset(
    "PENDING RUNNING SUSPENDED COMPLETING CONFIGURING REQUEUED REQUEUE_HOLD REQUEUE_FED RESIZING SIGNALING "
    "SPECIAL_EXIT STAGE_OUT STOPPED RESV_DEL_HOLD".split()
)
"""States in which a job has not ended."""
_NAME = "slurm-name"  # the file with the name of the jobs, in a folder of jobs
_CANCEL_S = 120.0  # Slurm kills 30 s after its first signal unless KillWait says otherwise
_ANSWER_S = 60.0

TaskId = tuple[int, int]
"""Number of an array and of a task in it."""


def slurm(*words: str, stdin: str = "") -> str:
    """Run one of Slurm's commands and return its output; raises RunError with what it says."""
    try:
        done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=_ANSWER_S)
    except FileNotFoundError:
        raise RunError(f"there is no command '{words[0]}' here: --on slurm needs a machine that submits jobs") from None
    except subprocess.TimeoutExpired:
        raise RunError(f"{words[0]} has not answered for {_ANSWER_S:g} s: is slurmctld running?") from None
    if done.returncode != 0:
        raise RunError(f"{words[0]}: {one_line(done.stderr.strip() or f'exit status {done.returncode}')}")
    return done.stdout


def submit(options: Sequence[str], script: str) -> int:
    """Submit a script and return the number of its array."""
    answer = slurm("sbatch", "--parsable", *options, stdin=script)
    number = answer.strip().split(";")[0]  # a federation adds the name of the cluster
    if not number.isdigit():
        raise RunError(f"sbatch: expected the number of a job, not '{one_line(answer)[:80]}'")
    return int(number)


def states(name: str) -> Mapping[TaskId, str]:
    """Return the states of all tasks of the jobs with a name that Slurm still knows."""
    found = {}
    for line in slurm("squeue", "-h", "-r", "-t", "all", "-n", name, "-o", "%F|%K|%T").splitlines():
        if (row := re.fullmatch(r"(\d+)\|([^|]*)\|(\w+)", line.strip())) is None:
            raise RunError(f"squeue: expected the state of a task, not '{one_line(line)[:80]}'")
        if row[2].isdecimal():
            found[int(row[1]), int(row[2])] = row[3]
    return found


def recorded_state(task: TaskId) -> str:
    """Return the state of a task that the queue has forgotten; empty if there is no accounting."""
    try:
        answer = slurm("sacct", "-n", "-X", "-P", "-o", "State", "-j", f"{task[0]}_{task[1]}")
    except RunError:
        return ""
    return answer.split()[0] if answer.split() else ""  # "CANCELLED by 1000" is one state


def cancel(name: str) -> None:
    """Cancel all jobs with a name."""
    slurm("scancel", f"--name={name}")


def keep_name(jobs: JobFolder, name: str) -> None:
    """Note the name of the jobs, so that a later runner can cancel what a killed one has left."""
    (jobs.path / _NAME).write_text(name, encoding="utf-8")


def cancel_left(jobs: JobFolder) -> bool:
    """Cancel the jobs that a killed runner has left, and wait for their end; return whether there were any.

    Raises:
        RunError: They do not end.
    """
    try:
        name = read_text(jobs.path / _NAME, limit=1000)
    except (FileError, FileNotFoundError):
        return False
    if not re.fullmatch(r"mezzo-[0-9a-f]{12}", name):
        raise RunError(f"{jobs.path / _NAME}: '{one_line(name)[:40]}' is not the name of jobs; delete this folder")
    if not any(state in WAITS for state in states(name).values()):
        return False
    cancel(name)
    deadline = time.monotonic() + _CANCEL_S
    while any(state in WAITS for state in states(name).values()):
        if time.monotonic() > deadline:
            raise RunError(f"jobs of an earlier run do not end; see: squeue --name={name}")
        time.sleep(0.5)
    return True


def largest_node() -> tuple[int, int]:
    """Return the number of cores and of GPUs of the largest node of the partition that jobs go to."""
    partition = os.environ.get("SBATCH_PARTITION", "")
    chosen = ["-p", partition] if partition else []
    cores = gpus = 0
    for line in slurm("sinfo", "-h", "-N", *chosen, "-o", "%c|%G").splitlines():
        count, _, devices = line.partition("|")
        cores = max(cores, int(count) if count.isdigit() else 0)
        gpus = max(gpus, sum(map(int, re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", devices))))
    if not cores:
        raise RunError("sinfo names no node that jobs could run on; check the partition (SBATCH_PARTITION)")
    return cores, gpus


def setting(name: str) -> str:
    """Return one of the settings of the cluster; empty if it has none."""
    found = re.search(rf"^{name}\s*=\s*(\S+)", slurm("scontrol", "show", "config"), re.MULTILINE)
    return found[1] if found else ""
