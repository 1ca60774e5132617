"""The examples and the benchmark of the integrations run, small, and learn."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integrations

ROOT = Path(__file__).parents[2]


def run(script: str, *options: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_lightning_example_learns(dtype):
    pytest.importorskip("lightning_utilities")
    text = run("examples/integrations/lightning_digits.py", "--dtype", dtype, "--epochs", "2")
    assert float(re.search(r"accuracy ([\d.]+)", text)[1]) > 0.95
    assert f"weights torch.{dtype}, checkpoint torch.float32" in text


def test_the_timm_example_learns_and_resumes(tmp_path):
    pytest.importorskip("timm")
    options = ("--clip-mode", "agc", "--clip-grad", "0.02")
    whole = run("examples/integrations/timm_train.py", *options, "--epochs", "3", "--output", str(tmp_path / "a"))
    run("examples/integrations/timm_train.py", *options, "--epochs", "2", "--output", str(tmp_path / "b"))
    checkpoint = str(tmp_path / "b" / "last.pth.tar")
    resumed = run("examples/integrations/timm_train.py", *options, "--epochs", "3", "--resume", checkpoint)
    assert resumed.splitlines()[-1] == whole.splitlines()[-1]  # the loss, and the accuracy of the average
    assert float(re.findall(r"loss ([\d.]+)", whole)[-1]) < 0.5


def test_the_benchmark_measures_both_sides(tmp_path):
    pytest.importorskip("lightning_utilities")
    pytest.importorskip("transformers")
    path = tmp_path / "rows.json"
    text = run(
        "benchmarks/lightning_gpt2.py", "--tiny", "--steps", "4", "--rows", "stock,mezzo-fuse", "--json", str(path)
    )
    stock, own = json.loads(path.read_text())
    assert own["first_loss"] == pytest.approx(stock["first_loss"], abs=0.01)  # bfloat16, the same weights
    assert own["loss"] == pytest.approx(stock["loss"], abs=0.02)  # bfloat16, four steps
    assert own["fused_parts"] > 0
    assert text.count("x |") == 2
