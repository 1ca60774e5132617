"""FP8 operands: both layouts, scales, sums. By torch here; by the Triton kernels where these tests run interpreted."""

import math

import pytest
import torch

from fp8_interpreter import round_as_torch_does
from mezzo.fp8 import E4M3, E5M2, LARGEST, AmaxHistory, Fp8Recipe, amax_of, make_operand, round_to, scale_for
from mezzo.fp8._operands import turn_operand
from mezzo.optim import uses_triton

SIZES = [(16, 16), (64, 64), (48, 80), (160, 144), (1, 7)]


@pytest.fixture(autouse=True)
def right_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    if uses_triton(torch.device("cpu")):
        round_as_torch_does(monkeypatch)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_both_layouts_hold_the_rounded_numbers(size: tuple[int, int], half: torch.dtype, dtype: torch.dtype) -> None:
    x = (torch.randn(size) * 3).to(half)
    operand = make_operand(x, dtype, sums=torch.float32)
    scale = scale_for(x.float().abs().max(), dtype)
    expected = round_to(x, scale, dtype).float()
    assert torch.equal(operand.values.float(), expected)
    assert torch.equal(operand.transposed.float(), expected.t())
    assert operand.transposed.is_contiguous()
    assert operand.inverse.item() == operand.transposed_inverse.item() == 1 / scale.item()
    assert operand.column_sums is not None
    # float32 sums of the same numbers, in another order: a rounding for each of log2(rows) levels and tiles
    torch.testing.assert_close(operand.column_sums, x.double().sum(0).float(), rtol=1e-5, atol=1e-5)


def test_a_part_that_nobody_asks_for_is_empty() -> None:
    x = torch.randn(32, 16, dtype=torch.bfloat16)
    assert make_operand(x, values=False).values.numel() == 0
    assert make_operand(x, transposed=False).transposed.numel() == 0
    assert make_operand(x).column_sums is None


def test_numbers_that_are_not_finite_stay_so() -> None:
    x = torch.ones(16, 16, dtype=torch.bfloat16)
    x[3, 5] = math.inf
    x[4, 6] = math.nan
    for history in (None, AmaxHistory(2, x.device)):
        back = make_operand(x, history=history).values.float()
        assert back[3, 5].isnan()
        assert back[4, 6].isnan()


def test_a_given_amax_makes_the_scale_and_headroom_halves_it() -> None:
    x = torch.full((16, 16), 7.0, dtype=torch.bfloat16)
    plain, roomy = (make_operand(x, amax=torch.tensor([7.0]), headroom=headroom) for headroom in (1.0, 2.0))
    assert plain.inverse.item() == 1 / 64  # 448 / 7
    assert roomy.inverse.item() == 1 / 32
    assert torch.equal(plain.values.float() / 64, roomy.values.float() / 32)
    several = make_operand(x, amax=torch.tensor([0.5, 7.0, 2.0]))
    assert several.inverse.item() == 1 / 64


def test_nothing_is_converted_to_nothing() -> None:
    history = AmaxHistory(2, torch.device("cpu"))
    history.load(torch.tensor([3.0, 2.0]))
    operand = make_operand(torch.empty(0, 16, dtype=torch.bfloat16), history=history)
    assert (operand.values.shape, operand.transposed.shape) == ((0, 16), (16, 0))
    assert history.amaxes.tolist() == [0.0, 3.0]


def test_a_side_too_long_to_count_in_32_bits_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mezzo.fp8._operands.MOST_SIDE", 31)
    monkeypatch.setattr("mezzo.fp8._operands._convert_by_triton", lambda *_: pytest.fail("not by Triton"))
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    scale = scale_for(x.float().abs().max(), E4M3)
    assert torch.equal(make_operand(x).values.float(), round_to(x, scale, E4M3).float())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("size", [(32, 48), (160, 144), (129, 65)])
