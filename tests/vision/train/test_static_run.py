"""`--to_static_training`: the training command with a captured step gives what it gives without."""

from pathlib import Path

import pytest
from small_runs import SCRIPT, losses_of, person_config, train, train_in_process
from test_distributed_run import launch

from graph_backends import skip_without_compiler, use_backend
from mezzo.vision.train import ScalarLog

pytestmark = pytest.mark.slow


def test_a_captured_run_is_the_run_as_written(persons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is fused here; where branches meet, a graph may add their gradients in another order.

    In float32 alone: at 64x64 this network normalises over four values, and what is one rounding in half becomes several
    per cent of the loss in two steps, with or without a graph.
    """
    use_backend(monkeypatch, "aot_eager")
    config = person_config(tmp_path, persons, iters=3)
    for name, more in (("written", []), ("captured", ["--to_static_training"])):
        options = ["--log_iters", 1, "--learning_rate", 0.001, "--save_dir", tmp_path / name]
        assert train("--config", config, *options, *more) == 0
    written, captured = losses_of(tmp_path / "written"), losses_of(tmp_path / "captured")
    assert captured[0] == written[0]
    assert [loss for _, loss in captured] == pytest.approx([loss for _, loss in written], rel=1e-5)


@pytest.mark.parametrize("precision", [["fp32"], ["fp16", "--amp_level", "O2"]])
def test_what_is_watched_comes_out_of_the_captured_step(
    precision: list[str], shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and right guesses of a classifier, bit for bit."""
    use_backend(monkeypatch, "aot_eager")
    points = []
    for name, more in (("written", []), ("captured", ["--to_static_training"])):
        options = ["--data-path", shapes, "--model", "mobilenet_v3_small", "--epochs", 1, "--batch-size", 4]
        options += ["--print-freq", 1, "--output-dir", tmp_path / name, "--lr", 0.01, "--precision", *precision]
        assert train(*options, *more) == 0
        points.append([p for p in ScalarLog.read_file(tmp_path / name) if "top1" in p])
    keys = ("step", "loss", "top1", "top5")
    assert points[0]
    assert [[p.get(k) for k in keys] for p in points[1]] == [[p.get(k) for k in keys] for p in points[0]]


def test_a_compiled_run_is_the_run_as_written_but_for_the_order_of_sums(persons: Path, tmp_path: Path) -> None:
    skip_without_compiler()
    config = person_config(tmp_path, persons, iters=3)
    options = ["--config", config, "--log_iters", 1, "--learning_rate", 0.001]
    for name, more in (("written", []), ("compiled", ["--to_static_training"])):
        done = train_in_process(*options, "--save_dir", tmp_path / name, *more)
        assert done.returncode == 0, done.stderr
    written, compiled = losses_of(tmp_path / "written"), losses_of(tmp_path / "compiled")
    assert len(compiled) == 3
    assert [loss for _, loss in compiled] == pytest.approx([loss for _, loss in written], rel=1e-4)


def test_in_two_processes_the_forward_is_compiled(persons: Path, tmp_path: Path) -> None:
    skip_without_compiler()
    config = person_config(
        tmp_path, persons, iters=2, batch_size=2
    )  # at a third step two values a mean make 1 % of a rounding
    options = [
        SCRIPT,
        "--config",
        config,
        "--device",
        "cpu",
        "--workers",
        0,
        "--log_iters",
        1,
        "--learning_rate",
        0.001,
    ]
    for name, more in (("written", []), ("compiled", ["--to_static_training"])):
        done = launch(2, *options, "--save_dir", tmp_path / name, *more, timeout=500)
        assert done.returncode == 0, done.stderr
    written, compiled = losses_of(tmp_path / "written"), losses_of(tmp_path / "compiled")
    assert len(compiled) == 2
    assert [loss for _, loss in compiled] == pytest.approx([loss for _, loss in written], rel=1e-4)
    assert compiled != written  # sums in another order: the compiler was there
