"""End the jobs that a killed runner has left in a cluster."""

import time
from collections.abc import Callable
from pathlib import Path

from mezzo.tipc._job_folder import retire_jobs
from mezzo.tipc._slurm_queue import cancel_left

_END_S = 3.0  # a worker looks every second whether its run is still wanted


def end_left_jobs(folder: Path, report: Callable[[str], object]) -> None:
    """End the jobs of a run whose runner was killed, and wait until they have ended; raises RunError if they do not."""
    for jobs in retire_jobs(folder):
        if cancel_left(jobs):
            report("cancelled the jobs of an earlier run that was killed")
        elif jobs.num_open:
            report(f"waits {_END_S:g} s for the workers of an earlier run that was killed")
            time.sleep(_END_S)
