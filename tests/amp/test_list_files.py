"""List files that also name modules."""

from pathlib import Path

import pytest
import torch
from torch import nn

from mezzo import amp


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    path = tmp_path / "fp32.yml"
    path.write_text("custom_black_list: [softmax]\nexcluded_layers: ['*.first', head]\n")
    return path


def net() -> nn.Sequential:
    model = nn.Sequential()
    model.add_module("body", nn.Sequential())
    model.body.add_module("first", nn.Linear(4, 4))
    model.body.add_module("second", nn.Linear(4, 4))
    model.add_module("head", nn.Linear(4, 4))
    return model


def float32_layers(model: nn.Module) -> list[str]:
    rows = amp.explain(model, level="O2").rows
    return [row.name for row in rows if row.reason == "excluded layer"]


def test_modules_of_the_file_stay_in_float32_and_the_rest_are_keywords(lists: Path) -> None:
    model = net()
    with amp.auto_cast(level="O2", **amp.read_lists(lists, model=model)) as region:
        assert model(torch.ones(2, 4)).dtype is torch.float32
        assert model.body.second(torch.ones(2, 4)).dtype is torch.float16
    assert "softmax" in region.policy.black
    assert float32_layers(model) == ["body.first", "head"]


def test_a_decorated_model_gets_the_float32_weights_of_these_modules_back(lists: Path) -> None:
    model = net()
    before = model.head.weight.detach().clone()
    amp.decorate(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O2")
    amp.read_lists(lists, model=model)
    assert torch.equal(model.head.weight, before)
    assert model.body.second.weight.dtype is torch.float16


def test_reading_it_again_changes_nothing(lists: Path) -> None:
    model = net()
    first = amp.read_lists(lists, model=model)
    forward = model.head.forward
    assert amp.read_lists(lists, model=model) == first == {"custom_black_list": ["softmax"]}
    assert model.head.forward is forward
    assert float32_layers(model) == ["body.first", "head"]


def test_modules_without_a_model_are_an_error_that_says_what_to_pass(lists: Path) -> None:
    with pytest.raises(ValueError, match=r"fp32\.yml: .*excluded_layers.*: call read_lists\(path, model=\.\.\.\)"):
        amp.read_lists(lists)


def fp8_layers(model: nn.Module) -> list[str]:
    rows = amp.explain(model, level="O3", fp8={"min_width": 0}).rows
    return [row.name for row in rows if row.on_half.startswith("float8")]


def test_half_layers_of_the_file_stay_in_half_at_o3_and_are_untouched_below(tmp_path: Path) -> None:
    path = tmp_path / "half.yml"
    path.write_text("half_layers: ['body.*']\nexcluded_layers: ['2']\n")
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    model.add_module("body", nn.Sequential(nn.Linear(16, 16)))
    assert fp8_layers(model) == ["0", "1", "2", "3", "body.0"]
    assert amp.read_lists(path, model=model) == amp.read_lists(path, model=model) == {}
    assert fp8_layers(model) == ["0", "1", "3"]
    assert float32_layers(model) == ["2"]


def test_a_wrong_half_layer_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "half.yml"
    path.write_text("half_layers: [hed]\nexcluded_layers: [head]\n")
    model = net()
    with pytest.raises(ValueError, match=r"half\.yml: half_layers: no module is named 'hed'; did you mean 'head'"):
        amp.read_lists(path, model=model)
    assert float32_layers(model) == []
    with pytest.raises(ValueError, match=r"half\.yml: .*excluded_layers and half_layers.*: call read_lists"):
        amp.read_lists(path)


def test_a_file_without_modules_needs_no_model(tmp_path: Path) -> None:
    path = tmp_path / "lists.yml"
    path.write_text("custom_black_list: [exp]\nexcluded_layers: []\n")
    assert amp.read_lists(path) == amp.read_lists(path, model=net()) == {"custom_black_list": ["exp"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("excluded_layers: [hed]", r"lists\.yml: excluded_layers: no module is named 'hed'; did you mean 'head'"),
        ("excluded_layers: head", r"lists\.yml: excluded_layers must be a list of module names"),
        ("excluded_layers: [1]", r"lists\.yml: excluded_layers must be a list of module names"),
        ("half_layers: head", r"lists\.yml: half_layers must be a list of module names"),
    ],
)
def test_a_wrong_module_name_is_one_line_that_begins_with_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "lists.yml"
    path.write_text(text)
    model = net()
    with pytest.raises(ValueError, match=message):
        amp.read_lists(path, model=model)
    assert float32_layers(model) == []
