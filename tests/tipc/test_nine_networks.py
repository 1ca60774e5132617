"""All nine networks through the whole chain on a CPU: mixed training alone and as two processes, export, inference."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mezzo.tipc import load_run

ROOT = Path(__file__).parents[2]
MODE = "lite_train_lite_infer"
AMP = "train_linux_gpu_normal_amp_infer_python_linux_gpu_cpu.txt"
TEXTS = sorted(path.parent.name for path in (ROOT / "test_tipc/configs").glob(f"*/{AMP}"))
# The texts train for 50 steps or 5 epochs; a few show the same of the chain.
SHORTER = {r"(--iters:lite_train_lite_infer)=50": r"\1=4", r"(--epochs:lite_train_lite_infer)=5": r"\1=1"}


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A repository of its own: our scripts and texts, with room for data and results."""
    root = tmp_path_factory.mktemp("repository")
    for name in ("train.py", "tools", "deploy", "src"):
        (root / name).symlink_to(ROOT / name)
    shutil.copytree(
        ROOT / "test_tipc", root / "test_tipc", ignore=shutil.ignore_patterns("output", "data", "lite_cpu.yml")
    )
    for text in (root / "test_tipc/configs").glob("*/*.txt"):
        content = text.read_text()
        for long, short in SHORTER.items():
            content = re.sub(long, short, content)
        text.write_text(content)
    return root


def certified(repository, text):
    """Prepare and run a text by the documented command lines, and return the run."""
    env = {**os.environ, "MEZZO_PYTHON": sys.executable, "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    for script in ("prepare.sh", "test_train_inference_python.sh"):
        command = ["bash", f"test_tipc/{script}", text, MODE]
        done = subprocess.run(command, cwd=repository, env=env, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    page = re.search(r"report: (.*)/report.html", done.stdout)
    return load_run(page[1])


def test_there_are_nine():
    assert len(TEXTS) == 8
    assert (ROOT / "test_tipc/configs/mobilenet_v3_small/train_amp_infer_python.txt").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", [*(f"{name}/{AMP}" for name in TEXTS), "mobilenet_v3_small/train_amp_infer_python.txt"]
)
def test_a_network_goes_all_the_way(text, repository):
    run = certified(repository, f"test_tipc/configs/{text}")
    states = {record.step: (record.status, record.reason) for record in run.records}
    skipped = {name for name, (status, reason) in states.items() if status == "skipped" and reason == "no GPU"}
    assert len(skipped) == 2
    assert {status for name, (status, _) in states.items() if name not in skipped} == {"passed"}
    trained = [record for record in run.records if record.kind == "train"]
    assert "--nproc_per_node=2" in trained[1].command
    assert any("trained as 2 CPU processes" in notice for notice in trained[1].notices)
    inferred = [record for record in run.records if record.kind == "infer" and record.status == "passed"]
    assert len(inferred) == 2
    assert all("Perf info" in run.log_of(record).read_text() for record in inferred)
    assert (run.directory / "report.html").is_file()
