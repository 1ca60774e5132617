"""Lightning runs in processes of their own: killed and resumed, and in two processes with DDP."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning_utilities")

pytestmark = pytest.mark.integrations

SCRIPT = Path(__file__).with_name("lightning_run.py")


def run(folder: Path, *options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, folder, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment, timeout=300)


def finished(folder: Path, *options: object, rank: int = 0) -> dict[str, Any]:
    done = run(folder, *options)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / f"rank{rank}.pt")


def assert_same(a: Any, b: Any, where: str = "") -> None:
    """Compare nested containers bit by bit."""
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for index, (left, right) in enumerate(zip(a, b, strict=True)):
            assert_same(left, right, f"{where}[{index}]")
    else:
        assert a == b, where


@pytest.mark.parametrize("recipe", ["float16", "bfloat16", "compact", "fp8"])
def test_a_killed_run_resumes_bit_exactly_from_its_own_checkpoint(tmp_path, recipe):
    whole = finished(tmp_path / "whole", "--recipe", recipe)
    dead = run(tmp_path / "dead", "--recipe", recipe, "--dies-after", 21)  # 8 batches per epoch: in the third one
    assert dead.returncode == -signal.SIGKILL
    assert sorted(path.name for path in (tmp_path / "dead").iterdir()) == ["epoch=0.ckpt", "epoch=1.ckpt"]
    resumed = finished(tmp_path / "dead", "--recipe", recipe, "--resume", tmp_path / "dead" / "epoch=1.ckpt")
    assert_same(resumed, whole)
    if recipe == "float16":
        assert whole["plugin"]["scale"] > 64.0
        assert whole["model"]["net.0.weight"].dtype is torch.float32
        assert not torch.equal(whole["model"]["net.0.weight"], whole["model"]["net.0.weight"].half().float())


@pytest.mark.parametrize("recipe", ["float16", "bfloat16"])
def test_two_processes_agree_and_resume_bit_exactly(tmp_path, recipe):
    options = ("--recipe", recipe, "--devices", 2)
    whole = finished(tmp_path / "whole", *options)
    other = torch.load(tmp_path / "whole" / "rank1.pt")
    for name in ("net.0.weight", "net.3.weight", "net.3.bias"):  # running statistics differ: other batches
        assert torch.equal(whole["model"][name], other["model"][name]), name
    assert_same(other["plugin"], whole["plugin"])
    finished(tmp_path / "half", *options, "--epochs", 2)
    resumed = finished(tmp_path / "half", *options, "--resume", tmp_path / "half" / "epoch=1.ckpt")
    assert_same(resumed, whole)
