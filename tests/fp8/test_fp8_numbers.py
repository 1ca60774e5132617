"""FP8 numbers against their definition: every code of a format written out, and the nearest of them looked for."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mezzo.fp8 import E4M3, E5M2, LARGEST, amax_of, round_to, scale_for


def numbers_of(dtype: torch.dtype) -> list[float]:
    """Return the finite numbers of a format that are not negative, by the meaning of its bits, ordered by code."""
    exponent_bits, mantissa_bits, bias = (4, 3, 7) if dtype is E4M3 else (5, 2, 15)
    found = []
    for code in range(128):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        last = exponent == (1 << exponent_bits) - 1
        # e4m3 has one NaN and no infinity; e5m2 has both, as IEEE's formats do
        if last and (dtype is E5M2 or mantissa == (1 << mantissa_bits) - 1):
            continue
        fraction = mantissa / (1 << mantissa_bits)
        found.append((1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias))
    return found


def nearest(value: float, dtype: torch.dtype) -> float:
    """Return the nearest number of a format; of two as near, the one whose code is even. Too large: the largest."""
    numbers = numbers_of(dtype)
    size = min(abs(value), numbers[-1])
    code = min(range(len(numbers)), key=lambda code: (abs(numbers[code] - size), code % 2))
    return math.copysign(numbers[code], value)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_largest_number_is_the_formats(dtype: torch.dtype) -> None:
    assert LARGEST[dtype] == numbers_of(dtype)[-1] == torch.finfo(dtype).max


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@given(values=st.lists(st.floats(-1e5, 1e5, width=32), min_size=1, max_size=20))
def test_rounding_is_to_the_nearest_number_and_even_where_two_are_as_near(
    dtype: torch.dtype, values: list[float]
) -> None:
    rounded = round_to(torch.tensor(values), torch.tensor(1.0), dtype).float().tolist()
    assert rounded == [nearest(value, dtype) for value in values]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_what_is_not_finite_becomes_not_a_number_and_is_not_cut_off(dtype: torch.dtype) -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 1e30, -1e30, 2.0])
    rounded = round_to(x, torch.tensor(1.0), dtype).float()
    assert rounded.isnan().tolist() == [True, True, True, False, False, False]
    assert rounded[3:].tolist() == [LARGEST[dtype], -LARGEST[dtype], 2.0]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@given(amax=st.floats(2.0**-120, 2.0**120, width=32), headroom=st.sampled_from([1.0, 2.0]))
def test_a_scale_is_the_largest_power_of_two_that_fits(dtype: torch.dtype, amax: float, headroom: float) -> None:
    scale = scale_for(torch.tensor(amax), dtype, headroom).item()
    assert math.frexp(scale)[0] == 0.5
    assert scale == 2.0**126 or scale <= LARGEST[dtype] / (amax * headroom) < 2 * scale * (1 + 1e-6)  # float32 division
    if scale < 2.0**126:
        assert amax * headroom * scale <= LARGEST[dtype] * (1 + 1e-6)


def test_the_scale_of_nothing_is_one_and_of_an_overflow_zero() -> None:
    assert scale_for(torch.tensor([0.0, math.inf]), E4M3).tolist() == [1.0, 0.0]
    assert scale_for(torch.tensor(math.nan), E4M3).isnan()
    assert scale_for(torch.tensor(1e-45), E5M2).item() == 2.0**126  # its inverse is a normal number


@given(st.integers(-20, 20))
def test_scales_that_are_powers_of_two_give_the_same_numbers(shift: int) -> None:
    x = torch.linspace(0.25, 1.0, 99)  # six powers of two away from the smallest normal number
    one, other = torch.tensor(64.0), torch.tensor(64.0 * 2.0**-3)
    assert torch.equal(round_to(x, one, E4M3).float() / one, round_to(x, other, E4M3).float() / other)
    assert torch.equal(round_to(x * 2.0**shift, one * 2.0**-shift, E4M3).float(), round_to(x, one, E4M3).float())


def test_the_largest_absolute_value_of_all_and_along_a_dimension() -> None:
    x = torch.tensor([[1.0, -3.0], [0.5, 2.0]], dtype=torch.bfloat16)
    assert amax_of(x).item() == 3.0
    assert amax_of(x, dim=1).tolist() == [[3.0], [2.0]]
    assert amax_of(x.t(), dim=1).tolist() == [[1.0], [3.0]]
    assert amax_of(x).dtype is torch.float32
    assert amax_of(x[:0]).item() == 0.0
    assert amax_of(x[:0], dim=0).tolist() == [[0.0, 0.0]]
