"""Runs on a cluster and their history; stand-ins for Slurm's commands run each job when it is submitted.

`make test-slurm` tests the queue itself.
"""

import ast
import socket
import sys
from pathlib import Path

import pytest
from tipc_plans import MODE, write_repository

from mezzo.cli import run as command
from mezzo.tipc import RunInfo
from mezzo.tipc.history import DEFAULT, Filter, list_steps
from mezzo.tipc.history._store import read_content

SBATCH = """\
import os, subprocess, sys
options = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:] if "=" in word)
script = sys.stdin.read()
with open({log!r}, "a") as file:
    print(sys.argv[1:], file=file)
for part in options["array"].split(","):
    first, _, last = part.partition("-")
    for task in range(int(first), int(last or first) + 1):
        env = {{**os.environ, "SLURM_ARRAY_TASK_ID": str(task)}}
        subprocess.run(["bash", "-c", script], env=env, cwd=options["chdir"])
print(os.getpid())
"""
ANSWERS = {"sinfo": "4|gpu:a100:0", "scontrol": "MaxArraySize = 1001\nSLURM_VERSION = 9.9", "squeue": "", "scancel": ""}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Commands of a Slurm whose jobs have ended when sbatch returns; returns the file with sbatch's options."""
    folder, log = tmp_path / "bin", tmp_path / "sbatch.log"
    folder.mkdir()
    scripts = {name: f"print({answer!r}, end='')" for name, answer in ANSWERS.items()}
    for name, text in {**scripts, "sbatch": SBATCH.format(log=str(log)), "sacct": "raise SystemExit(1)"}.items():
        (folder / name).write_text(f"#!{sys.executable}\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{Path(sys.executable).parent}:/usr/bin:/bin")
    monkeypatch.setattr("mezzo.tipc._on_slurm._POLL_S", (0.0, 0.0))
    return log


@pytest.fixture(params=["repository"])
def here(tmp_path, monkeypatch, request):
    root = tmp_path / request.param
    root.mkdir()
    monkeypatch.chdir(root)
    write_repository(root)
    (root / "tools/train.py").write_text(TRAIN)
    return root


TRAIN = """\
import sys
from pathlib import Path
folder = next(word for word in sys.argv if word.startswith("--save_dir=")).partition("=")[2]
path = Path(folder, "best_model/model.pdparams")
path.parent.mkdir(parents=True)
path.write_text("weights")
"""
MATRIX = ["tipc", "matrix", "c.txt", "--mode", MODE, "--on", "slurm"]


def test_a_run_on_a_cluster_is_in_the_history_once_with_its_nodes(here, slurm, monkeypatch, capsys):
    monkeypatch.setenv("SBATCH_PARTITION", "fast")
    assert command(MATRIX) == 0, capsys.readouterr().out
    assert command([*MATRIX, "--resume"]) == 0
    first, second = read_content(here / DEFAULT).runs.values()
    info = RunInfo.parse((Path(first.folder) / "run.json").read_text())
    assert info.machine["cluster"].startswith("Slurm 9.9")
    assert first.machine == second.machine == "node of Slurm (partition fast), 4 cores", "not the runner's machine"
    steps = {(run.id, step.step): step for run, step in list_steps(here / DEFAULT, Filter(), 0)[0]}
    steps = {key: step for key, step in steps.items() if step.status == "passed"}
    assert sorted(steps) == [(run, step) for run in (1, 2) for step in ("export-1", "infer-1", "train-1")]
    assert {step.host for step in steps.values()} == {socket.gethostname()}
    assert all(step.resumed == (run == 2) for (run, _), step in steps.items())


def test_a_run_on_a_cluster_without_history(here, slurm):
    assert command([*MATRIX, "--history", "off"]) == 0
    assert not (here / DEFAULT).exists()


@pytest.mark.parametrize("here", ["a\tb\u2028 %j; touch bad; $(touch bad) 'q\"\n#SBATCH --wrap=x"], indirect=True)
def test_the_folder_may_have_any_name(here, slurm):
    assert command(MATRIX) == 0
    assert len(read_content(here / DEFAULT).runs) == 1
    words = [word for line in slurm.read_text().splitlines() for word in ast.literal_eval(line)]
    outputs = {word for word in words if word.startswith("--output=")}
    assert all("%%j" in word and word.endswith("/%A_%a.out") for word in outputs), "only our own patterns count"
    assert not list(here.parent.rglob("bad"))
    assert not list(here.glob("test_tipc/output/mezzo-*")), "nothing was printed, so nothing is left"
