"""A process that does not come: a line says which one, and the end of patience is one line too."""

import time
from pathlib import Path

import pytest
import torch.distributed as dist
from test_distributed_run import launch

from mezzo.model import watchdog as _watch
from mezzo.model.watchdog import BEGUN, EVALUATED, FORWARD_DONE, SAVING, Watch, begin_step, describe_ranks_behind, enter
from mezzo.vision.options import OptionError, RunOptions

SLEEPY = """
import sys, time
import torch, torch.distributed as dist
from mezzo.errors import MezzoError
from mezzo.model import parallel as _distributed, watchdog as _watch
_watch.BEAT_S, _watch.LINE_S = 0.1, 1.0
try:
    with _distributed.join_world("cpu", 3.0) as world:
        for step in range(5):
            _watch.begin_step(step)
            if world.rank == 1 and step == 2:
                time.sleep(20)
            _watch.enter(_watch.FORWARD_DONE)
            dist.all_reduce(torch.ones(1))
except MezzoError as error:
    print(type(error).__name__, error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


@pytest.mark.slow
def test_a_rank_that_sleeps_is_named_after_a_while_and_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    started = time.monotonic()
    done = launch(2, tmp_path / "sleepy.py", timeout=60)
    assert time.monotonic() - started < 25
    assert done.returncode == 1
    name = "rank 1 has not reached the backward pass of step 3"
    for seconds in (1, 2):
        assert f"waiting for the other processes for {seconds} s: {name}\n" in done.stderr
    assert f"RunError waited 3 s for the other processes: {name}; look at what it does" in done.stderr


MISSING = """
import os, sys
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
from mezzo.errors import MezzoError
from mezzo.model import parallel as _distributed, watchdog as _watch
_watch.LINE_S = 0.5
try:
    _distributed.enter_world("cpu", timeout_s=2.0)
except MezzoError as error:
    print(type(error).__name__, error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


@pytest.mark.slow
def test_processes_that_never_start_are_told(tmp_path: Path) -> None:
    (tmp_path / "missing.py").write_text(MISSING)
    done = launch(1, tmp_path / "missing.py", timeout=60)
    assert done.returncode == 1
    assert "waiting for the other processes for 0.5 s: not all 2 have started" in done.stderr
    assert "RunError not all 2 processes have started within 2 s" in done.stderr


def test_who_is_behind_is_told_in_words() -> None:
    at = {phase: 4 * 120 + phase for phase in (BEGUN, FORWARD_DONE, EVALUATED, SAVING)}
    assert describe_ranks_behind([5, 5, 5]) is None
    assert describe_ranks_behind([at[BEGUN], at[BEGUN] - 3, at[BEGUN]]) == "rank 1 has not reached step 120"
    assert describe_ranks_behind([at[SAVING], 0, 0]) == "ranks 1, 2 have not reached the checkpoint of step 120"
    assert describe_ranks_behind([at[EVALUATED], at[SAVING]]) == "rank 0 has not reached the checkpoint of step 120"
    assert describe_ranks_behind([0, 2]) == "rank 0 has not reached the first step"
    assert str(describe_ranks_behind([1] + [0] * 40)).count(",") == 16


def test_the_watch_speaks_once_a_period_and_is_silent_while_something_moves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(_watch.time, "monotonic", lambda: now)
    watch = Watch(dist.HashStore(), 0, 2, 1000)
    watch.position = 4
    for second in range(0, 181, 2):
        now = float(second)
        watch._compare()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"waiting for the other processes for {seconds} s: rank 1 has not reached step 1" for seconds in (60, 120, 180)
    ]
    for second in range(200, 600, 2):
        now, watch.position = float(second), second
        watch._compare()
    assert capsys.readouterr().err == ""


def test_positions_count_steps_and_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_step(3)  # without a group nothing happens
    watch = Watch(None, 0, 2, 10)
    monkeypatch.setattr(_watch, "_watch", watch)
    begin_step()
    assert watch.position == 4
    enter(FORWARD_DONE)
    assert watch.position == 5
    begin_step()
    assert watch.position == 8
    begin_step(119)
    enter(SAVING)
    assert watch.position == 4 * 120 + SAVING


@pytest.mark.parametrize("value", [0, -1, float("nan"), 1e9])
def test_the_limit_is_checked(value: float) -> None:
    with pytest.raises(OptionError, match="dist_timeout"):
        RunOptions(dist_timeout=value)
