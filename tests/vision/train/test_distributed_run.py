"""Runs of two processes, as torchrun starts them, against one process with twice the batch (risk R8)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import SCRIPT, losses_of, person_config

FROZEN = Path(__file__).with_name("frozen_run.py")
VAL = SCRIPT.parent / "tools" / "val.py"
NAME = "model.safetensors"
TOLERANCE = 1e-6  # float32 weights of about 1: the mean of two halves is not quite the mean of the whole


def launch(processes: int, *arguments: object, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [*(launcher if processes > 1 else [sys.executable]), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


def frozen(processes: int, out: Path, config: Path, batch_size: int, *options: str) -> Path:
    done = launch(processes, FROZEN, out, config, batch_size, *options)
    assert done.returncode == 0, done.stderr
    return out


def weights(run: Path, step: int) -> torch.Tensor:
    """Return all weights of a checkpoint in one row."""
    return torch.cat([value.double().flatten() for _, value in sorted(load_file(run / f"iter_{step}" / NAME).items())])


def difference(one: Path, other: Path) -> float:
    """Return how far two runs went apart from the first step to the fourth, over how far they went."""
    mine, theirs = (weights(run, 4) - weights(run, 1) for run in (one, other))
    return float((mine - theirs).norm() / theirs.norm())


@pytest.mark.slow
@pytest.mark.parametrize("options", [("fp32", "O0"), ("fp32", "O0", "fsdp")])
def test_two_processes_equal_one_with_twice_the_batch(options: tuple[str, ...], persons: Path, tmp_path: Path) -> None:
    config = person_config(tmp_path, persons, iters=4)
    one = frozen(1, tmp_path / "one", config, 4, *options[:2])
    two = frozen(2, tmp_path / "two", config, 2, *options)
    assert (weights(one, 4) - weights(two, 4)).abs().max() < TOLERANCE
    assert (weights(one, 4) - weights(one, 1)).abs().max() > 1000 * TOLERANCE  # it did train
    assert difference(two, one) < 1e-4  # float32 keeps the weights, of which an update is a thousandth, to 1e-7
    assert [step for step, _ in losses_of(one)] == [step for step, _ in losses_of(two)] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("options", [("fp16", "O2"), ("bf16", "O1")])
def test_two_processes_in_half_are_as_near_to_float32_as_one(
    options: tuple[str, ...], persons: Path, tmp_path: Path
) -> None:
    config = person_config(tmp_path, persons, iters=4)
    right = frozen(1, tmp_path / "right", config, 4, "fp32", "O0")
    one = frozen(1, tmp_path / "one", config, 4, *options)
    two = frozen(2, tmp_path / "two", config, 2, *options)
    # Gradients of half a batch are rounded to half before they are averaged: not worse than rounding them once.
    assert difference(two, right) < 1.5 * difference(one, right)


@pytest.mark.slow
def test_sharded_fp16_runs_evaluate_save_and_resume(persons: Path, tmp_path: Path) -> None:
    config = person_config(tmp_path, persons, iters=4)
    common = [
        "--config",
        config,
        "--precision",
        "fp16",
        "--device",
        "cpu",
        "--workers",
        0,
        "--do_eval",
        "--log_iters",
        1,
    ]
    common += ["--save_interval", 2, "--batch_size", 2]
    done = launch(2, SCRIPT, *common, "--fsdp", "--save_dir", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    again = launch(
        2, SCRIPT, *common, "--fsdp", "--save_dir", tmp_path / "again", "--resume", tmp_path / "out" / "iter_2"
    )
    assert again.returncode == 0, again.stderr
    assert torch.equal(weights(tmp_path / "again", 4), weights(tmp_path / "out", 4))
    alone = launch(
        1, SCRIPT, *common, "--save_dir", tmp_path / "alone", "--pretrained", tmp_path / "out" / "best_model"
    )
    assert alone.returncode == 0, alone.stderr


@pytest.mark.slow
def test_sharded_runs_take_o3_and_layers_that_stay_float32(persons: Path, tmp_path: Path) -> None:
    config = person_config(tmp_path, persons, iters=2)
    lists = tmp_path / "lists.yml"
    lists.write_text("excluded_layers: ['conv_bn0']\n")
    common = ["--config", config, "--precision", "bf16", "--device", "cpu", "--workers", 0, "--log_iters", 1]
    common += ["--amp_level", "O3", "--fp8", "emulate,min_width=0,min_size=0", "--amp_lists", lists, "--batch_size", 2]
    done = launch(2, SCRIPT, *common, "--fsdp", "--save_dir", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert [step for step, _ in losses_of(tmp_path / "out")] == [1, 2]


@pytest.mark.slow
def test_the_failure_of_one_process_stops_all_and_is_told(persons: Path, tmp_path: Path) -> None:
    config = person_config(tmp_path, persons, iters=200)
    failing = tmp_path / "failing.py"
    failing.write_text(
        "import os, sys\n"
        "from mezzo.cli import main\n"
        "from mezzo.vision.train import _engine\n"
        "step, count = _engine.train_step, []\n"
        "def fail(*args):\n"
        "    count.append(1)\n"
        "    if os.environ['RANK'] == '1' and len(count) == 3:\n"
        "        raise ArithmeticError('worker one is out of order')\n"
        "    return step(*args)\n"
        "_engine.train_step = fail\n"
        "main(['train', *sys.argv[1:]])\n"
    )
    arguments = [
        "--config",
        config,
        "--device",
        "cpu",
        "--workers",
        0,
        "--batch_size",
        2,
        "--save_dir",
        tmp_path / "out",
    ]
    done = launch(2, failing, *arguments, timeout=120)
    assert done.returncode != 0
    assert "ArithmeticError: worker one is out of order" in done.stderr
    assert "Traceback" in done.stderr


@pytest.mark.slow
def test_processes_evaluate_what_the_checkpoint_holds(persons: Path, tmp_path: Path) -> None:
    config = person_config(tmp_path, persons, iters=4)
    common = ["--device", "cpu", "--workers", 0, "--batch_size", 2, "--do_eval", "--save_dir", tmp_path / "out"]
    done = launch(2, SCRIPT, "--config", config, *common)
    assert done.returncode == 0, done.stderr
    alone = launch(1, VAL, "--config", config, "--device", "cpu", "--model_path", tmp_path / "out" / "iter_4")
    assert alone.returncode == 0, alone.stderr
    lines = [
        [row.partition("\t")[2] for row in text.splitlines() if "[EVAL]" in row] for text in (done.stdout, alone.stdout)
    ]
    assert lines[0] == lines[1]
    assert len(lines[0]) == 4


GROUP = """
import torch.distributed as dist
from mezzo.model import parallel as _distributed
with _distributed.join_world("cpu") as world:
    group = dist.group.WORLD
assert not dist.is_initialized()
assert any(kept is group for kept in _distributed._left)
"""


@pytest.mark.slow
def test_the_group_outlives_all_that_use_it(tmp_path: Path) -> None:
    """Its last reference is Python's own, which lets go of Python's lock before the group goes down."""
    script = tmp_path / "group.py"
    script.write_text(GROUP)
    done = launch(2, script)
    assert done.returncode == 0, done.stderr
