"""Mistakes of users: one clear line, the right exit code, nothing lost."""

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
        (["--config", "a.yml", "--epochs", "3"], "mezzo: --epochs cannot be used with --config: it belongs into the file"),
        (["--config", "a.yml", "--wd", "3"], "mezzo: --wd cannot be used with --config: it belongs into the file"),
        (["--data-path", "a", "--iters", "3"], "mezzo: --iters cannot be used with --data-path"),
        (["--config", "a.yml", "--log_every", "3"], "mezzo: No such option: --log-every"),
        (["--config", "a.yml", "b.c=3"], "mezzo: Invalid value: unexpected argument 'b.c=3'; options begin with --"),
        (["--config", "nowhere.yml"], "nowhere.yml"),
        (["--data-path", "nowhere"], "nowhere"),
        (["--config", "a.yml", "--workers", "-1"], "mezzo: workers=-1: must be at least 0"),
    ],
)  # fmt: skip
def test_options_that_cannot_be(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in complaint(capsys, 2, train(*arguments))


def test_a_batch_larger_than_the_data(persons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = train("--config", person_config(tmp_path, persons), "--batch_size", 13, "--save_dir", tmp_path / "out")
    expected = (
        "the training set has 12 samples, a batch takes 13: there is no full batch; use a batch size of at most 12"
    )
    assert complaint(capsys, 2, code) == f"mezzo: {expected}"
    assert not (tmp_path / "out").exists()


def test_a_corrupt_image(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = next((copied / "Images").glob("train_*"))
    bad.write_bytes(b"no image at all")
    code = train("--config", person_config(tmp_path, copied, batch_size=12), "--save_dir", tmp_path / "out")
    assert complaint(capsys, 2, code) == f"mezzo: {bad}: not an image file"


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
        ([], ["--fsdp"], "--fsdp shares among processes, and there is one: start with torchrun --nproc_per_node=N"),
        (
            {},
            ["--pretrained", "https://x.org/a.pdparams"],
            "weights are not downloaded; fetch the file and give its path",
        ),
        ([], ["--resume_model", "nowhere"], "nowhere"),
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
    assert message in complaint(capsys, 2, train("--config", config, *arguments, "--save_dir", tmp_path / "out"))


def test_resuming_with_another_batch_size(persons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = person_config(tmp_path, persons, iters=2)
    assert train("--config", config, "--save_dir", tmp_path / "out") == 0
    capsys.readouterr()
    code = train(
        "--config", config, "--batch_size", 3, "--save_dir", tmp_path / "out", "--resume_model", tmp_path / "out"
    )
    text = complaint(capsys, 2, code)
    assert "was written by a run with global batch size 4 (now 3); the order of samples would not go on" in text


def test_a_folder_without_weights_cannot_be_evaluated(
    persons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mezzo.cli._app import run

    config = str(person_config(tmp_path, persons))
    code = run(["eval", "--config", config, "--device", "cpu"])
    assert "no weights to evaluate: give --model_path" in complaint(capsys, 2, code)
    code = run(["eval", "--config", config, "--device", "cpu", "--model_path", str(tmp_path)])
    assert "has neither model.safetensors nor model.pdparams" in complaint(capsys, 2, code)


def test_a_setting_without_effect_is_said(persons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = person_config(tmp_path, persons, iters=1)
    assert train("--config", config, "--amp_level", "O2", "--to_static_training", "--save_dir", tmp_path / "out") == 0
    text = capsys.readouterr().out
    assert "--amp_level O2 has no effect at fp32; add --precision fp16 or bf16" in text
    assert "--to_static_training: a step is captured on one GPU only; this run goes on as usual" in text
