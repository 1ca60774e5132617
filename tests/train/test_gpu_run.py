"""Training on a GPU: what ran in half, and the compiled step in a whole run."""

import os
import re
from pathlib import Path

import pytest
from small_runs import losses_of, person_config, train_in_process

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_convolutions_run_in_half(level: str, persons: Path, tmp_path: Path) -> None:
    config = person_config(tmp_path, persons, iters=1)
    options = ["--device", "gpu", "--precision", "fp16", "--amp_level", level, "--save_dir", tmp_path / "out"]
    done = train_in_process("--config", config, *options, env={**os.environ, "GLOG_v": "5"})
    assert done.returncode == 0, done.stderr
    counts = re.search(r"^\s+convolution\s+\|\s+(\d+)\s+\|\s+(\d+)\s+\|\s+(\d+)", done.stdout, flags=re.MULTILINE)
    assert counts is not None
    assert [int(count) for count in counts.groups()] == [48, 0, 0]
    assert re.search(r"max_mem_reserved: \d+ MB, max_mem_allocated: \d+ MB", done.stdout)


@pytest.mark.parametrize("precision", [["fp32"], ["fp16", "--amp_level", "O2"]])
def test_a_captured_run_is_the_run_as_written(precision: list[str], persons: Path, tmp_path: Path) -> None:
    config = person_config(tmp_path, persons, iters=12)
    options = ["--config", config, "--device", "gpu", "--workers", 2, "--precision", *precision, "--log_iters", 1]
    options += ["--save_interval", 6, "--do_eval", "--learning_rate", 0.01]
    for name, more in (("written", []), ("captured", ["--to_static_training"])):
        done = train_in_process(*options, "--save_dir", tmp_path / name, *more)
        assert done.returncode == 0, done.stderr  # also at the very end, where graph, workers and device go down
        assert "this run goes on as usual" not in done.stdout
    resumed = ["--save_dir", tmp_path / "resumed", "--to_static_training", "--resume", tmp_path / "captured" / "iter_6"]
    done = train_in_process(*options, *resumed)
    assert done.returncode == 0, done.stderr
    written, captured = losses_of(tmp_path / "written"), losses_of(tmp_path / "captured")
    # cuDNN may choose other algorithms, and differences grow from step to step
    assert [loss for _, loss in captured] == pytest.approx([loss for _, loss in written], rel=0.02)
    assert [loss for _, loss in captured[:2]] == pytest.approx([loss for _, loss in written[:2]], rel=2e-3)
    again = losses_of(tmp_path / "resumed")
    assert [loss for _, loss in again] == pytest.approx([loss for _, loss in captured[6:]], rel=0.02)
