"""How busy the machine was while a command ran: whether its speed means anything.

A step's own processes are not counted as load: a training that uses all cores by itself is measured well. What spoils a
measurement is CPU time that other processes take while something waits for a core.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from mezzo.report import percent

EVERY_S = 2.0
"""Seconds between samples. Finding the processes of a step takes milliseconds; shorter commands are not judged."""
OTHERS = 0.15
"""Share of the cores' time: less is the system's own work, which is always there."""
PRESSURE = 0.10
"""Share of the time in which something waited for a core; with less, other processes took only idle cores."""
LOAD_PER_CORE = 1.5
"""Where the system tells only its load average: one process per core is a training that uses them all."""
MAX_SPREAD = 0.25
"""Largest distance between the quartiles of the speeds in a log, as a share of their median.

Lite trainings of PP-HumanSeg-lite on two idle cores gave 0.02 to 0.10, and 0.32 while something else ran.
"""
MIN_SPEEDS = 4
"""Fewer speeds have no quartiles to speak of."""

_STAT, _PRESSURE = Path("/proc/stat"), Path("/proc/pressure/cpu")
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class LoadSampler:
    """Measures how busy the machine is beside one command.

    Args:
        processes: Returns the processes of the command.
    """

    def __init__(self, processes: Callable[[], Iterable[int]]) -> None:
        self._processes = processes
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._start = self._last = time.monotonic()
        self._busy_start, self._waited_start = _busy_seconds(self._cores), _waited_seconds()
        self._own = 0.0
        self._found: dict[str, str] = {}

    def sample(self) -> None:
        """Take a sample if the last one is long ago; called many times per second."""
        now = time.monotonic()
        if now - self._last < EVERY_S:
            return
        self._last = now
        seconds = now - self._start
        # A process that has ended is in the times of its parent, unless its parent did not wait for it: never count backwards.
        self._own = max(self._own, sum(_cpu_seconds(pid) for pid in self._processes()))
        found = {"cores": str(len(self._cores) or os.cpu_count() or 1), "load": f"{os.getloadavg()[0]:.2f}"}
        busy, waited = _busy_seconds(self._cores), _waited_seconds()
        if busy is not None and self._busy_start is not None:
            others = max(0.0, busy - self._busy_start - self._own)
            found["others"] = f"{min(1.0, others / (seconds * len(self._cores))):.3f}"
        if waited is not None and self._waited_start is not None:
            found["pressure"] = f"{min(1.0, (waited - self._waited_start) / seconds):.3f}"
        self._found = found

    @property
    def load(self) -> dict[str, str]:
        """Cores, load average, and shares from 0 to 1: `others` of the cores' time, `pressure` of the time.

        Empty if the command was too short for a sample; without the shares if the system does not tell them.
        """
        return self._found


def busy_reason(load: Mapping[str, str]) -> str:
    """Return why a speed that was measured under this load means nothing; empty if it may be used.

    >>> busy_reason({"cores": "2", "load": "4.10", "others": "0.480", "pressure": "0.900"})
    'other processes used 48% of the CPU, and something waited for a core 90% of the time (load 4.10, 2 cores)'
    >>> busy_reason({"cores": "2", "load": "4.10", "others": "0.020", "pressure": "0.900"})
    ''
    >>> busy_reason({"cores": "2", "load": "4.10"})
    'the load average was 4.10 on 2 cores'
    """
    others, pressure, cores, average = (_number(load.get(name)) for name in ("others", "pressure", "cores", "load"))
    about = f"load {load.get('load', 'unknown')}, {load.get('cores', 'unknown')} cores"
    if others is not None:
        if others <= OTHERS or (pressure is not None and pressure <= PRESSURE):
            return ""
        waited = f", and something waited for a core {percent(pressure, 1)} of the time" if pressure is not None else ""
        return f"other processes used {percent(others, 1)} of the CPU{waited} ({about})"
    if average is not None and cores and average > LOAD_PER_CORE * cores:
        return f"the load average was {load['load']} on {load['cores']} cores"
    return ""


def spread_reason(speeds: Sequence[float]) -> str:
    """Return why speeds that differ from line to line mean nothing; empty if they agree, or are too few to tell."""
    if len(speeds) < MIN_SPEEDS:
        return ""
    first, middle, third = statistics.quantiles(speeds, n=4, method="inclusive")
    spread = (third - first) / middle
    return f"half of the {len(speeds)} speeds in the log spread over {spread:.0%}" if spread > MAX_SPREAD else ""


def _number(word: str | None) -> float | None:
    """Return a number of a record, which may come from another machine: None unless it is finite and not negative."""
    try:
        value = float(word or "")
    except ValueError:
        return None
    return value if 0 <= value < 1e9 else None


def _busy_seconds(cores: Iterable[int]) -> float | None:
    """Return the CPU time that all processes of the machine have used on these cores; None if the system hides it."""
    wanted = {f"cpu{core}" for core in cores}
    try:
        rows = [line.split() for line in _STAT.read_text().splitlines()]
        # user, nice, system, idle, waiting for a disk, interrupts, soft interrupts, stolen by other virtual machines
        found = [[int(each) for each in row[1:9]] for row in rows if row and row[0] in wanted]
    except (OSError, ValueError):
        return None
    busy = [sum(row[:3]) + sum(row[5:]) for row in found if len(row) == 8]
    return sum(busy) / _TICKS if wanted and len(busy) == len(wanted) else None


def _waited_seconds() -> float | None:
    """Return for how long something has waited for a core; None if the kernel does not measure it."""
    try:
        line = _PRESSURE.read_text().split("\n")[0]
        return int(line.rpartition("total=")[2]) / 1e6
    except (OSError, ValueError):
        return None


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and of its children that have ended; 0 if it has ended itself."""
    folder = Path("/proc") / str(pid)
    try:
        fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
        return sum(int(each) for each in fields[11:15]) / _TICKS  # user and system, its own and its children's
    except (OSError, ValueError):
        return 0.0
