"""`benchmarks/llm_loss.py` finds its text, judges as it says, and trains all its runs."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "llm_loss.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("llm_loss_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def curves(script: ModuleType, o2: float, o3: float) -> dict[str, list[float]]:
    """Return flat curves: stock at 4.0, 4.1 and 4.2, O2 and O3 as given."""
    ends = {"autocast": [4.0, 4.1, 4.2], "O2": [o2], "O3": [o3]}
    return {run.name: [ends[run.level][run.seed]] * 25 for run in script.RUNS}


@pytest.mark.parametrize(
    ("o2", "o3", "verdicts"),
    [(4.1, 4.1, [True, True]), (4.3, 4.31, [False, True]), (4.0, 4.05, [True, False]), (4.0, 3.95, [True, False])],
)
def test_claims_follow_from_the_curves(script: ModuleType, o2: float, o3: float, verdicts: list[bool]) -> None:
    assert [holds for _, holds in script.judge(curves(script, o2, o3))] == verdicts


def test_the_text_is_the_same_at_each_call_and_no_longer_than_asked(script: ModuleType) -> None:
    text = script.documentation(20_000)
    assert text == script.documentation(20_000)
    assert len(text) == 20_000
    assert len(script.documentation(5_000)) == 5_000


def test_too_few_steps_for_a_mean_are_refused(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        script.parse(["--steps", "3"])
    assert "--steps 3: must be at least 20" in capsys.readouterr().err


@pytest.mark.slow
def test_all_runs_train_and_their_curves_are_written(script: ModuleType, tmp_path: Path) -> None:
    words = ["--size", "tiny", "--steps", "2", "--length", "32", "--most-mb", "1", "--words", "300", "--device", "cpu"]
    command = [sys.executable, str(SCRIPT), *words, "--batch-size", "2", "--json", str(tmp_path / "losses.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "losses.json").read_text())
    assert sorted(found["curves"]) == sorted(run.name for run in script.RUNS)
    assert all(len(losses) == 2 for losses in found["curves"].values())
    assert len(found["text_sha256"]) == 64
