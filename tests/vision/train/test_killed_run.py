"""A run that is killed without a word goes on, in another process, as if nothing had happened."""

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_runs import SCRIPT, losses_of, person_config, train_in_process

from mezzo.checkpoint import CheckpointStore, read_state


def start(out: Path, *arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments), "--save_dir", str(out)]
    return subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=functools.partial(
            signal.signal, signal.SIGINT, signal.SIG_DFL
        ),  # a suite in the background ignores it
    )


def is_gone(group: int) -> bool:
    """Return whether no process of a group is left, after a moment that workers may take to end."""
    for _ in range(200):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("after", ["iter_2", "iter_6"])
def test_kill_minus_nine_and_resume(after: str, persons: Path, tmp_path: Path) -> None:
    config = person_config(tmp_path, persons, iters=14)
    options = ["--config", config, "--precision", "fp16", "--amp_level", "O2", "--save_interval", 2, "--log_iters", 1]
    options += ["--device", "cpu", "--seed", 3, "--use_ema"]
    process = start(tmp_path / "broken", *options, "--workers", 1)
    deadline = time.time() + 120
    while not (tmp_path / "broken" / after).exists() and time.time() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    whole = train_in_process(*options, "--save_dir", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    resumed = train_in_process(*options, "--save_dir", tmp_path / "broken", "--resume_model", tmp_path / "broken")
    assert resumed.returncode == 0, resumed.stderr
    assert losses_of(tmp_path / "broken") == losses_of(tmp_path / "whole")
    assert len(losses_of(tmp_path / "whole")) == 14
    last = "iter_14/state.safetensors"
    assert (tmp_path / "broken" / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()
    assert not list((tmp_path / "broken").glob(".tmp-*"))


@pytest.mark.slow
def test_ctrl_c_ends_a_run_and_its_workers(persons: Path, tmp_path: Path) -> None:
    config = person_config(tmp_path, persons, iters=100000)
    options = ["--config", config, "--save_interval", 2, "--device", "cpu", "--workers", 2]
    process = start(tmp_path / "out", *options)
    deadline = time.time() + 60
    while not (tmp_path / "out" / "latest").exists() and time.time() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: workers get it too
    try:
        assert process.wait(30) == 130
        assert is_gone(process.pid)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    newest = CheckpointStore(tmp_path / "out").latest()
    assert newest is not None
    assert read_state(newest)["progress"]["step"] >= 2
