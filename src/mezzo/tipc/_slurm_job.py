"""The program of one task of a Slurm array: `python -m mezzo.tipc._slurm_job TABLE`.

The table has a JSON list per task: number of the task, folder of jobs, place of the step in its plan. The task ends with 0
if it leaves a record, whatever the record says: a failed training is a result. Any other exit status is a failure of the
cluster, and Slurm does not start what depends on it.
"""

import os
import sys
from pathlib import Path

from mezzo.errors import MezzoError, RunError
from mezzo.files import MiB, parse_json, read_text, say
from mezzo.tipc._job_folder import JobFolder
from mezzo.tipc._needs import all_needs
from mezzo.tipc._stop_request import StopRequest
from mezzo.tipc._worker import run_job


def main(table: str, task: str) -> int:
    """Run the step of a task; return the exit status."""
    folder, index = _find(Path(table), task)
    jobs = JobFolder(folder)
    if not jobs.is_valid:
        raise RunError(f"{folder}: the run has ended or was given up")
    plan, _ = jobs.read_plan()
    places = {step.name: place for place, step in enumerate(plan.steps)}
    needed = []
    for name in all_needs(plan, plan.steps[index]):
        if (record := jobs.record(places[name])) is None:
            raise RunError(f"{folder}: there is no record of {name}, which {plan.steps[index].name} needs")
        needed.append(record)
    stop = StopRequest(None)
    with stop.on_signals():
        run_job(str(folder), index, needed, stop)
    if jobs.record(index) is not None:
        return 0
    return 128 + stop.signal if stop.signal is not None else 1


def _find(table: Path, task: str) -> tuple[Path, int]:
    for line in read_text(table, limit=64 * MiB).split("\n")[:-1]:
        number, place, index = parse_json(line)
        if str(number) == task:
            return Path(place), int(index)
    raise RunError(f"{table}: no line for task {task}")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1], os.environ.get("SLURM_ARRAY_TASK_ID", "")))
    except MezzoError as error:
        say(f"mezzo: {error}", err=True)
        sys.exit(error.exit_code)
