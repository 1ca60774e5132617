"""The examples folder: each program is in its README, short if it is an introduction, and runs without arguments."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
PARTS = {"dynamic/simple_net.py", "static/simple_net.py", "llama/model.py"}
"""Modules that programs import."""
PROGRAMS = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.py"))
PROGRAMS = [name for name in PROGRAMS if name not in PARTS]
LARGE = {"llama/train.py", "fp8/transformer.py"}
NEEDS = {
    "hf_text.py": ("transformers",),
    "integrations/hf_trainer.py": ("transformers", "accelerate"),
    "integrations/accelerate_train.py": ("accelerate",),
    "integrations/lightning_digits.py": ("lightning",),
    "integrations/timm_train.py": ("timm",),
}


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in LARGE])
def test_an_introduction_has_less_than_100_lines(name: str) -> None:
    assert len((FOLDER / name).read_text(encoding="utf-8").splitlines()) < 100


def test_the_readme_lists_every_program_and_notebook() -> None:
    listed = set(re.findall(r"\]\(([\w/]+\.(?:py|ipynb))\)", (FOLDER / "README.md").read_text(encoding="utf-8")))
    notebooks = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.ipynb")}
    assert listed == {*PROGRAMS, *notebooks}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_without_arguments_in_less_than_a_minute(name: str, tmp_path: Path) -> None:
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package, reason=f"needs {package}: pip install {package}")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(FOLDER / name)]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert re.search(r"loss|accuracy|op list", ended.stdout), ended.stdout[-3000:]
