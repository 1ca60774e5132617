"""Numbers of a tensor, against NumPy: its own float16 says what is subnormal, zero or inf after rounding."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mezzo import amp
from mezzo.amp.debugging import DebugMode, NonFiniteError, check_numerics, collect_operator_stats
from mezzo.record import TensorNumbers
from mezzo.record._tensor_numbers import FLOAT16_INF_FROM, measure, undisturbed

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NAN, INF = math.nan, math.inf
SMALLEST_NORMAL = 2.0**-14  # of float16


def numbers_of(tensor: Tensor, name: str = "x") -> TensorNumbers:
    with undisturbed():
        return measure([(name, tensor)])[0]


def in_numpy(values: np.ndarray) -> dict[str, float]:
    """The same numbers from float64 values, with NumPy's rounding to float16."""
    good = values[np.isfinite(values)]
    with np.errstate(over="ignore", under="ignore"):
        half = np.abs(good.astype(np.float16)).astype(np.float64)
    return {
        "num_nan": int(np.isnan(values).sum()),
        "num_positive_inf": int((values == np.inf).sum()),
        "num_negative_inf": int((values == -np.inf).sum()),
        "num_zero": int((values == 0).sum()),
        "num_subnormal": int(((half > 0) & (half < SMALLEST_NORMAL)).sum()),
        "num_to_zero": int(((half == 0) & (good != 0)).sum()),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_counts_and_range_are_those_of_numpy(dtype: torch.dtype, device: str) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal(4000) * 10.0 ** rng.uniform(-12, 6, 4000)
    values[:7] = [NAN, INF, -INF, -INF, 0, 0, -0.0]
    tensor = torch.from_numpy(values).to(dtype).to(device)
    held = tensor.double().cpu().numpy()
    found, good = numbers_of(tensor), held[np.isfinite(held)]
    assert {name: getattr(found, name) for name in in_numpy(held)} == in_numpy(held)
    assert (found.max, found.min) == (good.max(), good.min())
    assert found.max_abs == np.abs(good).max()
    # float64 sums of 4000 values; the order of addition differs
    assert found.mean == pytest.approx(good.mean(), rel=1e-9)
    assert found.numel == 4000
    assert found.num_inf == found.num_positive_inf + found.num_negative_inf
    assert found.num_nonzero == int((good != 0).sum())
    assert found.subnormal_share == found.num_subnormal / found.num_nonzero
    assert found.to_zero_share == found.num_to_zero / found.num_nonzero


EDGES = [2.0**-14, 2.0**-24, 2.0**-25, 65504.0, 65520.0, 2.0**-14 - 2.0**-25]


@given(st.sampled_from(EDGES), st.integers(-2, 2), st.sampled_from([1, -1]))
def test_at_the_edges_of_float16_rounding_decides(edge: float, ulps: int, sign: int) -> None:
    value = np.float32(edge)
    for _ in range(abs(ulps)):
        value = np.nextafter(value, np.float32(np.inf if ulps > 0 else 0))
    held = np.array([sign * float(value)])
    found = numbers_of(torch.tensor(held, dtype=torch.float32))
    assert {name: getattr(found, name) for name in in_numpy(held)} == in_numpy(held)
    with np.errstate(over="ignore"):
        assert found.overflows_float16 == bool(np.isinf(np.float16(held[0])))


def test_numbers_overflow_float16_where_numpy_rounds_to_inf() -> None:
    with np.errstate(over="ignore"):
        assert np.isinf(np.float16(FLOAT16_INF_FROM))
    assert np.isfinite(np.float16(np.nextafter(np.float32(FLOAT16_INF_FROM), np.float32(0))))


@pytest.mark.parametrize("values", [[], [NAN, INF]])
def test_without_a_finite_value_the_range_is_nan(values: list[float]) -> None:
    found = numbers_of(torch.tensor(values))
    assert all(map(math.isnan, (found.max, found.min, found.mean, found.max_abs)))
    assert found.subnormal_share == found.to_zero_share == 0
    assert not found.overflows_float16


def test_several_tensors_are_measured_together_and_keep_their_names() -> None:
    with undisturbed():
        first, second = measure([("a", torch.ones(2)), ("b", torch.zeros(3, 1, dtype=torch.float16))])
    assert (first.name, first.dtype, first.shape, first.max) == ("a", "float32", (2,), 1)
    assert (second.name, second.dtype, second.shape, second.num_zero) == ("b", "float16", (3, 1), 3)
    assert measure([]) == []


@pytest.mark.gpu
def test_tensors_are_read_in_one_transfer() -> None:
    tensors = [("x", torch.randn(100, device="cuda")) for _ in range(5)]
    with torch.profiler.profile(acc_events=True) as profile, undisturbed():
        measure(tensors)
    copies = [event for event in profile.events() if "Memcpy DtoH" in event.name]
    assert len(copies) == 1


def test_numbers_in_words_name_what_is_bad_and_how_much_is_zero() -> None:
    text = str(numbers_of(torch.tensor([1.5, -2.0, 0.0, NAN, INF, -INF, -INF]), "mat1"))
    assert text == "mat1 float32[7] -2 to 1.5, 1 nan, 1 inf, 2 -inf, 1 of 7 are 0"
    assert str(numbers_of(torch.zeros(0), "x")) == "x float32[0] empty"


# -- check_numerics


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_check_numerics_returns_counts_and_range_on_the_device(dtype: torch.dtype, device: str) -> None:
    tensor = torch.tensor([1.0, 0.0, 4.0, NAN, INF, -INF], dtype=dtype, device=device)
    counts, values = check_numerics(tensor, "div", "y", DebugMode.CHECK_NAN_INF)
    assert counts.dtype is torch.int64
    assert values.dtype is torch.float32
    assert counts.device == values.device == tensor.device
    assert counts.tolist() == [1, 2, 1]
    assert values.tolist() == pytest.approx([4, 0, 5 / 3])  # of the three finite values


def test_check_numerics_prints_the_line_of_a_bad_tensor(capsys: pytest.CaptureFixture[str]) -> None:
    check_numerics(torch.tensor([1.0, INF], dtype=torch.float16), "exp", "y", DebugMode.CHECK_NAN_INF)
    assert capsys.readouterr().out == (
        "[PRECISION] [ERROR] in [device=cpu, op=exp, tensor=y, dtype=fp16], numel=2, num_nan=0, num_inf=1, "
        "num_zero=0, max=1.000000e+00, min=1.000000e+00, mean=1.000000e+00\n"
    )


@pytest.mark.parametrize(
    ("value", "mode", "is_printed"),
    [
        (1.0, DebugMode.CHECK_NAN_INF_AND_ABORT, False),
        (1.0, DebugMode.CHECK_NAN_INF, False),
        (7e4, DebugMode.CHECK_NAN_INF, False),
        (1.0, DebugMode.CHECK_ALL_FOR_OVERFLOW, False),
        (7e4, DebugMode.CHECK_ALL_FOR_OVERFLOW, True),
        (-7e4, DebugMode.CHECK_ALL_FOR_OVERFLOW, True),
        (INF, DebugMode.CHECK_ALL_FOR_OVERFLOW, True),
        (1.0, DebugMode.CHECK_ALL, True),
    ],
)
def test_the_mode_decides_what_check_numerics_prints(
    value: float, mode: DebugMode, is_printed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    check_numerics(torch.tensor([value]), "op", "x", mode)
    assert capsys.readouterr().out.startswith("[PRECISION]") == is_printed


def test_abort_mode_raises_one_error_that_says_what_was_found() -> None:
    with pytest.raises(NonFiniteError, match=r"^exp: not finite: y float32\[2\] 1 to 1, 1 nan$") as caught:
        check_numerics(torch.tensor([1.0, NAN]), "exp", "y")
    assert caught.value.finding is None
    assert isinstance(caught.value, RuntimeError)  # as in Paddle


def test_without_a_name_of_the_operator_the_error_speaks_of_a_tensor() -> None:
    with pytest.raises(NonFiniteError, match=r"^a tensor: not finite: y"):
        check_numerics(torch.tensor([NAN]), "", "y")


@pytest.mark.parametrize(
    ("value", "came"),
    [
        (torch.ones(2, dtype=torch.int64), "a tensor of int64"),
        (torch.ones(2, dtype=torch.bool), "a tensor of bool"),
        (torch.ones(2, dtype=torch.complex64), "a tensor of complex64"),
        ([1.0], "list"),
    ],
)
def test_what_holds_no_nan_is_refused(value: object, came: str) -> None:
    with pytest.raises(
        TypeError, match=f"^check_numerics: {came}; only floating tensors hold NaN or inf: pass a float"
    ):
        check_numerics(value, "op", "x")  # type: ignore[arg-type]


def test_the_modes_have_paddles_numbers() -> None:
    assert [mode.value for mode in DebugMode] == [0, 1, 2, 3]
    assert [mode.name for mode in DebugMode] == [
        "CHECK_NAN_INF_AND_ABORT",
        "CHECK_NAN_INF",
        "CHECK_ALL_FOR_OVERFLOW",
        "CHECK_ALL",
    ]


def test_a_policy_does_not_change_what_check_numerics_computes() -> None:
    tensor = torch.tensor([1e30, -1.0], requires_grad=True)
    with amp.auto_cast(level="O2"):
        _, values = check_numerics(tensor, "op", "x")
    assert values.tolist() == pytest.approx([1e30, -1, 5e29])
    assert not values.requires_grad


def test_check_numerics_is_not_recorded() -> None:
    tensor = torch.ones(2)
    with collect_operator_stats(print_table=False) as stats:
        check_numerics(tensor, "op", "x")
    assert stats.rows == []
