"""The examples run as their first lines say, and learn."""

import re
import runpy
import sys
from collections.abc import Callable
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


@pytest.fixture
def static_loss(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], tuple[float, str]]:
    """Return a function that runs a program of examples/static, small, and gives its loss and what it printed."""
    from mezzo import static

    def run(name: str) -> tuple[float, str]:
        small = [
            "--size",
            "64",
            "--batch-size",
            "32",
            "--steps",
            "5",
            "--backend",
            "aot_eager",
            "--cpu-compute",
            "native",
        ]
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--device", "cpu", *small])
        monkeypatch.syspath_prepend(str(EXAMPLES / "static"))
        try:
            with static.program_guard(static.Program()):
                runpy.run_path(str(EXAMPLES / "static" / f"{name}.py"), run_name="__main__")
        finally:
            static.disable_static()
            sys.modules.pop("simple_net", None)
        text = capsys.readouterr().out
        found = re.search(r"loss: ([\d.]+) float32", text)
        assert found is not None, "the loss is float32 at every level"
        return float(found[1]), text

    return run


def test_the_static_programs_agree_and_show_their_dtypes(static_loss: Callable[[str], tuple[float, str]]) -> None:
    losses, texts = {}, {}
    for name in ("fp32", "o1", "o2", "o2_guard"):
        losses[name], texts[name] = static_loss(name)
        assert losses[name] == pytest.approx(losses["fp32"], abs=1e-4)
    assert texts["fp32"].count("0 in float16, 1 in float32") == 9
    assert texts["o1"].count("1 in float16, 0 in float32") == 9
    assert texts["o2"].count("1 in float16, 0 in float32") == 9
    assert "linears.0: 0 in float16, 1 in float32" in texts["o2_guard"]
    assert texts["o2_guard"].count("1 in float16, 0 in float32") == 8
