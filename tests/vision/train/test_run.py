"""Training runs from the documented command lines, small, on the CPU."""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from small_runs import losses_of, person_config, train

from mezzo.checkpoint import load_weights
from mezzo.cli import run
from mezzo.precision import Precision
from mezzo.record import operator_log
from mezzo.vision.models import create_model
from mezzo.vision.train import undo_sizes
from mezzo.vision.train.log_lines import SegmentationTrainLine, TrainLine, parse_train_line


def test_segmentation_by_its_document(persons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    config = person_config(tmp_path, persons)
    options = f"--precision fp16 --amp_level O2 --do_eval --save_interval 4 --seed 100 --save_dir {out} --iters 6"
    assert train("--config", config, *options.split(), "--batch_size", 2, "--log_iters", 2) == 0
    text = capsys.readouterr().out
    lines = [line for row in text.splitlines() if isinstance(line := parse_train_line(row), SegmentationTrainLine)]
    assert [(line.epoch, line.step, line.steps) for line in lines] == [(1, 2, 6), (1, 4, 6), (1, 6, 6)]
    # 0.05 * (1 - 5/6)^0.9, as printed
    assert lines[-1].lr == pytest.approx(0.05 * (1 / 6) ** 0.9, abs=1e-6)
    assert text.count("[EVAL] #Images: 4 mIoU: ") == 2
    assert {path.name for path in out.iterdir()} >= {
        "iter_4", "iter_6", "best_model", "latest", "config.yml", "run.json", "scalars.jsonl", "curves.png"
    }  # fmt: skip
    for folder in ("iter_6", "best_model"):
        assert {"model.safetensors", "model.pdparams"} <= {path.name for path in (out / folder).iterdir()}
    assert (out / "latest").read_text().strip() == "iter_6"
    assert yaml.safe_load((out / "config.yml").read_text())["batch_size"] == 2
    facts = json.loads((out / "run.json").read_text())
    assert facts["precision"] == "fp16 O2"
    assert facts["options"]["seed"] == 100
    assert facts["versions"]["torch"] == torch.__version__
    model = create_model("pp_humanseg_lite")
    assert not load_weights(model, out / "best_model" / "model.pdparams").missing


def test_classification_by_its_document(shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = f"--data-path={shapes} --lr=0.1 --batch-size=8 --amp_level=O1 --epochs 2 --image-size 32 --resize-size 32"
    assert train(*options.split(), "--print-freq=3", "--output-dir", tmp_path / "out") == 0
    text = capsys.readouterr().out
    lines = [line for row in text.splitlines() if isinstance(line := parse_train_line(row), TrainLine)]
    assert [(line.epoch, line.step) for line in lines] == [(1, 0), (1, 3), (2, 0), (2, 3)]
    assert lines[0].samples == 8
    assert lines[0].lr == 0.1
    assert text.count("[Eval] top1: ") == 2
    assert json.loads((tmp_path / "out" / "run.json").read_text())["precision"] == "fp16 O1"


@pytest.mark.parametrize("asked", ["option", "environment"])
def test_the_operator_table_shows_what_ran_in_half(
    asked: str, persons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Convolutions compute in float32 between half borders on a CPU without half units; activations show the dtype.
    monkeypatch.setenv("GLOG_v", "5" if asked == "environment" else "0")
    config = person_config(tmp_path, persons, iters=1)
    options = ["--precision", "bf16", "--save_dir", tmp_path / "out", *(["--log-ops"] if asked == "option" else [])]
    operator_log.reset()
    assert train("--config", config, *options) == 0
    text = capsys.readouterr().out
    assert text.count("op list") == 1, "the region of the recorded step prints no table of its own"
    rows = {row.split("|")[0].strip(): row.split("|")[1:] for row in text.splitlines() if "|" in row}
    assert [int(cell) for cell in rows["relu"]] == [0, 31, 0, 0]
    assert int(rows["_log_softmax"][2]) == 1  # the loss is float32


def test_evaluation_repeats_what_training_measured(
    persons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = person_config(tmp_path, persons, iters=3)
    assert train("--config", config, "--do_eval", "--save_dir", tmp_path / "out") == 0
    during = next(row for row in capsys.readouterr().out.splitlines() if "#Images" in row).partition("\t")[2]
    arguments = [
        "eval",
        "--config",
        str(config),
        "--model_path",
        str(tmp_path / "out" / "best_model"),
        "--device",
        "cpu",
    ]
    assert run([*arguments, "--workers", "0"]) == 0
    assert during in capsys.readouterr().out


class Killed(Exception):
    pass


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next run die in the middle of a step."""
    original, seen = Precision.train_step, []

    def dying(*args: Any, **options: Any) -> Any:
        seen.append(1)
        if len(seen) > step:
            raise Killed
        return original(*args, **options)

    monkeypatch.setattr(Precision, "train_step", dying)


@pytest.mark.parametrize("precision", [["fp32"], ["fp16", "--amp_level", "O2", "--use_ema"]])
def test_a_resumed_run_repeats_the_unbroken_one_bit_for_bit(
    precision: list[str], persons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Dropout, flips, momentum, schedule, loss scale, statistics and the average all go on where they were.
    config = person_config(tmp_path, persons)
    options = ["--config", config, "--precision", *precision, "--save_interval", 2, "--log_iters", 1, "--do_eval"]
    assert train(*options, "--save_dir", tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        stop_after(5, patch)
        with pytest.raises(Killed):
            train(*options, "--save_dir", tmp_path / "broken")
    assert train(*options, "--save_dir", tmp_path / "broken", "--resume_model", tmp_path / "broken") == 0
    assert losses_of(tmp_path / "broken") == losses_of(tmp_path / "whole")
    assert len(losses_of(tmp_path / "whole")) == 6
    for name in ("iter_6/model.safetensors", "best_model/model.safetensors", "iter_6/state.safetensors"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_early_stopping_ends_a_run_without_gain(
    persons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = person_config(tmp_path, persons)
    options = ["--do_eval", "--save_interval", 1, "--early_stop_intervals", 2, "--learning_rate", 1e-12]
    assert train("--config", config, *options, "--iters", 6, "--save_dir", tmp_path / "out") == 0
    assert "stopped at iteration 3: no better result in 2 evaluations" in capsys.readouterr().out


def test_older_checkpoints_go(persons: Path, tmp_path: Path) -> None:
    config = person_config(tmp_path, persons)
    options = ["--save_interval", 1, "--keep_checkpoint_max", 2, "--save_dir", tmp_path / "out"]
    assert train("--config", config, *options) == 0
    assert sorted(path.name for path in (tmp_path / "out").glob("iter_*")) == ["iter_5", "iter_6"]


def test_results_of_an_earlier_run_are_put_aside(
    persons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = person_config(tmp_path, persons, iters=2)
    out = tmp_path / "out"
    for _ in range(3):
        assert train("--config", config, "--save_dir", out) == 0
    assert {path.name for path in (out / "previous_2").iterdir()} >= {"iter_2", "latest", "scalars.jsonl", "config.yml"}
    assert (out / "previous_1" / "iter_2").is_dir()
    assert f"results of an earlier run are now in {out / 'previous_2'}" in capsys.readouterr().out
    assert len(losses_of(out)) == 1


def test_padding_of_images_is_undone_before_they_are_compared_with_labels() -> None:
    labels = torch.arange(6 * 9).view(1, 6, 9) % 3
    one_hot = torch.nn.functional.one_hot(labels, 3).movedim(-1, 1).float()
    padded = torch.nn.functional.pad(one_hot, (0, 7, 0, 2))
    assert torch.equal(undo_sizes(padded, [("pad", 6, 9)]).argmax(1), labels)
    larger = torch.nn.functional.interpolate(one_hot, size=(12, 18), mode="nearest")
    both = torch.nn.functional.pad(larger, (0, 3, 0, 5))
    assert torch.equal(undo_sizes(both, [("resize", 6, 9), ("pad", 12, 18)]).argmax(1), labels)


def test_a_failed_evaluation_loses_no_training(
    persons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Path(shutil.copytree(persons, tmp_path / "data"))
    names = (data / "val.txt").read_text().split()
    (data / names[2]).write_bytes(b"no image")  # the second one: the first is looked at when the run starts
    config = person_config(tmp_path, data, iters=2)
    assert train("--config", config, "--do_eval", "--save_dir", tmp_path / "out") == 2
    assert "not an image file" in capsys.readouterr().err
    assert (tmp_path / "out" / "latest").read_text().strip() == "iter_2"


def test_the_average_begins_where_a_run_is_resumed_with_it(
    persons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = person_config(tmp_path, persons)
    options = ["--config", config, "--save_interval", 3, "--do_eval"]
    assert train(*options, "--save_dir", tmp_path / "out") == 0
    again = ["--resume", tmp_path / "out" / "iter_3", "--use_ema", "--save_dir", tmp_path / "again"]
    assert train(*options, *again) == 0
    text = capsys.readouterr().out
    assert "--use_ema: the checkpoint has no average of the weights; averaging starts now" in text
    assert f"{tmp_path / 'again'} has no best_model yet: the next evaluation writes it" in text
    assert (tmp_path / "again" / "best_model").is_dir()
    assert train(*options, "--resume", tmp_path / "again" / "iter_6", "--save_dir", tmp_path / "again") == 0
    assert "the checkpoint has an average of the weights, which is dropped without --use_ema" in capsys.readouterr().out


def test_a_classifier_writes_the_files_that_its_documents_name(shapes: Path, tmp_path: Path) -> None:
    options = ["--batch-size=16", "--epochs", 1, "--image-size", 32, "--resize-size", 32, "--lr", 0.01]
    with contextlib.chdir(shapes.parent):
        (shapes.parent / "lite_data").symlink_to(shapes)  # no --data-path: the usual folder
        assert train(*options, "--amp_level=O2", f"--output-dir={tmp_path / 'out'}") == 0
        weights = tmp_path / "out" / "latest.pdparams"
        assert train(*options[:1], *options[3:7], "--test-only", f"--pretrained={weights}") == 0
    assert (tmp_path / "out" / "best.pdparams").exists()


def test_a_run_that_is_done_says_so(persons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = person_config(tmp_path, persons, iters=2)
    options = ["--config", config, "--save_dir", tmp_path / "out"]
    assert train(*options) == 0
    assert train(*options, "--resume", tmp_path / "out") == 0
    assert "nothing left to train: 2 of 2 iterations are done" in capsys.readouterr().out
