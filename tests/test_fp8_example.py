"""`examples/fp8/transformer.py` learns at every level, and O3 stays close to O2."""

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLE = Path(__file__).parent.parent / "examples" / "fp8" / "transformer.py"
TINY = ["--steps", "12", "--batch-size", "4", "--context", "16", "--width", "16", "--layers", "1", "--device", "cpu"]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs the example as a user does, and gives its file and its last line."""
    torch.set_num_threads(1)  # tensors are tiny: threads would only wait for each other

    def run(*arguments: str) -> tuple[dict[str, Any], str]:
        file = tmp_path / "run.json"
        monkeypatch.setattr(sys, "argv", ["transformer.py", *TINY, *arguments, "--json", str(file)])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        return json.loads(file.read_text(encoding="utf-8")), capsys.readouterr().out.splitlines()[-1]

    return run


def test_o3_learns_as_o2_and_float32_do(trained: Any) -> None:
    losses = {}
    for level in ("fp32", "O1", "O2", "O3"):
        result, line = trained("--level", level, *(["--emulate"] if level == "O3" else []))
        losses[level] = result["losses"]
        assert re.match(rf"{level} bfloat16( \(FP8 emulated\))?: loss ", line)
        assert ("emulated" in line) == (level == "O3")
        assert result["options"]["level"] == level
        assert len(losses[level]) == 12
        assert losses[level][-1] < losses[level][0]
    # Twelve steps from ln 256: an output is off by some 2**-4 of itself, its mean over 64 tokens by far less.
    for level in ("O1", "O2", "O3"):
        assert losses[level] == pytest.approx(losses["fp32"], rel=1e-2)
    assert losses["O3"] != losses["O2"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--scaling", "delayed"),
        ("--granularity", "row"),
        ("--dtype", "float16"),
        ("--graph", "capture"),
    ],
    ids=" ".join,
)
def test_every_choice_of_o3_trains(trained: Any, arguments: tuple[str, ...]) -> None:
    plain, _ = trained("--level", "O3", "--emulate")
    result, _ = trained("--level", "O3", "--emulate", *arguments)
    # Scales are powers of two, and 16 wide few numbers vanish: the choices differ by single roundings.
    assert result["losses"] == pytest.approx(plain["losses"], rel=1e-2)


def test_a_seed_gives_the_same_run_and_another_one_another(trained: Any) -> None:
    first, again, other = (trained("--level", "fp32", "--seed", seed)[0]["losses"] for seed in ("0", "0", "1"))
    assert first == again
    assert first != other


def test_the_network_at_full_size_has_about_100_million_parameters() -> None:
    module = runpy.run_path(str(EXAMPLE))
    with torch.device("meta"):
        model = module["Transformer"](width=1024, layers=8, context=512)
    count = sum(weight.numel() for weight in model.parameters())
    blocks = 8 * (12 * 1024**2 + (3 + 1 + 4 + 1) * 1024 + 4 * 1024)  # four matrices, their biases, two norms
    assert count == blocks + (2 * 256 + 512) * 1024 + 256 + 2 * 1024
    assert count == pytest.approx(100e6, rel=0.03)
