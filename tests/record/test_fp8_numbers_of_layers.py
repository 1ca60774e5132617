"""What FP8 loses, tensor by tensor: planted small, large and broken numbers are counted exactly."""

import json
import math

import pytest
import torch
from torch import Tensor, nn

from mezzo.amp import Fp8Recipe, auto_cast, decorate
from mezzo.amp.debugging import Fp8Row, collect_fp8_numbers, collect_operator_stats

RECIPE = Fp8Recipe(emulate=True, min_width=0, min_size=0)


def rows_of(
    net: nn.Module, *batches: Tensor, recipe: Fp8Recipe = RECIPE, grad: Tensor | None = None
) -> dict[tuple[str, str], Fp8Row]:
    with collect_fp8_numbers() as numbers:
        for x in batches:
            with auto_cast(level="O3", dtype="bfloat16", fp8=recipe):
                result = net(x)
            if grad is not None:
                result.backward(grad)
    return {(row.module, row.role): row for row in numbers.rows}


def layer() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(16, 16, bias=False))
    with torch.no_grad():
        net[0].weight.fill_(0.5)
    return net


def test_what_is_rounded_to_zero_is_counted_among_what_was_not_zero() -> None:
    x = torch.zeros(16, 16)
    x[0, 0] = 448.0  # the scale is 1
    x[1, :8] = 2.0**-10  # half of the smallest e4m3 number, even: to zero
    x[2, :4] = 2.0**-9  # the smallest
    found = rows_of(layer(), x)["0", "input"]
    assert (found.calls, found.values, found.largest) == (1, 256, 448.0)
    assert found.to_zero_share == 8 / 13
    assert found.cut_share == 0.0
    assert found.format == "e4m3"


def test_gradients_have_a_format_and_a_row_of_their_own() -> None:
    grad = torch.zeros(16, 16, dtype=torch.bfloat16)
    grad[0, 0] = 57344.0
    grad[1, :4] = 2.0**-17  # half of the smallest e5m2 number
    found = rows_of(layer(), torch.ones(16, 16), grad=grad)["0", "gradient"]
    assert (found.format, found.to_zero_share, found.largest) == ("e5m2", 4 / 5, 57344.0)
    # in e4m3 the scale is 2^-7, and the smallest number 2^-2
    other = Fp8Recipe(emulate=True, min_width=0, min_size=0, gradient="e4m3")
    grad[1, :4] = 0.25
    assert rows_of(layer(), torch.ones(16, 16), recipe=other, grad=grad)["0", "gradient"].to_zero_share == 0.0


def test_what_outgrows_a_delayed_scale_is_counted_as_cut_off() -> None:
    delayed = Fp8Recipe(emulate=True, min_width=0, min_size=0, scaling="delayed")
    grown = torch.ones(16, 16)
    grown[:4] = 100.0
    net = layer()
    decorate(net, level="O3", dtype="bfloat16", half_layers=(), fp8=delayed)  # a history is kept beside a half weight
    found = rows_of(net, torch.ones(16, 16), grown, recipe=delayed)["0", "input"]
    assert (found.calls, found.values) == (2, 512)
    assert found.cut_share == 64 / 512
    assert rows_of(layer(), torch.ones(16, 16), grown)["0", "input"].cut_share == 0.0  # a current scale has room
    with torch.no_grad():  # and an evaluation is scaled by itself
        assert rows_of(net, grown * 9, recipe=delayed)["0", "input"].cut_share == 0.0


def test_what_is_not_finite_is_counted_and_is_no_largest_number() -> None:
    x = torch.ones(16, 16)
    x[0, :3] = math.inf
    x[0, 3] = math.nan
    found = rows_of(layer(), x)["0", "input"]
    assert (found.non_finite, found.largest) == (4, 1.0)


def test_weights_have_a_row_and_modules_their_names() -> None:
    net = nn.Sequential(layer(), layer())
    found = rows_of(net, torch.ones(16, 16))
    assert sorted(found) == [("0.0", "input"), ("0.0", "weight"), ("1.0", "input"), ("1.0", "weight")]
    assert found["1.0", "weight"].largest == 0.5


def test_rows_are_scaled_by_themselves_where_the_recipe_says_so() -> None:
    by_row = Fp8Recipe(emulate=True, min_width=0, min_size=0, granularity="row")
    x = torch.ones(16, 16)
    x[1] = 1e-7  # all of it is lost beside ones, nothing by itself
    assert rows_of(layer(), x)["0", "input"].to_zero_share == 1 / 16
    assert rows_of(layer(), x, recipe=by_row)["0", "input"].to_zero_share == 0.0


def test_where_most_is_lost_comes_first_and_a_table_can_be_short() -> None:
    net = nn.Sequential(layer(), nn.ReLU(), layer())
    x = torch.ones(16, 16)
    x[:, 1:] = 1e-7
    with collect_fp8_numbers() as numbers, auto_cast(level="O3", dtype="bfloat16", fp8=RECIPE):
        net(x)
    lines = numbers.table(limit=2).splitlines()
    assert lines[0].split() == ["module", "operand", "format", "largest", "to", "zero", "cut", "off", "inf,", "nan"]
    assert lines[1].split() == ["0.0", "input", "e4m3", "1", "93.75%", "0.00%"]
    assert lines[-1] == "... and 2 more"
    assert len(numbers.table(limit=None).splitlines()) == 5
    assert len(json.loads(json.dumps(numbers.to_dict()))["rows"]) == 4


def test_other_levels_have_nothing_to_count() -> None:
    with collect_fp8_numbers() as numbers, auto_cast(level="O2", dtype="bfloat16"):
        layer()(torch.ones(16, 16))
    assert numbers.rows == []


@pytest.mark.parametrize("kernels", [False, True])
def test_operator_statistics_count_fp8_products_as_neither_half_nor_float32(kernels: bool) -> None:
    net = layer()
    with collect_operator_stats(print_table=False, kernels=kernels) as stats:
        with auto_cast(level="O3", dtype="bfloat16", fp8=RECIPE):
            result = net(torch.ones(16, 16))
        result.sum().backward()
    assert stats.totals()["mezzo::fp8_linear"] == (0, 0, 0, 1)
    assert stats.totals()["mezzo::fp8_linear_backward"] == (0, 0, 0, 1)
    row = next(row for row in stats.rows if row.op == "mezzo::fp8_linear")
    assert (row.module, row.api_op, row.other) == ("0", "linear", 1)
    of_gradient = next(row for row in stats.rows if row.op == "mezzo::fp8_linear_backward")
    assert (of_gradient.module, of_gradient.api_op) == ("0", "")
    assert of_gradient.reason == "gradient: follows the dtype of the forward"
    if kernels:
        assert {row.dtype for row in stats.kernels if row.op.startswith("mezzo::fp8")} == {"float8"}
