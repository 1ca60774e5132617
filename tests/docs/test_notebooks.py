"""The notebooks run from top to bottom, with small settings, and keep outputs of a real run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from doc_pages import ROOT

FOLDER = ROOT / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SMALL = {"STEPS": 3, "WIDTH": 32, "BACKEND": "aot_eager"}
"""Instead of the values in cells with the tag 'parameters'."""
LARGEST = 100_000
"""Bytes of a file: outputs are text, and a reader of a diff must be able to read them."""


def cells(path: Path) -> list[dict[str, Any]]:
    """Return the code cells, with their source as one string."""
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [{**cell, "source": "".join(cell["source"])} for cell in found if cell["cell_type"] == "code"]


def run(path: Path) -> dict[str, Any]:
    """Run a notebook in one namespace; return the names that it leaves."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells(path)):
        exec(compile(cell["source"], f"{path.name}, code cell {number}", "exec"), names)  # noqa: S102  # our own text
        if "parameters" in cell["metadata"].get("tags", ()):
            names.update({name: SMALL[name] for name in SMALL if name in names})
    return names


def shown(path: Path) -> str:
    """Return all text that a notebook keeps as output."""
    outputs = [output for cell in cells(path) for output in cell["outputs"]]
    return "".join("".join(output.get("text", ())) for output in outputs)


def test_your_own_model_ends_with_the_sensitive_layer_in_float32(capsys: pytest.CaptureFixture[str]) -> None:
    names = run(FOLDER / "own_model.ipynb")
    printed = capsys.readouterr().out
    assert re.search(r"float16, O2 +first loss nan", printed)
    assert names["found"].kept == ("energy",)
    assert names["loss"].isfinite()
    assert names["model"].encoder.weight.dtype is torch.float16
    assert "op list" in printed


def test_why_not_faster_finds_the_faults_of_its_model(capsys: pytest.CaptureFixture[str]) -> None:
    names = run(FOLDER / "why_not_faster.ipynb")
    printed = capsys.readouterr().out
    assert "gate: mul returns float32" in printed
    assert "0 leaks" in printed
    assert {"leak", "shape"} <= {advice.kind for advice in names["report"].advices}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_outputs_are_those_of_one_complete_run(path: Path) -> None:
    code = cells(path)
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), "run make notebooks"
    kinds = {output["output_type"] for cell in code for output in cell["outputs"]}
    assert kinds == {"stream", "execute_result"}, "an error, or a picture"
    for cell in code:
        assert cell["outputs"] or "print(" not in cell["source"], cell["source"]
    assert path.stat().st_size < LARGEST
    assert not re.search(r"(?<![\w.])/\w+/\w", shown(path)), "a path of the machine"


def test_the_numbers_that_the_text_speaks_of_are_shown() -> None:
    text = shown(FOLDER / "own_model.ipynb")
    losses = {name: float(loss) for name, loss in re.findall(r"^(\S+(?: O\d)?) .*last loss ([\d.]+)$", text, re.M)}
    assert losses["bfloat16, O2"] == pytest.approx(losses["float32"], abs=0.01)  # 8 bits, 40 steps, 256 samples
    assert "must stay in float32: energy" in text
