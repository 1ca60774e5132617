"""The guide's 2.2 program, translated: it learns at every level, and proves its precision."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from mezzo.export import load_program

PROGRAM = Path(__file__).parents[2] / "examples" / "high_level.py"


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_the_guides_program_learns_digits(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["high_level.py", "--level", level, "--save", str(tmp_path / "digits")])
    names = runpy.run_path(str(PROGRAM), run_name="__main__")
    found = re.search(r"accuracy: ([\d.]+) on 297 samples", capsys.readouterr().out)
    assert found is not None
    assert float(found[1]) >= 0.85
    _, eval_data = names["digits"]()
    images, labels = eval_data[:]
    exported = load_program(tmp_path / "digits_forward.pt2", keep_sizes=True).module()
    agreement = (exported(images).argmax(1) == labels).float().mean().item()
    assert agreement == pytest.approx(float(found[1]), abs=0.005)  # half and float32 may differ on a sample or two


def test_bfloat16_learns_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["high_level.py", "--level", "O2", "--dtype", "bfloat16"])
    runpy.run_path(str(PROGRAM), run_name="__main__")
    assert float(re.search(r"accuracy: ([\d.]+)", capsys.readouterr().out)[1]) >= 0.85


def test_levels_give_other_weights() -> None:
    """The level is not just a word: half rounds what float32 does not."""
    from torch import nn

    import mezzo

    weights = {}
    for level in ("O0", "O1", "O2"):
        torch.manual_seed(0)
        model = mezzo.Model(nn.Linear(8, 4), device="cpu")
        model.prepare(torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), amp_configs=level)
        model.train_batch(torch.randn(16, 8), torch.randint(4, (16,)))
        weights[level] = model.network.state_dict()["weight"]
    assert not torch.equal(weights["O0"], weights["O1"])
    torch.testing.assert_close(weights["O0"], weights["O2"], atol=1e-3, rtol=0)  # 2**-11 of gradients below 1, times lr
