"""Mistakes of users: one clear line, the right exit code, nothing lost."""

import importlib.util
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from small_runs import person_config, train


@pytest.fixture
def copied(persons: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(persons, tmp_path / "data"))


def complaint(capsys: pytest.CaptureFixture[str], expected_code: int, code: int) -> str:
    assert code == expected_code
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "mezzo: neither of --config and --data-path: give --config FILE.yml to train by a configuration, or "
             "--data-path DIR to train a classifier on a folder of images"),
        (["--config", "a.yml", "--data-path", "b"], "mezzo: both of --config and --data-path: give"),
        (["--config", "a.yml", "--epochs", "3"], "mezzo: --epochs cannot be used with --config"),
        (["--config", "a.yml", "--wd", "3"], "mezzo: --wd cannot be used with --config"),
        (["--data-path", "a", "--iters", "3"], "mezzo: --iters cannot be used with --data-path"),
        (["--config", "a.yml", "--log_every", "3"], "mezzo: No such option: --log-every"),
        (["--config", "a.yml", "b.c=3"], "(b.c=3)"),
        (["--config", "a.yml", "--wd", "0"], "mezzo: --wd cannot be used with --config"),
        (["--config", "nowhere.yml"], "nowhere.yml"),
        (["--data-path", "nowhere"], "nowhere"),
        (["--config", "a.yml", "--workers", "-1"], "mezzo: workers=-1: must be at least 0"),
    ],
)  # fmt: skip
def test_options_that_cannot_be(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in complaint(capsys, 2, train(*arguments))


def test_a_corrupt_image(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = next((copied / "Images").glob("train_*"))
    bad.write_bytes(b"no image at all")
    code = train("--config", person_config(tmp_path, copied, batch_size=12), "--save_dir", tmp_path / "out")
    assert complaint(capsys, 2, code) == f"mezzo: {bad}: not an image file (allowed: JPEG, PNG, BMP, WEBP, TIFF)"


def test_a_label_out_of_range(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = next((copied / "Annotations").glob("train_*"))
    Image.fromarray(np.full((64, 64), 7, np.uint8)).save(bad)
    code = train("--config", person_config(tmp_path, copied, batch_size=12), "--save_dir", tmp_path / "out")
    text = complaint(capsys, 2, code)
    assert str(bad) in text
    assert "7" in text


def test_an_empty_list(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copied / "train.txt").write_text("\n")
    code = train("--config", person_config(tmp_path, copied), "--save_dir", tmp_path / "out")
    assert str(copied / "train.txt") in complaint(capsys, 2, code)


def test_a_loss_that_is_not_finite(persons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = person_config(tmp_path, persons, batch_size=6)
    options = ["--learning_rate", 1e30, "--log_iters", 3, "--save_interval", 1000, "--iters", 6]
    text = complaint(capsys, 1, train("--config", config, *options, "--save_dir", tmp_path / "out"))
    assert text.startswith("mezzo: the loss is not finite at iteration 2 (batch: ")
    assert text.count(".png") == 4
    assert " and 2 more); lower the learning rate, or look at these files; the checkpoints before it are kept" in text


@pytest.mark.parametrize(
    ("without", "arguments", "message"),
    [
        (["val_dataset"], ["--do_eval"], "the recipe has no val_dataset: there is nothing to evaluate on"),
        (["train_dataset"], [], "the recipe has no train_dataset: there is nothing to train on"),
        ([], ["--precision", "fp8"], "unknown precision 'fp8'; allowed: fp32, fp16, bf16"),
        ([], ["--fsdp"], "--fsdp needs several processes, this run has one: start with torchrun --nproc_per_node=N"),
        ([], ["--resume_model", "nowhere"], "nowhere"),
        ([], ["--seed", "99999999999999999999"], "seed=99999999999999999999: must be below 2**63"),
        ([], ["--save_dir", "/proc/nope"], "/proc/nope"),
    ],
)
def test_runs_that_cannot_start(
    without: list[str],
    arguments: list[str],
    message: str,
    persons: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = person_config(tmp_path, persons)
    tree = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump({key: value for key, value in tree.items() if key not in without}))
    code = train("--config", config, "--save_dir", tmp_path / "out", *arguments)
    assert message in complaint(capsys, 1 if "/proc/nope" in arguments else 2, code)


def test_weights_by_url_without_a_network(
    persons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEZZO_OFFLINE", "1")
    monkeypatch.setenv("MEZZO_HOME", str(tmp_path / "home"))
    arguments = ["--pretrained", "https://x.org/a.pdparams", "--save_dir", tmp_path / "out"]
    text = complaint(capsys, 1, train("--config", person_config(tmp_path, persons), *arguments))
    place = tmp_path / "home/weights/x.org/a.pdparams"
    assert "https://x.org/a.pdparams: MEZZO_OFFLINE is set" in text
    assert text.endswith(f"put it at {place}")  # an option that can be left out needs no other advice


def test_resuming_with_another_batch_size(persons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = person_config(tmp_path, persons, iters=2)
    assert train("--config", config, "--save_dir", tmp_path / "out") == 0
    capsys.readouterr()
    code = train(
        "--config", config, "--batch_size", 3, "--save_dir", tmp_path / "out", "--resume_model", tmp_path / "out"
    )
    text = complaint(capsys, 2, code)
    assert "was written by a run with global batch size 4 (now 3); the order of samples would differ" in text


def test_a_folder_without_weights_cannot_be_evaluated(
    persons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mezzo.cli import run

    config = str(person_config(tmp_path, persons))
    code = run(["eval", "--config", config, "--device", "cpu"])
    assert "no weights to evaluate: give --model_path" in complaint(capsys, 2, code)
    code = run(["eval", "--config", config, "--device", "cpu", "--model_path", str(tmp_path)])
    assert "no weights in it (model.safetensors, model.pdparams); give a file" in complaint(capsys, 2, code)


def test_a_setting_without_effect_is_said(persons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = person_config(tmp_path, persons, iters=1)
    assert train("--config", config, "--amp_level", "O2", "--save_dir", tmp_path / "out") == 0
    text = capsys.readouterr().out
    assert "--amp_level O2 has no effect at fp32; add --precision fp16 or bf16" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--early_stop_intervals", 2], "--early_stop_intervals has no effect without --do_eval"),
        (["--sync-bn"], "--sync-bn has no effect in one process"),
        (
            ["--precision", "fp16", "--amp_level", "O0"],
            "--precision fp16 has no effect at --amp_level O0; use OD, O1, O2 or O3",
        ),
    ],
)
def test_every_option_without_effect_is_said(
    options: list[object], message: str, persons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = person_config(tmp_path, persons, iters=1)
    assert train("--config", config, *options, "--save_dir", tmp_path / "out") == 0
    assert message in capsys.readouterr().out


def test_resuming_what_cannot_be_resumed(persons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = person_config(tmp_path, persons, iters=2)
    assert train("--config", config, "--do_eval", "--save_dir", tmp_path / "out") == 0
    capsys.readouterr()
    best = tmp_path / "out" / "best_model"
    code = train("--config", config, "--save_dir", tmp_path / "out", "--resume", best)
    expected = f"{best}: holds weights only, nothing to resume; start from them with --pretrained {best}"
    assert expected in complaint(capsys, 2, code)
    options = ["--opts", "optimizer={type: adam}", "--save_dir", tmp_path / "out", "--resume", tmp_path / "out"]
    assert "a run with optimizer SGD (now Adam)" in complaint(capsys, 2, train("--config", config, *options))


def test_a_batch_that_cannot_be_normalised(shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--data-path", shapes, "--batch-size", 1, "--image-size", 32, "--output-dir", tmp_path / "out"]
    text = complaint(capsys, 2, train(*options))
    assert "a batch norm of this network saw a single value: a batch of 1 is too small for images of this size" in text


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    text = complaint(capsys, 2, train("--config", "a.yml"))
    assert text == "mezzo: this command needs opencv-python-headless, Pillow, safetensors: pip install 'mezzo[vision]'"


def test_a_loss_scale_that_ends_at_its_floor(persons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = person_config(tmp_path, persons)
    options = ["--learning_rate", 1e30, "--precision", "fp16", "--amp_level", "O2", "--iters", 400, "--log_iters", 20]
    text = complaint(capsys, 1, train("--config", config, *options, "--save_dir", tmp_path / "out"))
    assert "loss scal" in text
