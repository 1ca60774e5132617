"""`--to_static_training`: the training command with a captured step gives what it gives without."""

import re
from pathlib import Path

import pytest
import torch
from small_runs import SCRIPT, losses_of, person_config, train, train_in_process
from test_distributed_run import launch, weights

from graph_backends import skip_without_compiler, use_backend
from mezzo.static import StepReport, _compile, _graph
from mezzo.static._choice import decide
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


@pytest.mark.parametrize("form", ["compiled", "as written"])
def test_a_resumed_run_keeps_the_form_and_repeats_the_unbroken_one(
    form: str, persons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit. Compiled losses are 1.5 times as large here, so a run in the other form differs."""
    monkeypatch.setattr(
        _graph,
        "compile_graph",
        lambda module, *_, **__: lambda *args: [v * 1.5 if v.dim() == 0 else v for v in module(*args)],
    )
    monkeypatch.setattr(_compile, "decide", lambda report: choose(report, form))
    config = person_config(tmp_path, persons, iters=4)
    options = ["--config", config, "--to_static_training", "--log_iters", 1, "--save_interval", 2, "--use_ema"]
    options += ["--precision", "bf16", "--amp_level", "O2", "--learning_rate", 0.001]
    assert train(*options, "--save_dir", tmp_path / "whole") == 0
    assert f"the step runs {form}: " in capsys.readouterr().out
    other = "compiled" if form == "as written" else "as written"
    monkeypatch.setattr(_compile, "decide", lambda report: choose(report, other))
    assert train(*options, "--save_dir", tmp_path / "again", "--resume", tmp_path / "whole" / "iter_2") == 0
    assert f"the step runs {form}: " in capsys.readouterr().out
    assert losses_of(tmp_path / "again") == losses_of(tmp_path / "whole")[2:]
    assert torch.equal(weights(tmp_path / "again", 4), weights(tmp_path / "whole", 4))
    assert train(*options, "--save_dir", tmp_path / "other") == 0
    assert losses_of(tmp_path / "other")[0] != losses_of(tmp_path / "whole")[0], "both forms give the same numbers"


def choose(report: StepReport, form: str) -> None:
    """Decide as if this form were twice as fast as the other one."""
    report.seconds = {name: 1.0 if name == form else 2.0 for name in report.seconds}
    decide(report)


KEEPING = """
import sys, torch
from mezzo.cli import main
from mezzo.static import _graph
from mezzo.vision.train import _engine
_graph._usable = lambda _: "aot_eager"
save = _engine.save_checkpoint
def keep(session, store, progress):
    torch.save(session.model.state_dict(), f"{sys.argv[1]}/rank{session.world.rank}.pt")
    return save(session, store, progress)
_engine.save_checkpoint = keep
main(["train", *sys.argv[2:]])
"""
"""Trains with graphs that are not compiled, and keeps the weights of every process."""


def train_two(out: Path, *options: object) -> str:
    """Train in two processes; return what they printed."""
    out.mkdir()
    script = out / "keeping.py"
    script.write_text(KEEPING)
    common = ["--device", "cpu", "--workers", 0, "--log_iters", 1, "--learning_rate", 0.001, "--save_dir", out / "run"]
    done = launch(2, script, out, *common, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_in_two_processes_the_whole_step_is_captured(persons: Path, tmp_path: Path) -> None:
    """As the eager run with DDP, and both processes have the same weights and buffers."""
    config = person_config(tmp_path, persons, iters=3, batch_size=2)
    options = ["--config", config, "--do_eval", "--use_ema", "--save_interval", 3]
    train_two(tmp_path / "written", *options)
    text = train_two(tmp_path / "captured", *options, "--to_static_training", "--log_ops")
    assert text.count("the step runs compiled: its backend is 'aot_eager'; processes do not measure") == 1
    assert len(re.findall(r"^ *convolution ", text, re.MULTILINE)) == 1  # the operator table, of one process
    states = [torch.load(tmp_path / "captured" / f"rank{rank}.pt") for rank in (0, 1)]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
    written, captured = losses_of(tmp_path / "written" / "run"), losses_of(tmp_path / "captured" / "run")
    assert len(captured) == 3
    # Float32: gradients are averaged in other buckets, and at 64x64 a norm over few values enlarges a rounding.
    assert [loss for _, loss in captured] == pytest.approx([loss for _, loss in written], rel=1e-4)
    mine, theirs = (weights(tmp_path / name / "run", 3) for name in ("captured", "written"))
    assert (mine - theirs).abs().max() < 1e-4


def test_in_two_processes_a_resumed_run_in_half_repeats_the_unbroken_one(persons: Path, tmp_path: Path) -> None:
    config = person_config(tmp_path, persons, iters=4, batch_size=2)
    options = ["--config", config, "--precision", "fp16", "--amp_level", "O2", "--save_interval", 2]
    options += ["--to_static_training"]
    train_two(tmp_path / "whole", *options)
    train_two(tmp_path / "again", *options, "--resume", tmp_path / "whole" / "run" / "iter_2")
    states = [torch.load(tmp_path / "again" / f"rank{rank}.pt") for rank in (0, 1)]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
    assert torch.equal(weights(tmp_path / "again" / "run", 4), weights(tmp_path / "whole" / "run", 4))


def test_with_synchronised_batch_norms_the_forward_alone_is_captured(persons: Path, tmp_path: Path) -> None:
    config = person_config(tmp_path, persons, iters=2, batch_size=2)
    text = train_two(tmp_path / "out", "--config", config, "--to_static_training", "--sync-bn")
    assert "--to_static_training with --sync-bn" in text
    assert "only this pass is captured" in text
    assert "the step runs" not in text
    assert len(losses_of(tmp_path / "out" / "run")) == 2


def test_in_two_processes_the_step_is_compiled(persons: Path, tmp_path: Path) -> None:
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
