"""How busy the machine was beside a step: measured at real processes, and what a certificate makes of it."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from mezzo.tipc._load import MAX_SPREAD, busy_reason, spread_reason
from mezzo.tipc._process import run_command

LOOP = "import time; end = time.monotonic() + {}\nwhile time.monotonic() < end: pass"


def load_of(seconds: float, others: int, folder: Path) -> tuple[dict[str, str], float]:
    """Return the load beside a command that computes while other processes do, and the command's CPU seconds."""
    with ExitStack() as stack:
        for _ in range(others):
            other = subprocess.Popen([sys.executable, "-c", LOOP.format(60)])
            stack.callback(other.wait)
            stack.callback(other.kill)
        note = 'open("cpu_seconds", "w").write(str(time.process_time()))'
        command = f"{sys.executable} -c '{LOOP.format(seconds)}\n{note}'"
        load = dict(run_command(command, env=dict(os.environ), cwd=folder, log=None).load)
    return load, float((folder / "cpu_seconds").read_text(encoding="utf-8"))


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs the /proc of Linux")
def test_other_processes_are_measured_and_the_command_itself_is_not(monkeypatch, tmp_path):
    monkeypatch.setattr("mezzo.tipc._load.EVERY_S", 0.3)
    cores = len(os.sched_getaffinity(0))
    busy, own_s = load_of(1.5, cores, tmp_path)
    assert int(busy["cores"]) == cores
    if "pressure" in busy:
        assert float(busy["pressure"]) > 0.5
        assert busy_reason(busy)
    # The loops keep all cores busy: what the command does not compute itself is the others' share. 0.15: the last
    # sample is up to 0.3 of 1.5 seconds before the end, and Python takes a moment to start.
    share_of_others = 1 - own_s / (1.5 * cores)
    assert abs(float(busy["others"]) - share_of_others) < 0.15


def test_a_short_command_has_no_load():
    assert run_command("true", env=dict(os.environ), cwd=Path.cwd(), log=None).load == {}


@pytest.mark.parametrize(
    ("load", "is_busy"),
    [
        ({}, False),
        ({"cores": "2", "load": "1.0", "others": "0.05", "pressure": "0.9"}, False),  # the step's own threads wait
        ({"cores": "64", "load": "20", "others": "0.3", "pressure": "0.01"}, False),  # enough idle cores for everyone
        ({"cores": "2", "load": "4.0", "others": "0.5", "pressure": "0.8"}, True),
        ({"cores": "2", "load": "4.0", "others": "0.5"}, True),  # a kernel without pressure
        ({"cores": "2", "load": "4.0"}, True),  # a system without /proc
        ({"cores": "2", "load": "2.5"}, False),
        ({"cores": "x", "load": "nan", "others": "-1", "pressure": "inf"}, False),  # the record of a foreign run
    ],
)
def test_the_rule(load, is_busy):
    assert bool(busy_reason(load)) is is_busy


def test_the_spread_of_speeds():
    assert spread_reason([10.0, 10.1, 9.9, 10.0]) == ""
    assert "over 43%" in spread_reason([5.0, 10.0, 11.0, 20.0])
    assert spread_reason([1.0, 100.0]) == ""  # too few to tell
    edge = [8.0, 10 - 5 * MAX_SPREAD, 10.0, 10 + 5 * MAX_SPREAD, 12.0]
    assert spread_reason(edge) == ""
