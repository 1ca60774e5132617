"""The examples run as their first lines say, and learn."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_own_model_learns_and_leaves_a_checkpoint(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "checkpoint.pt"
    monkeypatch.setattr(
        sys, "argv", ["train_own_model.py", "--level", level, "--steps", "15", "--save", str(checkpoint)]
    )
    runpy.run_path(str(EXAMPLES / "train_own_model.py"), run_name="__main__")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert losses[-1] < 0.5 * losses[0]
    assert checkpoint.exists()
