"""The examples for Accelerate and the Trainer run as their first lines say, and learn; the benchmark runs too."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.integrations, pytest.mark.slow]


def run(script: str, *options: str) -> str:
    command = [sys.executable, str(ROOT / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_accelerates_loop_learns_rings(tmp_path: Path, dtype: str) -> None:
    pytest.importorskip("accelerate")
    text = run("examples/integrations/accelerate_train.py", "--dtype", dtype, "--save", str(tmp_path / "state"))
    assert (tmp_path / "state" / "model.safetensors").exists()
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]
    assert losses[-1] < 0.5 * losses[0]
    assert f"weights are torch.{dtype}" in text


def test_the_trainer_learns_a_text() -> None:
    pytest.importorskip("transformers")
    text = run("examples/integrations/hf_trainer.py")
    losses = [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", text)]
    assert losses[-1] < 0.5 * losses[0]
    assert "causal_lm_loss" in text
    assert "The Zen of Python" in text


def test_the_benchmark_prints_a_row_per_recipe() -> None:
    pytest.importorskip("transformers")
    text = run("benchmarks/trainer_gpt2.py", "--tiny", "--steps", "10", "--recipes", "stock,o2,o2-fuse")
    rows = [line for line in text.splitlines() if re.match(r"\| (Trainer|mezzo)", line)]
    assert len(rows) == 3
    losses = [float(row.split("|")[-2]) for row in rows]
    assert losses == pytest.approx([losses[0]] * 3, rel=0.01)
