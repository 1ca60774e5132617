"""`mezzo train --wandb`: what Weights & Biases gets, without the package, and with it in offline mode."""

import json
import sys
import types
from pathlib import Path

import pytest
from small_runs import train

OPTIONS = "--precision fp16 --amp_level O2 --epochs 1 --batch-size 8 --image-size 32 --resize-size 32 --print-freq 1"


class FakeRun:
    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []
        self.is_finished = False

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.points.append((step, numbers))

    def finish(self) -> None:
        self.is_finished = True


class FakeError(Exception):
    pass


def fake_wandb(init) -> None:
    """Stand in for the package; the fixture `no_wandb` removes it again."""
    module = types.ModuleType("wandb")
    module.init, module.errors = init, types.SimpleNamespace(Error=FakeError)
    module.__spec__ = types.SimpleNamespace(origin="wandb.py")  # by which `require` finds it
    sys.modules["wandb"] = module


@pytest.fixture
def no_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)


@pytest.mark.usefixtures("no_wandb")
def test_numbers_of_the_log_go_to_wandb_too(shapes: Path, tmp_path: Path) -> None:
    runs: list[FakeRun] = []
    asked: list[dict[str, object]] = []

    def init(**options: object) -> FakeRun:
        asked.append(options)
        runs.append(FakeRun())
        return runs[-1]

    fake_wandb(init)
    out = tmp_path / "out"
    assert train(f"--data-path={shapes}", *OPTIONS.split(), "--save-dir", out, "--wandb") == 0
    (run,) = runs
    assert run.is_finished
    assert asked == [{"dir": out, "name": "out", "config": {"precision": "fp16 O2"}}]
    written = [json.loads(line) for line in (out / "scalars.jsonl").read_text().splitlines()]
    assert written == [{"step": step, **numbers} for step, numbers in run.points]
    trained = [point for point in written if "lr" in point]
    assert all(point["precision/skipped_steps"] == 0 for point in trained)
    assert all(point["precision/loss_scale"] >= 1 for point in trained)


@pytest.mark.usefixtures("no_wandb")
def test_a_run_that_wandb_refuses_ends_with_one_line(
    shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def init(**_: object) -> FakeRun:
        raise FakeError("api_key not configured\n(no-tty)")

    fake_wandb(init)
    assert train(f"--data-path={shapes}", *OPTIONS.split(), "--save-dir", tmp_path / "out", "--wandb") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "--wandb: api_key not configured (no-tty); run `wandb login`, or set WANDB_MODE=offline" in line


def test_a_missing_package_is_one_line_and_exit_code_2(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(path for path in sys.path if not has_wandb(path))])
    (tmp_path / "wandb").mkdir()  # what a run of wandb leaves behind is no package
    assert train(f"--data-path={shapes}", *OPTIONS.split(), "--save-dir", tmp_path / "out", "--wandb") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "this command needs wandb: pip install 'mezzo[wandb]'" in line
    assert not (tmp_path / "out").exists()


def has_wandb(path: str) -> bool:
    return (Path(path) / "wandb" / "__init__.py").exists()


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore")
def test_offline_mode_needs_no_network(shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    out = tmp_path / "out"
    assert train(f"--data-path={shapes}", *OPTIONS.split(), "--save-dir", out, "--wandb") == 0
    (folder,) = (out / "wandb").glob("offline-run-*")
    assert next(folder.glob("*.wandb")).stat().st_size > 0