def test_a_scale_for_each_row_and_for_each_row_of_the_transpose(size: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(size, dtype=torch.bfloat16) * torch.logspace(-3, 3, size[0])[:, None].bfloat16()
    operand = make_operand(x, dtype, by_row=True, sums=torch.float32)
    assert operand.column_sums is not None
    torch.testing.assert_close(operand.column_sums, x.double().sum(0).float(), rtol=1e-5, atol=1e-2)
    for values, inverse, matrix in (
        (operand.values, operand.inverse, x),
        (operand.transposed, operand.transposed_inverse, x.t()),
    ):
        scales = scale_for(matrix.float().abs().amax(1, keepdim=True), dtype)
        assert torch.equal(inverse, 1 / scales)
        assert torch.equal(values.float(), round_to(matrix, scales, dtype).float())
        assert (values.float().abs().amax(1) > LARGEST[dtype] / 4).all()  # each row fills its range


def test_one_layout_by_row_is_that_of_both() -> None:
    x = torch.randn(48, 80, dtype=torch.bfloat16)
    both = make_operand(x, by_row=True)
    plain, turned = make_operand(x, by_row=True, transposed=False), make_operand(x, by_row=True, values=False)
    assert torch.equal(plain.values.float(), both.values.float())
    assert torch.equal(plain.inverse, both.inverse)
    assert plain.transposed.numel() == plain.transposed_inverse.numel() == 0
    assert torch.equal(turned.transposed.float(), both.transposed.float())
    assert torch.equal(turned.transposed_inverse, both.transposed_inverse)
    assert turned.values.numel() == turned.inverse.numel() == 0


def test_rows_with_a_number_that_is_not_finite_are_not_finite_there() -> None:
    x = torch.ones(16, 32, dtype=torch.bfloat16)
    x[3, 5], x[4, 6] = math.inf, math.nan
    operand = make_operand(x, by_row=True)
    assert operand.values.float()[3, 5].isnan()
    assert operand.values.float()[4, 6].isnan()
    assert operand.transposed.float()[5, 3].isnan()
    assert operand.values.float()[0].isfinite().all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("size", [*SIZES, (129, 260)])
def test_a_turned_operand_is_the_transpose_of_the_same_bits(size: tuple[int, int], dtype: torch.dtype) -> None:
    values = (torch.randn(size) * 9).to(dtype)
    turned = turn_operand(values, torch.tensor([1.0]), None)
    assert turned.is_contiguous()
    assert torch.equal(turned.view(torch.uint8), values.view(torch.uint8).t())


def test_turning_an_operand_teaches_its_history_the_given_amax() -> None:
    history, other = (AmaxHistory(3, torch.device("cpu")) for _ in range(2))
    values = torch.ones(16, 32).to(E4M3)
    for kept in (history, other):
        kept.load(torch.tensor([3.0, 2.0, 1.0]))
    for amax in (5.0, 0.5, math.inf, 0.25):
        given = torch.tensor([amax])
        turn_operand(values, given, history)
        assert given.item() == amax
        other.newest.fill_(amax)
        other.remember()
        assert history.amaxes.tolist() == other.amaxes.tolist()
        assert (history.amax.item(), history.used.item()) == (other.amax.item(), other.used.item())
    assert history.amaxes.tolist() == [0.25, 5.0, 0.5]  # the overflow is stored as the amax before it


def test_a_delayed_scale_comes_from_the_calls_before() -> None:
    history = AmaxHistory(3, torch.device("cpu"))
    amaxes = [4.0, 1.0, 2.0, 8.0, 0.5, 0.5, 0.5]
    scales = []
    for amax in amaxes:
        x = torch.zeros(16, 16, dtype=torch.bfloat16)
        x[0, 0] = amax
        operand = make_operand(x, history=history)
        scales.append(1 / operand.inverse.item())
    # the first call has its own; each other one the largest of up to three before it
    by = [4.0, 4.0, 4.0, 4.0, 8.0, 8.0, 8.0]
    assert scales == [scale_for(torch.tensor(amax), E4M3).item() for amax in by]
    assert history.amaxes.tolist() == [0.5, 0.5, 0.5]
    assert history.amax.item() == 0.5
    assert history.used.item() == 8.0


@pytest.mark.parametrize("first", [True, False])
def test_an_overflow_does_not_stay_in_a_history(first: bool) -> None:
    history = AmaxHistory(4, torch.device("cpu"))
    sound = torch.full((16, 16), 2.0, dtype=torch.float16)
    broken = sound.clone()
    broken[0, 0] = math.inf
    if not first:
        make_operand(sound, history=history)
    assert make_operand(broken, history=history).values.float().isnan().any()
    assert history.amaxes.tolist() == ([0.0] if first else [2.0]) + [0.0 if first else 2.0, 0.0, 0.0]
    assert make_operand(sound, history=history).values.float().isfinite().all()
    after = make_operand(sound, history=history)
    assert (after.values.float() * after.inverse == 2.0).all()


def test_what_outgrows_a_delayed_scale_is_cut_off() -> None:
    history = AmaxHistory(2, torch.device("cpu"))
    make_operand(torch.ones(16, 16, dtype=torch.bfloat16), history=history)
    grown = make_operand(torch.full((16, 16), 9.0, dtype=torch.bfloat16), history=history)
    assert (grown.values.float() == 448.0).all()
    assert (grown.values.float() * grown.inverse == 448.0 / 256.0).all()


def test_an_empty_matrix_has_empty_parts() -> None:
    operand = make_operand(torch.zeros(0, 16, dtype=torch.bfloat16), sums=torch.float32)
    assert operand.values.shape == (0, 16)
    assert operand.transposed.shape == (16, 0)
    assert amax_of(torch.zeros(0, 16)).item() == 0.0
    assert Fp8Recipe().why_half(0, 1024, 1024) is not None  # so that O3 never asks for one
