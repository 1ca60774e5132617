"""`--amp-lists`: the training command keeps in float32 what a list file says, as written and captured."""

import math
from pathlib import Path

import pytest
import torch
from small_runs import losses_of, person_config, train
from torch import Tensor, nn

from graph_backends import use_backend
from mezzo.amp import Policy
from mezzo.cli import run
from mezzo.model.parallel import World
from mezzo.model.precision import make_precision
from mezzo.proof import bisect
from mezzo.vision.recipes import ClassifierOptions, Recipe, classification_recipe, load_recipe
from mezzo.vision.train import OptionError, RunOptions
from mezzo.vision.train.session import open_session


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    path = tmp_path / "fp32.yml"
    path.write_text("custom_black_list: [hardswish]\nexcluded_layers: [classifier]\n")
    return path


def test_the_lists_of_the_file_are_added_to_those_of_the_task(tmp_path: Path) -> None:
    path = tmp_path / "lists.yml"
    path.write_text("custom_white_list: [softmax]\ncustom_black_list: [conv2d.depthwise]\n")
    policy = make_precision("fp16", "O1", "segmentation", path).policy
    assert policy == Policy.create(
        "O1",
        custom_white_list=["elementwise_add", "batch_norm", "softmax"],
        custom_black_list=["bilinear_interp_v2", "conv2d.depthwise"],
    )
    assert make_precision("fp16", "O1", "classification", path).policy == Policy.create(
        "O1", custom_white_list=["softmax"], custom_black_list=["conv2d.depthwise"]
    )


def test_where_task_and_file_contradict_the_file_decides(tmp_path: Path) -> None:
    path = tmp_path / "lists.yml"
    path.write_text("custom_white_list: [upsample_bilinear2d]\ncustom_black_list: [add]\n")
    policy = make_precision("bf16", "O2", "segmentation", path).policy
    assert policy is not None
    assert {"upsample_bilinear2d", "batch_norm"} <= policy.white
    assert {"add", "_upsample_bilinear2d_aa"} <= policy.black
    assert "add" not in policy.white
    assert "upsample_bilinear2d" not in policy.black


@pytest.mark.parametrize("level", ["OD", "O1", "O2"])
def test_modules_of_the_file_keep_float32_weights_and_arithmetic(level: str, lists: Path) -> None:
    lists.write_text("excluded_layers: ['1']\n")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    precision = make_precision("fp16", level, lists=lists)
    precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    half = torch.float32 if level == "OD" else torch.float16
    assert [layer.weight.dtype for layer in model] == [half, torch.float32, half]
    with precision.autocast():
        assert model[:2](torch.ones(2, 4)).dtype is torch.float32


def test_a_module_that_the_model_does_not_have_is_named_with_the_file(lists: Path) -> None:
    precision = make_precision("fp16", "O2", lists=lists)
    with pytest.raises(ValueError, match=r"fp32\.yml: excluded_layers: no module is named 'classifier'"):
        precision.prepare(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize("options", [{"precision": "fp32"}, {"precision": "fp16", "amp_level": "O0"}])
def test_at_fp32_there_is_nothing_to_apply_it_to(options: dict[str, str]) -> None:
    with pytest.raises(OptionError, match=r"amp_lists=a\.yml with fp32: .*--precision"):
        RunOptions(amp_lists=Path("a.yml"), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("custom_black_list: [hardswisch]", "lists.yml: unknown operator 'hardswisch'; did you mean 'hardswish'?"),
        ("excluded_layers: [clasifier]", "lists.yml: excluded_layers: no module is named 'clasifier'; did you mean"),
        ("black: []", "lists.yml: holds ['black']; allowed are the keys"),
    ],
)
def test_a_wrong_file_is_one_line_and_2_and_nothing_is_written(
    text: str, message: str, shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lists.yml").write_text(text)
    given = ["--data-path", shapes, "--batch-size", 4, "--amp-level", "O1", "--amp-lists", tmp_path / "lists.yml"]
    assert train(*given, "--output-dir", tmp_path / "out") == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_file_with_fp32_is_one_line_and_2(shapes: Path, lists: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--data-path", shapes, "--amp_lists", lists) == 2
    assert "with fp32: " in capsys.readouterr().err


def test_a_session_obeys_the_file(shapes: Path, lists: Path, tmp_path: Path) -> None:
    options = RunOptions(precision="fp16", amp_level="O2", amp_lists=lists, workers=0, save_dir=tmp_path / "out")
    session = open_session(
        classification_recipe(ClassifierOptions(data_path=shapes, batch_size=4)),
        options,
        World(rank=0, size=1, device=torch.device("cpu")),
    )
    session.loader.close()
    kept = {p.dtype for p in session.model.get_submodule("classifier").parameters()}
    assert kept == {torch.float32}
    assert session.precision.policy is not None
    assert "hardswish" in session.precision.policy.black


class Overflowing(nn.Module):
    """A layer that leaves the range of float16 on its way."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.far = inner, Far()

    def forward(self, x: Tensor) -> Tensor:
        return self.far(self.inner(x))


class Far(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + 1) * 1e6 / 1e6


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every network that a recipe makes has a layer that overflows."""
    make = Recipe.create_model

    def create_model(recipe: Recipe) -> nn.Module:
        model = make(recipe)
        model.conv_bn0 = Overflowing(model.conv_bn0)  # type: ignore[arg-type]
        return model

    monkeypatch.setattr(Recipe, "create_model", create_model)


@pytest.mark.parametrize(
    "captured", [[], pytest.param(["--to_static_training"], marks=pytest.mark.slow)], ids=["written", "captured"]
)
def test_the_list_that_bisect_writes_makes_a_failing_training_pass(
    captured: list[str], persons: Path, tmp_path: Path, planted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_backend(monkeypatch, "aot_eager")
    config = person_config(tmp_path, persons, iters=3)
    model = load_recipe(config).create_model()
    torch.manual_seed(0)
    images, labels = torch.randn(4, 3, 64, 64), torch.randint(2, (4, 64, 64))
    found = bisect(model, images, labels, lambda out, to: nn.functional.cross_entropy(out[0], to), level="O2", steps=1)
    assert found.kept == ("conv_bn0.far",)
    found.write(tmp_path / "fp32.yml")
    given = ["--config", config, "--precision", "fp16", "--amp_level", "O2", "--log_iters", 1, *captured]
    assert train(*given, "--save_dir", tmp_path / "without") == 0
    assert not any(math.isfinite(loss) for _, loss in losses_of(tmp_path / "without"))
    assert train(*given, "--save_dir", tmp_path / "with", "--amp-lists", tmp_path / "fp32.yml") == 0
    with_lists = losses_of(tmp_path / "with")
    assert len(with_lists) == 3
    assert all(math.isfinite(loss) for _, loss in with_lists)
    weights = tmp_path / "with" / "iter_3"
    lists = ["--precision", "fp16", "--amp_level", "O2", "--amp-lists", str(tmp_path / "fp32.yml")]
    asked = ["eval", "--config", str(config), "--model_path", str(weights), "--device", "cpu", "--workers", "0"]
    assert run([*asked, *lists]) == 0
