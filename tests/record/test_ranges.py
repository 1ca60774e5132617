"""Ranges by layer, against NumPy: its own rounding to float16 says what becomes zero or subnormal."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from installed import installed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mezzo import amp
from mezzo.amp.debugging import RangeRow, Ranges, collect_ranges
from mezzo.dtypes import dtype_name
from mezzo.record._ranges import _NUM_BINS, _count
from no_waiting import no_waiting

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SMALLEST_NORMAL = 2.0**-14  # of float16


def only_row(ranges: Ranges, op: str, phase: str = "forward") -> RangeRow:
    (row,) = [row for row in ranges.rows if (row.op, row.phase) == (op, phase)]
    return row


def ranges_of(values: Tensor) -> RangeRow:
    with collect_ranges() as ranges:
        values * 1
    return only_row(ranges, "mul")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_row_has_the_numbers_of_numpy(dtype: torch.dtype, device: str) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal(5000) * 10.0 ** rng.uniform(-13, 4, 5000)
    values[:6] = [math.nan, math.inf, -math.inf, 0, 0, -0.0]
    tensor = torch.from_numpy(values).to(dtype).to(device)
    held = tensor.double().cpu().numpy()
    good = np.abs(held[np.isfinite(held)])
    with np.errstate(over="ignore", under="ignore"):
        half = good.astype(np.float16).astype(np.float64)
    nonzero = (good > 0).sum()
    row = ranges_of(tensor)
    assert (row.calls, row.values, row.dtype) == (1, 5000, dtype_name(dtype))
    assert row.largest == good.max()
    assert row.margin == pytest.approx(math.log2(65504 / good.max()))
    assert row.non_finite == (~np.isfinite(held)).sum()
    assert row.zero_share == (good == 0).sum() / 5000
    assert row.to_zero_share == ((half == 0) & (good > 0)).sum() / nonzero
    assert row.subnormal_share == ((half > 0) & (half < SMALLEST_NORMAL)).sum() / nonzero


@given(st.floats(width=32, allow_nan=False, allow_infinity=False).filter(lambda x: x == 0 or abs(x) >= 2.0**-126))
def test_a_magnitude_is_counted_under_the_power_of_two_that_bounds_it(value: float) -> None:
    bins, largest = _count(torch.tensor([value], dtype=torch.float32))
    (place,) = bins[:_NUM_BINS].nonzero().flatten().tolist()
    mantissa, exponent = math.frexp(abs(value))  # 0.5 <= mantissa < 1
    bound = exponent - 1 if mantissa == 0.5 else exponent
    assert place == (1 if value == 0 else bound + 128)
    assert largest.int().view(torch.float32).item() == abs(value)


@pytest.mark.parametrize(
    ("value", "to_zero", "subnormal"),
    [
        (2.0**-25, 1, 0),  # a tie, and zero is the even neighbour
        (2.0**-25 * (1 + 2.0**-20), 0, 1),
        (2.0**-14 - 2.0**-24, 0, 1),
        (2.0**-14 - 2.0**-25, 0, 0),  # a tie, and the smallest normal number is even
        (2.0**-14, 0, 0),
        (1e-40, 1, 0),  # subnormal in float32
    ],
)
def test_at_the_edges_of_float16_rounding_decides_what_underflows(value: float, to_zero: int, subnormal: int) -> None:
    with np.errstate(under="ignore"):
        half = float(np.float16(np.float32(value)))
    assert (half == 0, 0 < half < SMALLEST_NORMAL) == (bool(to_zero), bool(subnormal))
    row = ranges_of(torch.tensor([value, 1.0]))
    assert (row.to_zero_share, row.subnormal_share) == (to_zero / 2, subnormal / 2)


@pytest.mark.parametrize(("largest", "margin"), [(65504.0, 0.0), (32752.0, 1.0), (131008.0, -1.0)])
def test_the_margin_is_in_powers_of_two(largest: float, margin: float) -> None:
    assert ranges_of(torch.tensor([1.0, -largest])).margin == margin


@pytest.mark.parametrize("values", [[0.0, 0.0], [math.nan]])
def test_without_a_finite_value_other_than_zero_there_is_no_margin(values: list[float]) -> None:
    row = ranges_of(torch.tensor(values))
    assert (row.margin, row.largest, row.to_zero_share, row.subnormal_share) == (None, 0, 0, 0)


def test_calls_of_one_operator_in_one_module_are_one_row() -> None:
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU())
    nn.init.ones_(model[0].weight)
    with collect_ranges() as ranges:
        for value in (1.0, 8.0, 2.0):
            model(torch.full((4, 2), value))
    row = only_row(ranges, "linear")
    assert (row.module, row.calls, row.values, row.largest) == ("0", 3, 36, 16)


def test_forward_and_backward_are_told_apart_and_gradients_are_named_by_their_forward() -> None:
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Tanh())
    with collect_ranges() as ranges:
        (model(torch.ones(4, 2)).sum() * 1024).backward()
    # d / d tanh is at most 1024, and the gradient of the weight adds four of them
    assert only_row(ranges, "tanh").largest <= 1
    row = only_row(ranges, "tanh", "backward")
    assert (row.module, row.values) == ("1", 12)
    weight = model[0].weight.grad
    assert weight is not None
    assert only_row(ranges, "linear", "backward").largest == weight.abs().max().item()


def test_the_optimizer_is_left_out() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with collect_ranges() as ranges:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert {row.phase for row in ranges.rows} == {"forward", "backward"}
    assert not {row.op for row in ranges.rows} & {"add_", "_foreach_add_"}


def test_of_casts_those_to_float16_are_counted_with_what_float16_has_to_hold() -> None:
    x = torch.tensor([1e5, 1e-9, 1.0])
    with collect_ranges() as ranges:
        x.half().float()
        x.bfloat16()
    (row,) = ranges.rows
    assert (row.op, row.dtype, row.largest, row.non_finite) == ("half -> float16", "float16", 1e5, 0)
    assert row.to_zero_share == pytest.approx(1 / 3)


def test_without_half_units_the_suggestion_sees_gradients_before_they_are_cast_to_float16() -> None:
    model = nn.Linear(4, 1, bias=False)
    nn.init.constant_(model.weight, 3.0)
    x = torch.full((1, 4), 0.1, requires_grad=True)
    with collect_ranges() as ranges, amp.auto_cast(level="O2", cpu_compute="float32"):
        (model(x).sum() * 2.0**15).backward()
    # d / d x is the weight, 3 * 2^15 = 98304
    assert ranges.suggest_scale(2.0**15, headroom=1).largest == 98304
    assert ranges.suggest_scale(2.0**15, headroom=1).loss_scale == 2.0**14


def test_what_float32_holds_and_float16_would_not_is_seen_in_either_precision() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU())
    nn.init.constant_(model[0].weight, 200.0)
    x = torch.full((1, 4), 100.0)
    with collect_ranges() as single:
        model(x)
    with collect_ranges() as half, amp.auto_cast(level="O2", cpu_compute="native"):
        model(x)
    row = only_row(single, "linear")
    assert (row.largest, row.non_finite) == (80000, 0)
    assert row.margin == pytest.approx(math.log2(65504 / 80000))
    assert only_row(half, "linear").non_finite == 4


def test_infinities_that_a_user_writes_are_not_counted() -> None:
    with collect_ranges() as ranges:
        torch.full((3,), -math.inf)
        torch.ones(3).masked_fill(torch.tensor([True, False, True]), -math.inf)
    assert [row.op for row in ranges.rows] == ["ones"]


# -- order, table, JSON


def recorded() -> Ranges:
    with collect_ranges() as ranges:
        torch.full((2,), 1000.0).neg()
        torch.tensor([1e-9, 1.0]).abs()
        torch.tensor([60000.0]).exp()
        torch.zeros(2).sqrt()
    return ranges


def test_rows_come_in_the_order_of_danger() -> None:
    assert [row.op for row in recorded().rows] == ["exp", "full", "neg", "abs", "sqrt", "zeros"]


def test_the_table_shows_the_nearest_to_the_limit_first() -> None:
    lines = recorded().table(limit=3).splitlines()
    assert lines[0].split() == "module phase operator dtype largest margin to zero subnormal inf, nan".split()
    assert [line.split()[1] for line in lines[1:4]] == ["exp", "full", "neg"]
    assert lines[2].split() == "forward full float32 1000 +6.0 0.0% 0.0%".split()
    assert lines[4:] == ["... and 3 more"]


def test_the_table_can_show_most_underflow_first_and_one_phase() -> None:
    ranges = recorded()
    assert ranges.table(1, by="underflow").splitlines()[1].split()[1] == "abs"
    assert len(ranges.table(None).splitlines()) == 7
    assert len(ranges.table(phase="backward").splitlines()) == 1


def test_another_order_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^by='size': must be 'margin' or 'underflow'$"):
        recorded().table(by="size")  # type: ignore[arg-type]


def test_rows_go_to_json() -> None:
    rows = json.loads(json.dumps(recorded().to_dict(), allow_nan=False))["rows"]
    assert [row["op"] for row in rows] == ["exp", "full", "neg", "abs", "sqrt", "zeros"]
    assert rows[4]["margin"] is None


# -- the loss scale


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square()


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_what_a_backward_computes_from_the_forward_alone_is_no_gradient(is_checkpointed: bool) -> None:
    square, x = Square(), torch.full((4,), 1000.0, requires_grad=True)
    with collect_ranges() as ranges:
        y = checkpoint(square, x, use_reentrant=False) if is_checkpointed else square(x)
        (y.sum() * 1e-3).backward()
    rows = [row for row in ranges.rows if row.phase == "backward" and row.op == "square"]
    # 2 x is 2000, and a gradient is 1e-3 times that: the loss scale may be large
    assert max(row.largest for row in rows if not row.is_gradient) >= 2000
    assert [row.largest for row in rows if row.is_gradient] == [pytest.approx(2.0)]
    assert ranges.suggest_scale(headroom=1).largest == pytest.approx(2.0)
    lines = ranges.table().splitlines()
    assert lines[-1] == "* no gradient: computed only from the forward, so the loss scale does not change it"
    assert any(line.startswith("backward*") for line in map(str.strip, lines))


def test_memory_of_the_forward_is_not_kept_and_not_confused_with_later_memory() -> None:
    weight = torch.ones(1000, requires_grad=True)
    with collect_ranges() as ranges:
        for _ in range(20):  # the allocator gives gradients the memory that the forward before has left
            (weight * 2).relu().sum().backward()
    assert {row.is_gradient for row in ranges.rows if row.phase == "backward" and row.op in ("relu", "mul")} == {True}


def backward_of(gradient: Tensor) -> Ranges:
    x = torch.ones_like(gradient, requires_grad=True)
    with collect_ranges() as ranges:
        (x * 1).backward(gradient)
    return ranges


@pytest.mark.parametrize("headroom", [1.0, 4.0, 10.0])
@pytest.mark.parametrize("largest", [3e-5, 1.0, 700.0, 3e4])
def test_the_suggested_scale_is_the_largest_power_of_two_that_leaves_the_headroom(
    largest: float, headroom: float
) -> None:
    suggestion = backward_of(torch.tensor([largest, 1e-6])).suggest_scale(headroom=headroom)
    assert math.log2(suggestion.loss_scale).is_integer()
    assert suggestion.largest == pytest.approx(largest)
    assert suggestion.loss_scale * largest * headroom <= 65504 < 2 * suggestion.loss_scale * largest * headroom


def test_the_suggestion_says_what_becomes_zero_now_and_then() -> None:
    values = np.float32(10.0) ** np.linspace(-12, 1, 2000, dtype=np.float32)
    suggestion = backward_of(torch.from_numpy(values)).suggest_scale()
    with np.errstate(under="ignore"):
        now = (values.astype(np.float16) == 0).mean()
        then = ((values * np.float32(suggestion.loss_scale)).astype(np.float16) == 0).mean()
    assert (suggestion.to_zero_now, suggestion.to_zero_then) == (pytest.approx(now), pytest.approx(then))
    assert then < now


def test_gradients_that_were_recorded_with_a_scale_give_the_same_suggestion() -> None:
    values = torch.tensor([1e-3, 1e-8])
    plain = backward_of(values).suggest_scale()
    scaled = backward_of(values * 1024).suggest_scale(loss_scale=1024)
    assert scaled.loss_scale == plain.loss_scale
    assert scaled.to_zero_then == plain.to_zero_then


def test_where_some_gradients_are_float16_those_decide() -> None:
    half = torch.ones(2, dtype=torch.float16, requires_grad=True)
    single = torch.ones(2, requires_grad=True)
    with collect_ranges() as ranges:
        (single * 1e6).sum().backward()  # stays in float32
        ((half * 2).float() * 3).sum().backward()
    assert ranges.suggest_scale(headroom=1).largest == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss_scale": 0.0}, "loss_scale=0.0: must be more than 0"),
        ({"headroom": 0.5}, "headroom=0.5: must be at least 1"),
    ],
)
def test_wrong_arguments_of_the_suggestion_are_named(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        backward_of(torch.ones(1)).suggest_scale(**arguments)


def test_without_gradients_there_is_nothing_to_suggest() -> None:
    with pytest.raises(ValueError, match=r"^no gradient other than zero was recorded; run a backward inside collect_r"):
        recorded().suggest_scale()


# -- what it leaves alone


def test_results_and_random_numbers_are_the_same_while_recording() -> None:
    def run() -> tuple[float, list[int]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        with amp.auto_cast(level="O2"):
            loss = F.cross_entropy(model(torch.randn(4, 8)), torch.randint(2, (4,)))
        loss.backward()
        return loss.item(), torch.get_rng_state().tolist()

    expected = run()
    with collect_ranges():
        assert run() == expected


def test_after_an_exception_nothing_is_installed_and_the_rows_remain() -> None:
    with pytest.raises(KeyError), collect_ranges() as ranges:
        raise KeyError(str(torch.ones(2).sum().shape))
    assert installed() == []
    assert [row.op for row in ranges.rows] == ["sum", "ones"]


def test_rows_can_be_read_while_recording() -> None:
    with collect_ranges() as ranges:
        torch.ones(2).neg()
        assert only_row(ranges, "neg").calls == 1
        torch.ones(2).neg()
    assert only_row(ranges, "neg").calls == 2


@pytest.mark.gpu
def test_recording_does_not_wait_for_the_device() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)).cuda()
    x = torch.randn(16, 64, device="cuda")

    def run() -> None:
        with amp.auto_cast(level="O2"):
            loss = model(x).square().mean()
        loss.backward()

    run()
    with collect_ranges() as ranges, no_waiting():
        run()
    assert {row.phase for row in ranges.rows} == {"forward", "backward"}
