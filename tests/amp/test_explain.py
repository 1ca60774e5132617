"""`explain` tells the list or rule behind a precision, for operators and for the layers of a model."""

import pytest
import torch
from torch import nn

from mezzo.amp import Policy, auto_cast, exclude_layers, explain
from mezzo.amp._explain import operator_of
from mezzo.amp._ops import VARIANTS


def test_an_operator_is_explained_variant_by_variant() -> None:
    rows = {row.op: row for row in explain("sum", level="O2").rows}
    assert rows["sum.full"].on_half == "float32"
    assert rows["sum.full"].reason == "black list"
    assert rows["sum.dim"].on_half == "float16 (computed in float32)"
    assert explain(torch.nn.functional.linear).rows[0].reason == "white list"
    assert explain("elementwise_add", custom_white_list=["add"]).rows[0].reason == "custom white list"
    assert explain("add").rows[0].reason == "gray: promoted by a float32 input / gray: no input is float32"
    assert explain("linear", level="OD").rows[0].on_float32 == "float32 (computed in float16)"
    assert explain("linear", level="O0").rows[0].on_half == "as it is"


def test_the_policy_in_force_is_the_default() -> None:
    with auto_cast(level="O2", dtype="bfloat16"):
        assert explain("relu").policy == Policy.create("O2", "bfloat16")


def test_every_known_operator_can_be_explained() -> None:
    for variant in VARIANTS:
        assert explain(variant).rows[0].reason


def test_a_model_is_explained_layer_by_layer() -> None:
    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.Linear(1, 1), Own(1, 1), nn.Linear(1, 1))
    exclude_layers(model, "4")
    explanation = explain(model, level="O1")
    rows = {row.name: row for row in explanation.rows}
    assert (rows["0"].op, rows["0"].on_float32, rows["0"].reason) == ("conv2d", "float16", "white list")
    assert rows["1"].reason.startswith("gray")
    assert rows["3"].reason == "own code: each operator in it decides for itself"
    assert rows["4"].reason == "excluded layer"
    assert str(explanation).splitlines()[0].startswith("level O1, float16, lists ")
    assert len(str(explanation).splitlines()) == 7


@pytest.mark.parametrize(
    ("module", "op"),
    [
        (nn.ConvTranspose3d(1, 1, 1), "conv_transpose3d"),
        (nn.BatchNorm1d(1), "batch_norm"),
        (nn.AdaptiveAvgPool2d(1), "adaptive_avg_pool2d"),
        (nn.MaxPool2d(2), "max_pool2d"),
        (nn.LayerNorm(1), "layer_norm"),
        (nn.Hardswish(), "hardswish"),
        (nn.CrossEntropyLoss(), "cross_entropy_loss"),
        (nn.LSTM(1, 1), "lstm"),
        (nn.Dropout2d(), None),
        (nn.Identity(), None),
    ],
)
def test_modules_map_to_the_operator_they_call(module: nn.Module, op: str | None) -> None:
    assert operator_of(module) == op


def test_bad_questions_get_clear_answers() -> None:
    with pytest.raises(ValueError, match="unknown operator 'sofmax'; did you mean 'softmax'"):
        explain("sofmax")
    with pytest.raises(TypeError, match="explain: give a policy or level, not both"):
        explain("exp", Policy.create(), level="O2")
    with pytest.raises(TypeError, match="neither an operator name, a torch function nor a module"):
        explain(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'log_loss' is a document's name without a torch operator"):
        explain("log_loss")
