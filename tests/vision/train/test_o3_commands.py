"""`--amp_level O3` of the training commands, and level O3 of `amp_configs`."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import losses_of, train
from torch import nn

from mezzo import Model
from mezzo.amp import Fp8Recipe, explain, fp8_scales
from mezzo.checkpoint import CheckpointError, read_state
from mezzo.cli import run
from mezzo.model.parallel import World
from mezzo.model.precision import make_precision
from mezzo.vision.recipes import ClassifierOptions, classification_recipe
from mezzo.vision.train import OptionError, RunOptions
from mezzo.vision.train.session import open_session

EMULATED = "emulate,min_width=0,min_size=0"
SETTINGS = {"emulate": True, "min_width": 0, "min_size": 0}


def four_layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


def fp8_layers(model: nn.Module, precision: Any) -> list[str]:
    return [row.name for row in explain(model, precision.policy).rows if row.why_half == ""]


@pytest.mark.parametrize(
    ("lists", "in_fp8"),
    [
        (None, ["1", "2"]),
        ("half_layers: ['2']", ["1"]),  # besides the first and the last
        ("half_layers: []", ["1", "2"]),
        ("excluded_layers: ['1']", ["2"]),
        ("custom_black_list: [linear]", []),
    ],
)
@pytest.mark.parametrize("is_training", [True, False])
def test_a_list_file_says_which_layers_stay_in_half(
    lists: str | None, in_fp8: list[str], is_training: bool, tmp_path: Path
) -> None:
    path = None if lists is None else tmp_path / "lists.yml"
    if path is not None and lists is not None:
        path.write_text(lists)
    precision, model = make_precision("bf16", "O3", lists=path, fp8=SETTINGS), four_layers()
    assert precision.name == "bf16 O3"
    if is_training:
        precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert model[0].weight.dtype is torch.bfloat16
    else:
        precision.prepare_for_evaluation(model)
    assert fp8_layers(model, precision) == in_fp8


def test_half_layers_that_do_not_fit_are_named_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "lists.yml"
    path.write_text("half_layers: [hed]")
    with pytest.raises(ValueError, match=r"lists\.yml: half_layers .* O3"):
        make_precision("bf16", "O2", lists=path)
    precision = make_precision("bf16", "O3", lists=path, fp8=SETTINGS)
    for prepare in (precision.prepare, precision.prepare_for_evaluation):
        model = four_layers()
        with pytest.raises(ValueError, match=r"lists\.yml: half_layers: no module is named 'hed'"):
            prepare(model)
        assert model[0].weight.dtype is torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"amp_level": "O2", "fp8": {}}, "fp8 with amp_level=O2"),
        ({"fp8": {}}, "fp8 with amp_level=None"),
    ],
)
def test_options_that_do_not_go_with_o3_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        RunOptions(precision="bf16", **options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--amp-level", "O3"], "--amp_level O3: a CPU has no FP8 products; --fp8 emulate computes the same numbers"),
        (["--amp-level", "O3", "--fp8", "emulat"], "fp8: unknown setting 'emulat'; did you mean 'emulate'?"),
        (["--amp-level", "O3", "--fp8", "gradient=e3m4"], "Fp8Recipe: unknown gradient 'e3m4'"),
        (["--amp-level", "O3", "--fp8", "min_size=-1"], "Fp8Recipe: min_size=-1: must be a whole number, 0 or more"),
        (["--amp-level", "O2", "--fp8", "emulate"], "fp8 with amp_level=O2"),
        (["--amp-level", "O4"], "unknown amp_level 'O4'; allowed: O0, OD, O1, O2, O3"),
    ],
)
@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_wrong_option_is_one_line_and_2(
    command: str,
    given: list[str],
    message: str,
    shapes: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = [command, "--device", "cpu", "--workers", "0", "--data-path", str(shapes), "--precision", "bf16", *given]
    assert run(asked) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"mezzo: {message}")
    assert err.count("\n") == 1
    assert not (tmp_path / "output").exists()


def test_a_session_at_o3_says_which_layers_are_fp8(shapes: Path, tmp_path: Path) -> None:
    options = RunOptions(precision="bf16", amp_level="O3", fp8=SETTINGS, workers=0, save_dir=tmp_path / "out")
    session = open_session(
        classification_recipe(ClassifierOptions(data_path=shapes, batch_size=4)),
        options,
        World(rank=0, size=1, device=torch.device("cpu")),
    )
    session.loader.close()
    # the first layer of the network is a convolution
    notice = r"O3: 1 of 2 linear layers are FP8; classifier\.3: kept in half"
    assert [line for line in session.notices if re.fullmatch(notice, line)]
    assert session.model.get_submodule("classifier.0").weight.dtype is torch.bfloat16


@pytest.mark.slow
def test_a_classifier_trains_and_is_evaluated_at_o3(
    shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ["--image-size", 32, "--resize-size", 32, "--batch-size", 16]
    level = ["--amp_level", "O3", "--precision", "bf16", "--fp8", EMULATED]
    given = ["--data-path", shapes, *size, *level, "--epochs", 1, "--print-freq", 1]
    assert train(*given, "--output-dir", tmp_path / "out") == 0
    assert "O3: 1 of 2 linear layers are FP8; classifier.3: kept in half\n" in capsys.readouterr().out
    assert all(np.isfinite(loss) for _, loss in losses_of(tmp_path / "out"))
    weights = sorted((tmp_path / "out").glob("iter_*"))[-1]
    asked = ["eval", "--device", "cpu", "--workers", 0, "--data-path", shapes, "--model-path", weights, *size, *level]
    assert run([str(word) for word in asked]) == 0


# ---------------------------------------------------------------------------------------------- amp_configs


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_model_trains_at_o3(dtype: str) -> None:
    model = Model(four_layers(), device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.prepare(optimizer, nn.MSELoss(), amp_configs={"level": "O3", "dtype": dtype, "fp8": SETTINGS})
    assert model.network[0].weight.dtype is getattr(torch, dtype)
    assert fp8_layers(model.network, model.precision) == ["1", "2"]
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((32, 16), dtype=np.float32), rng.standard_normal((32, 16), dtype=np.float32)
    losses = [model.train_batch(x, y)[0] for _ in range(5)]
    assert losses[-1] < losses[0]
    assert {value.dtype for value in model.network.state_dict().values()} == {torch.float32}


def test_a_model_goes_on_from_the_disk_with_its_delayed_scales(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((32, 16), dtype=np.float32), rng.standard_normal((32, 16), dtype=np.float32)
    configs = {"level": "O3", "dtype": "bfloat16", "fp8": {**SETTINGS, "scaling": "delayed"}}
    torch.manual_seed(0)
    models = [Model(four_layers(), device="cpu") for _ in range(2)]
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        model.prepare(optimizer, nn.MSELoss(), amp_configs=configs)
    first, second = models
    for factor in (64, 1):  # the scales of the next calls leave room for the large one
        first.train_batch(factor * x, y)
    first.save(tmp_path / "net")
    second.load(tmp_path / "net")
    assert fp8_scales(second.network).keys() == {"1.weight", "2.weight"}
    assert [second.train_batch(x, y)[0] for _ in range(3)] == [first.train_batch(x, y)[0] for _ in range(3)]


def test_damaged_scales_are_refused_with_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(four_layers(), device="cpu")
    configs = {"level": "O3", "dtype": "bfloat16", "fp8": {**SETTINGS, "scaling": "delayed"}}
    model.prepare(torch.optim.SGD(model.parameters(), lr=0.01), nn.MSELoss(), amp_configs=configs)
    monkeypatch.setattr("mezzo.precision.fp8_scales", lambda network: {"1.weight": {"input": torch.ones(2, 2)}})
    model.save(tmp_path / "net")
    with pytest.raises(CheckpointError, match=r"net: .*FP8 scales: .*'1\.weight'"):
        model.load(tmp_path / "net")


@pytest.mark.slow
def test_a_resumed_run_at_o3_repeats_the_unbroken_one(shapes: Path, tmp_path: Path) -> None:
    size = ["--image-size", 32, "--resize-size", 32, "--batch-size", 16, "--epochs", 2, "--print-freq", 1]
    level = ["--amp_level", "O3", "--precision", "bf16", "--fp8", f"{EMULATED},scaling=delayed"]
    given = ["--data-path", shapes, *size, *level, "--save-interval", 1]
    assert train(*given, "--output-dir", tmp_path / "whole") == 0
    folders = sorted((tmp_path / "whole").glob("iter_*"), key=lambda path: int(path.name.removeprefix("iter_")))
    middle = folders[len(folders) // 2 - 1]
    assert read_state(middle)["precision"]["fp8_scales"].keys() == {"classifier.0.weight"}
    assert train(*given, "--output-dir", tmp_path / "again", "--resume", middle) == 0
    after = int(middle.name.removeprefix("iter_"))
    whole = [point for point in losses_of(tmp_path / "whole") if point[0] > after]
    assert whole
    assert losses_of(tmp_path / "again") == whole
    then, now = (
        read_state(run / folders[-1].name)["precision"]["fp8_scales"]
        for run in (tmp_path / "whole", tmp_path / "again")
    )
    for role, amaxes in then["classifier.0.weight"].items():
        assert torch.equal(now["classifier.0.weight"][role], amaxes)  # calls before the break are among them


def test_amp_configs_takes_a_recipe_or_its_settings() -> None:
    for fp8 in (SETTINGS, Fp8Recipe(**SETTINGS)):
        model = Model(four_layers(), device="cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.prepare(optimizer, nn.MSELoss(), amp_configs={"level": "O3", "dtype": "bfloat16", "fp8": fp8})
        assert model.precision.name == "bf16 O3"
        assert model.precision.policy is not None
        assert model.precision.policy.fp8 == Fp8Recipe(**SETTINGS)


@pytest.mark.parametrize(
    ("amp_configs", "error", "message"),
    [
        ("O3", RuntimeError, "level O3: a CPU has no FP8 products"),
        ({"level": "O2", "fp8": SETTINGS}, ValueError, "amp_configs: fp8 with level='O2'"),
        ({"level": "O3", "fp8": {"emulat": 1}}, ValueError, "amp_configs: fp8: unknown setting 'emulat'; did you mean"),
        (
            {"level": "O3", "fp8": "emulate"},
            TypeError,
            "amp_configs: fp8='emulate': must be an Fp8Recipe, or a mapping",
        ),
    ],
)
def test_a_wrong_o3_fails_in_prepare_and_changes_nothing(amp_configs: Any, error: type, message: str) -> None:
    model = Model(four_layers(), device="cpu")
    with pytest.raises(error, match=re.escape(message)):
        model.prepare(torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), amp_configs=amp_configs)
    assert model.network[0].weight.dtype is torch.float32
