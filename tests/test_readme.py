"""The README's Python code runs as pasted, from top to bottom, and its O2 example is at most ten lines long."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_every_python_block_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for block in BLOCKS:
        exec(block, names)  # noqa: S102  # our own text
    with names["amp"].auto_cast(level="O2", dtype="bfloat16"):  # the model still works after the last block
        assert torch.isfinite(names["model"](torch.randn(2, 64))).all()
    assert "op list" in capsys.readouterr().out
    assert isinstance(names["loss"], torch.Tensor)


def test_the_first_block_adds_at_most_ten_lines_to_a_training_script() -> None:
    lines = [
        line for line in BLOCKS[0].splitlines() if line.strip() and not line.startswith(("import torch", "model ="))
    ]
    assert len(lines) <= 10


def test_links_lead_to_files() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (Path(__file__).parent.parent / target).exists(), target
