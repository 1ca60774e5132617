"""GELU and the sum of its gradient against float64: by torch on a CPU, by Triton on a GPU or interpreted."""

import os

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mezzo.kernels import fused_gelu
from mezzo.kernels._gelu import gelu_backward

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
#: Half a unit of the result; Triton's interpreter cuts a bfloat16 off, which is up to a whole one.
ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-7 if INTERPRETED else 2**-8}
#: The polynomial in the kernel; torch's float32 instead loses digits of 1 + erf(x), which are units of 6e-8.
ARITHMETIC = 2e-5
#: Half the smallest number of float16.
LEAST = 2**-25
HALVES = (torch.float16, torch.bfloat16)
FORMS = ("none", "tanh")
#: One tile, columns that fill no tile, several programs, more columns than a tile has, one row.
SHAPES = [(16, 64), (3, 7, 96), (700, 72), (5, 300), (48,)]


def make(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(DEVICE, dtype)


def assert_near(found: Tensor, expected: Tensor, terms: Tensor) -> None:
    """One rounding of the result, and the arithmetic's error of the terms that it is the sum of."""
    error = (found.detach().cpu().double() - expected.detach()).abs()
    bound = ROUNDING[found.dtype] * expected.detach().abs() + ARITHMETIC * terms.detach().abs() + LEAST
    assert (error <= bound).all(), (error / bound).max()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_results_and_gradients_are_those_of_float64_rounded_once(
    form: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = make(*shape, dtype=dtype, scale=2.0).requires_grad_()
    grad = make(*shape, dtype=dtype)
    double = x.detach().cpu().double().requires_grad_()
    result, expected = fused_gelu(x, form), F.gelu(double, approximate=form)
    assert result.dtype is dtype
    assert_near(result, expected, expected.abs() + 1e-2 * double.abs())
    (found,) = torch.autograd.grad(result, x, grad)
    (wanted,) = torch.autograd.grad(expected, double, grad.cpu().double())
    assert_near(found, wanted, grad.cpu().double())  # the slope is at most 1.13; at -0.75 its two terms cancel
    _, sums = gelu_backward(grad, x.detach(), form)
    rows = wanted.reshape(-1, shape[-1])
    error = (sums.cpu().double() - rows.sum(0)).abs()
    # The kernel adds up unrounded gradients in float32; torch, where there is no Triton, rounds each before the sum.
    bound = ROUNDING[dtype] * (rows.sum(0).abs() + rows.abs().sum(0)) + 1e-5
    assert (error <= bound).all()


@pytest.mark.parametrize("form", FORMS)
def test_every_float16_is_within_a_rounding(form: str) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    every = every[every.isfinite()].reshape(-1, 2**10).to(DEVICE)
    expected = F.gelu(every.cpu().double(), approximate=form)
    assert_near(fused_gelu(every, form), expected, expected.abs() + 1e-2 * every.cpu().double().abs())


@pytest.mark.parametrize("form", FORMS)
def test_large_numbers_have_no_nan(form: str) -> None:
    """A bfloat16 of 1e18 overflows float32 when it is raised to the third power."""
    x = torch.tensor([-1e18, -1e4, -60.0, -8.0, 8.0, 60.0, 1e4, 1e18] * 4).to(DEVICE, torch.bfloat16).requires_grad_()
    result = fused_gelu(x, form)
    torch.testing.assert_close(result.cpu(), x.detach().cpu().clamp(min=0), rtol=0, atol=1e-7)
    result.sum().backward()
    torch.testing.assert_close(x.grad.cpu(), (x.detach().cpu() > 0).bfloat16(), rtol=0, atol=1e-7)


def test_a_nan_stays_a_nan() -> None:
    x = torch.zeros(2, 32, device=DEVICE, dtype=torch.float16)
    x[1, 3] = float("nan")
    grad_x, sums = gelu_backward(torch.ones_like(x), x, "none")
    assert fused_gelu(x).isnan().nonzero().tolist() == grad_x.isnan().nonzero().tolist() == [[1, 3]]
    assert sums.isnan().nonzero().tolist() == [[3]]


def test_nothing_and_strided_rows_are_taken() -> None:
    empty = torch.empty(0, 64, device=DEVICE, dtype=torch.float16)
    assert fused_gelu(empty).shape == (0, 64)
    assert torch.equal(gelu_backward(empty, empty, "none")[1].cpu(), torch.zeros(64, dtype=torch.float16))
    x, grad = (make(64, 32, dtype=torch.float16) for _ in range(2))
    found = gelu_backward(grad.t(), x.t(), "none")
    for one, other in zip(found, gelu_backward(grad.t().contiguous(), x.t().contiguous(), "none"), strict=True):
        torch.testing.assert_close(one, other, rtol=2**-10, atol=2**-24)  # torch's own path may sum in another order


@pytest.mark.parametrize("form", FORMS)
def test_there_is_a_second_derivative(form: str) -> None:
    x = make(4, 32, dtype=torch.bfloat16).requires_grad_()
    (slope,) = torch.autograd.grad(fused_gelu(x, form).float().sum(), x, create_graph=True)
    (found,) = torch.autograd.grad(slope.float().sum(), x)
    double = x.detach().cpu().double().requires_grad_()
    (slope,) = torch.autograd.grad(F.gelu(double, approximate=form).sum(), double, create_graph=True)
    (expected,) = torch.autograd.grad(slope.sum(), double)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=2**-6, atol=2**-6)  # two roundings of terms near 1


@pytest.mark.skipif(INTERPRETED, reason="compares registrations, not kernels")
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # opcheck's own reading, since torch 2.14
def test_the_operator_is_registered_rightly() -> None:
    x = make(4, 32, dtype=torch.bfloat16).requires_grad_()
    torch.library.opcheck(torch.ops.mezzo.gelu.default, (x, "none"))
    torch.library.opcheck(torch.ops.mezzo.gelu_backward.default, (x.detach(), x.detach(), "none"))
