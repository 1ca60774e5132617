"""`explain` tells the list or rule behind a precision, for operators and for the layers of a model."""

import pytest
import torch
from torch import nn

from mezzo.amp import VARIANTS, Fp8Recipe, Policy, auto_cast, exclude_layers, explain, keep_in_half


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


class OwnLinear(nn.Linear):
    """A layer with code of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


def test_o3_lists_each_layer_as_fp8_or_with_the_reason_why_not() -> None:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Linear(2048, 2048),
            nn.Sequential(nn.Linear(2048, 2048)),
            nn.Linear(2048, 10),
            nn.Linear(2048, 64),
            nn.Linear(2048, 2048),
            nn.Conv2d(16, 16, 1),
            OwnLinear(2048, 2048),
            OwnLinear(2048, 2048),
        )
    exclude_layers(model, "4")
    keep_in_half(model, ["1", "6"])
    explanation = explain(model, level="O3", dtype="bfloat16")
    found = {row.name: (row.on_float32, row.on_half, row.reason) for row in explanation.rows}
    fp8, half, own = "float8_e4m3 (bfloat16 result)", "bfloat16", "own code: each operator in it decides for itself"
    narrow = "2048 -> 64 is narrower than min_width 768 asks: converting would cost more"
    assert found == {
        "0": (fp8, fp8, "white list; FP8 for 4096 rows or more, a multiple of 16"),
        "1.0": (half, half, "white list; not FP8: kept in half"),
        "2": (half, half, "white list; not FP8: its 10 outputs are not a multiple of 16"),
        "3": (half, half, f"white list; not FP8: {narrow}"),
        "4": ("float32", "float32", "excluded layer"),
        "5": (half, half, "white list"),
        "6": ("?", "?", f"{own}; not FP8: kept in half"),
        "7": ("?", "?", own),
    }
    assert len(str(explanation).splitlines()) == 10
    at_o2 = {row.name: row.reason for row in explain(model, level="O2").rows}
    assert at_o2["1.0"] == "white list"
    assert at_o2["6"] == own


def test_the_fp8_layers_of_a_model_are_counted_and_the_others_named_by_reason() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12)), nn.Linear(2048, 10), nn.ReLU())
    keep_in_half(model, ["0", "11"])
    exclude_layers(model, "1")
    explanation = explain(model, level="O3")
    kept, excluded, odd = "0, 11: kept in half", "1: excluded layer", "12: its 10 outputs are not a multiple of 16"
    assert explanation.fp8_layers() == f"9 of 13 linear layers are FP8; {kept}; {excluded}; {odd}"
    few = "its rows are fewer than min_size 4194304 asks or not a multiple of 16"
    assert explanation.fp8_layers(computed=[]).startswith(
        f"0 of 13 linear layers are FP8; {kept}; {excluded}; 2, 3, 4, "
    )
    assert f", 9 and 1 more: {few}; {odd}" in explanation.fp8_layers(computed=[])
    assert f"; 2, 4: {few};" in explanation.fp8_layers(computed=["3", *map(str, range(5, 11))])
    assert (
        explain(nn.Linear(16, 10), level="O3")
        .fp8_layers()
        .startswith("0 of 1 linear layers are FP8; the model itself: ")
    )


def test_a_product_by_name_depends_on_its_sizes_at_o3() -> None:
    rows = {row.op: row for row in explain("matmul", level="O3", fp8={"min_size": 0, "min_width": 32}).rows}
    row = rows["matmul"]
    assert (row.on_float32, row.on_half) == ("float8_e4m3 or float16",) * 2
    assert row.reason == "white list; FP8 by its sizes: multiples of 16, min_width 32, min_size 0"
    assert rows["bmm"].on_half == "float16"
    black = explain("linear", Policy.create("O3", custom_black_list=["linear"], fp8=Fp8Recipe())).rows[0]
    assert (black.on_half, black.reason) == ("float32", "custom black list")


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
    (row,) = explain(module, level="O1").rows
    assert row.op == (op or type(module).__name__)
    assert row.reason.startswith("own code") == (op is None)


def test_bad_questions_get_clear_answers() -> None:
    with pytest.raises(ValueError, match="unknown operator 'sofmax'; did you mean 'softmax'"):
        explain("sofmax")
    with pytest.raises(TypeError, match="explain: give a policy or level, not both"):
        explain("exp", Policy.create(), level="O2")
    with pytest.raises(TypeError, match="neither an operator name, a torch function nor a module"):
        explain(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'log_loss' is a document's name without a torch operator"):
        explain("log_loss")
