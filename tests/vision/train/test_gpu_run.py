"""Training on a GPU: what ran in half, and the compiled step in a whole run."""

import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import losses_of, person_config, train_in_process
from torch import Tensor

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


def weights_of(checkpoint: Path) -> Tensor:
    """Return everything that a run trained up to a checkpoint, as one vector."""
    state = load_file(checkpoint / "model.safetensors")
    return torch.cat([value.double().flatten() for name, value in state.items() if "running_" not in name])


def assert_same_way(one: Tensor, other: Tensor) -> None:
    """Check that two runs moved their weights in the same direction, equally far.

    Batch norms over four small samples turn a rounding into per cents of the loss within two steps, so losses cannot be
    compared. On a CPU, where only the order of sums differs, the cosine is 1 - 3e-10 (float32) and 0.998 (float16).
    """
    assert torch.nn.functional.cosine_similarity(one, other, dim=0).item() > 0.98
    assert (one.norm() / other.norm()).item() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("precision", [["fp32"], ["fp16", "--amp_level", "O2"]])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_captured_run_is_the_run_as_written(
    compiled: bool, precision: list[str], persons: Path, tmp_path: Path
) -> None:
    environment = {**os.environ} if compiled else {**os.environ, "CXX": "no-compiler-here"}
    config = person_config(tmp_path, persons, iters=6)
    options = ["--config", config, "--device", "gpu", "--workers", 2, "--precision", *precision, "--log_iters", 1]
    options += ["--save_interval", 2, "--learning_rate", 0.01]
    for name, more in (("written", []), ("captured", ["--to_static_training", "--do_eval"])):
        done = train_in_process(*options, "--save_dir", tmp_path / name, *more, env=environment)
        assert done.returncode == 0, done.stderr  # also at the very end, where graph, workers and device go down
        assert "the step runs eagerly" not in done.stdout
        assert ("operator by operator" in done.stderr) == (not compiled and name == "captured")
    form = re.findall(r"the step runs (?:compiled|as written)", done.stdout)
    assert len(form) == 1
    resumed = ["--save_dir", tmp_path / "resumed", "--to_static_training", "--resume", tmp_path / "captured" / "iter_4"]
    done = train_in_process(*options, *resumed, env=environment)
    assert done.returncode == 0, done.stderr
    assert form[0] in done.stdout
    written, captured = losses_of(tmp_path / "written"), losses_of(tmp_path / "captured")
    assert captured[0][1] == pytest.approx(written[0][1], rel=2e-3)  # of the same weights
    start, end = ([weights_of(tmp_path / name / f"iter_{step}") for name in ("written", "captured")] for step in (2, 6))
    assert_same_way(end[1] - start[1], end[0] - start[0])
    at_four = weights_of(tmp_path / "captured" / "iter_4")
    assert_same_way(weights_of(tmp_path / "resumed" / "iter_6") - at_four, end[1] - at_four)
