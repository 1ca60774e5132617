"""Batch norm with residual and activation against float64: by torch on a CPU, by Triton on a GPU or interpreted."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mezzo.amp import Policy, auto_cast
from mezzo.kernels import NORM_ACTIVATIONS, batch_norm_activation

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
#: Half a unit of the result; Triton's interpreter cuts a bfloat16 off, which is up to a whole one.
ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-7 if INTERPRETED else 2**-8, torch.float32: 2**-20}
HALVES = (torch.float16, torch.bfloat16)
#: One tile, several tiles with rest, channels that fill no tile, more channels than a tile has.
SHAPES = [(2, 8, 4, 4), (3, 24, 17, 13), (2, 72, 9, 20), (2, 40, 31, 5), (2, 300, 5, 7), (1, 1, 2, 1)]


def make(*shape: int, dtype: torch.dtype, shift: float = 0.0) -> Tensor:
    values = (torch.randn(shape) + shift).to(DEVICE, dtype)
    return values.to(memory_format=torch.channels_last) if len(shape) == 4 else values


def reference(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str
) -> Tensor:
    y = F.batch_norm(x, None, None, weight, bias, training=True, eps=eps)
    return NORM_ACTIVATIONS[activation](y if residual is None else y + residual)


def reference_in_float(x: Tensor, *given: Any) -> Tensor:
    return reference(x.float(), *given).to(x.dtype)


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype, arithmetic: float = 2e-5) -> None:
    """One rounding to `dtype`; `arithmetic` is the error of float32 sums over a channel, of the largest number."""
    assert found.dtype is dtype
    error = (found.detach().cpu().double() - expected.detach()).abs()
    bound = ROUNDING[dtype] * expected.detach().abs() + arithmetic * float(expected.detach().abs().max()) + 4e-8
    assert (error <= bound).all(), (error / bound).max()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("activation", "has_residual"), [*((name, False) for name in NORM_ACTIVATIONS), ("none", True), ("relu", True)]
)
def test_results_and_gradients_are_those_of_float64_rounded_once(
    activation: str, has_residual: bool, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = make(*shape, dtype=dtype, shift=1.5)
    residual = make(*shape, dtype=dtype) if has_residual else None
    weight, bias = 1 + 0.3 * make(shape[1], dtype=torch.float32), make(shape[1], dtype=torch.float32)
    given = [None if t is None else t.requires_grad_() for t in (x, residual, weight, bias)]
    result, mean, variance = batch_norm_activation(*given, 1e-3, activation)
    assert result.is_contiguous(memory_format=torch.channels_last)
    doubles = [None if t is None else t.detach().cpu().double().requires_grad_() for t in given]
    expected = reference(*doubles, 1e-3, activation)
    assert_near(result, expected, dtype)
    exact = doubles[0].detach()
    torch.testing.assert_close(mean.cpu().double(), exact.mean((0, 2, 3)), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(variance.cpu().double(), exact.var((0, 2, 3)), rtol=1e-5, atol=1e-7)
    grad = make(*shape, dtype=dtype)
    wanted = [t for t in given if t is not None]
    grads = torch.autograd.grad(result, wanted, grad)
    expected_grads = torch.autograd.grad(expected, [t for t in doubles if t is not None], grad.detach().cpu().double())
    for one, of_double, tensor in zip(grads, expected_grads, wanted, strict=True):
        # The mask of ReLU behind a residual comes from the rounded result, so a number below its smallest unit counts
        # as zero; with two values in a channel the gradient is a difference of nearly equal terms.
        assert_near(one, of_double, tensor.dtype, arithmetic=2e-4 if shape == (1, 1, 2, 1) else 2e-5)


@pytest.mark.parametrize("missing", ["weight", "bias", "both"])
def test_weight_and_bias_may_be_missing(missing: str) -> None:
    torch.manual_seed(1)
    x = make(2, 12, 5, 6, dtype=torch.float16).requires_grad_()
    weight = None if missing in ("weight", "both") else make(12, dtype=torch.float32)
    bias = None if missing in ("bias", "both") else make(12, dtype=torch.float32)
    result, _, _ = batch_norm_activation(x, None, weight, bias, 1e-5, "silu")
    doubles = [None if t is None else t.detach().cpu().double() for t in (x, None, weight, bias)]
    assert_near(result, reference(*doubles, 1e-5, "silu"), torch.float16)
    (found,) = torch.autograd.grad(result.float().pow(2).sum(), x)
    double = doubles[0].requires_grad_()
    (expected,) = torch.autograd.grad(reference(double, *doubles[1:], 1e-5, "silu").pow(2).sum(), double)
    # The gradient of the square is taken at the rounded result: two units.
    assert (found.cpu().double() - expected).abs().max() <= 4 * ROUNDING[torch.float16] * expected.abs().max() + 2e-4


def test_a_mean_that_is_large_against_the_deviation_costs_no_precision() -> None:
    torch.manual_seed(2)
    x = (1000 + torch.randn(4, 16, 24, 24)).to(DEVICE).to(memory_format=torch.channels_last)
    result, mean, variance = batch_norm_activation(x, None, None, None, 1e-5)
    exact = x.cpu().double()
    torch.testing.assert_close(variance.cpu().double(), exact.var((0, 2, 3)), rtol=1e-4, atol=0)
    # some roundings of float32, of 6e-8 each
    torch.testing.assert_close(mean.cpu().double(), exact.mean((0, 2, 3)), rtol=4e-7, atol=0)
    expected = F.batch_norm(exact, None, None, training=True)
    # A mean of 1000 in float32 has units of 6e-5. torch's own batch norm, which computes it on a CPU, errs by more.
    assert (DEVICE == "cpu" and not INTERPRETED) or (result.cpu().double() - expected).abs().max() < 3e-4


@pytest.fixture
def maximum_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter return the number of a number and a NaN, as `max` and `min` of a GPU do."""
    if INTERPRETED:
        import numpy
        from triton.runtime.interpreter import InterpreterBuilder

        for name, function in (("create_maxnumf", numpy.fmax), ("create_minnumf", numpy.fmin)):
            monkeypatch.setattr(
                InterpreterBuilder, name, lambda self, a, b, function=function: self.binary_op(a, b, function)
            )


@pytest.mark.usefixtures("maximum_of_gpus")
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize(
    ("activation", "has_residual"), [*((name, False) for name in NORM_ACTIVATIONS), ("none", True), ("relu", True)]
)
def test_an_overflow_stays_visible_in_its_channel(activation: str, has_residual: bool, value: float) -> None:
    torch.manual_seed(3)
    x = make(2, 8, 5, 4, dtype=torch.float16)
    x[1, 3, 2, 1] = value
    residual = make(2, 8, 5, 4, dtype=torch.float16) if has_residual else None
    weight, bias = (make(8, dtype=torch.float32).requires_grad_() for _ in range(2))
    result, mean, variance = batch_norm_activation(x.requires_grad_(), residual, weight, bias, 1e-5, activation)
    of_x, of_weight = torch.autograd.grad(result, (x, weight), torch.ones_like(result))
    bad = torch.arange(8, device=DEVICE) == 3
    for found in (result, of_x):
        assert torch.equal(found.isnan().all((0, 2, 3)), bad)
        assert torch.equal(~found.isfinite().all((0, 2, 3)), bad)
    for found in (mean, variance, of_weight):
        assert torch.equal(~found.isfinite(), bad)


@pytest.mark.parametrize("activation", ["relu", "relu6", "hardswish"])
def test_an_infinite_gradient_where_the_activation_is_flat_has_no_effect(activation: str) -> None:
    x = torch.tensor([-9.0, -9.0, 1.0, 9.0, 9.0, 1.0], device=DEVICE).view(6, 1, 1, 1).half()
    bias = torch.full((1,), -6.0, device=DEVICE)
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    grad = torch.ones_like(x)
    grad[0] = torch.inf
    found, expected = (
        torch.autograd.grad(function(x, None, None, bias, 1e-5, activation), x, grad)[0]
        for function in (lambda *given: batch_norm_activation(*given)[0], reference_in_float)
    )
    assert expected.isfinite().all()
    torch.testing.assert_close(found, expected)


def test_equal_values_have_variance_zero_and_become_the_bias() -> None:
    x = torch.full((2, 3, 4, 5), 0.1, dtype=torch.bfloat16, device=DEVICE).to(memory_format=torch.channels_last)
    bias = torch.tensor([0.5, -1.0, 2.0], device=DEVICE)
    result, mean, variance = batch_norm_activation(x, None, None, bias, 1e-5)
    assert torch.equal(variance, torch.zeros_like(variance))
    assert torch.equal(mean, x.float()[0, :, 0, 0])
    assert torch.equal(result, bias.bfloat16().view(1, 3, 1, 1).expand_as(result))


@pytest.mark.skipif(
    not INTERPRETED, reason="needs more pixels than a GPU has memory for; Triton's interpreter needs none"
)
def test_parts_are_joined_where_pixels_exceed_31_bits() -> None:
    from mezzo.kernels._batch_norm_kernels import join_statistics_kernel

    share, parts = 2**30, torch.tensor([[[1.0], [8.0]], [[2.0], [8.0]], [[9.0], [8.0]]])
    found = torch.empty(3, 1)
    # The last of three programs has one pixel only, so it does not count.
    join_statistics_kernel[(1,)](parts, found, 3, 2 * share + 1, share, 0.0, CHANNELS=1, PARTS=4, BLOCK=8)
    torch.testing.assert_close(found[0, 0], torch.tensor(1.5))
    torch.testing.assert_close(found[2, 0], torch.tensor(0.25), rtol=1e-5, atol=0)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # opcheck's own reading, since torch 2.14
def test_the_registered_operators_keep_torchs_rules() -> None:
    x = make(2, 8, 3, 5, dtype=torch.float32).requires_grad_()
    weight, bias = (make(8, dtype=torch.float32).requires_grad_() for _ in range(2))
    residual = make(2, 8, 3, 5, dtype=torch.float32).requires_grad_()
    grad = make(2, 8, 3, 5, dtype=torch.float32)
    operators = torch.ops.mezzo
    torch.library.opcheck(operators.batch_norm.default, (x, residual, weight, bias, 1e-5, "relu"))
    torch.library.opcheck(operators.batch_norm.default, (x, None, None, None, 1e-5, "silu"))
    result, statistics = operators.batch_norm(x.detach(), residual.detach(), weight.detach(), None, 1e-5, "relu")
    for given in (result, None):
        arguments = (grad, x.detach(), given, weight.detach(), None, statistics, "relu")
        torch.library.opcheck(operators.batch_norm_backward.default, arguments)


def test_a_second_derivative_is_torchs() -> None:
    torch.manual_seed(3)
    x = make(2, 4, 3, 3, dtype=torch.float32).requires_grad_()
    weight = make(4, dtype=torch.float32).requires_grad_()
    residual = make(2, 4, 3, 3, dtype=torch.float32).requires_grad_()

    def second(function) -> Tensor:
        result = function(x, residual, weight, None, 1e-5, "relu")
        result = result[0] if isinstance(result, tuple) else result
        grads = torch.autograd.grad(result.pow(3).sum(), (x, residual, weight), create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in grads), x)[0]

    torch.testing.assert_close(second(batch_norm_activation), second(reference), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{"use_promote": False}, {"custom_white_list": ["add", "mul", "sub"]}])
def test_a_policy_does_not_change_the_arithmetic_inside(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x, weight, bias = make(2, 8, 4, 4, dtype=torch.float16, shift=1.5), *torch.randn(2, 8, device=DEVICE)

    def results() -> list[Tensor]:
        given = [tensor.detach().clone().requires_grad_() for tensor in (x, weight, bias)]
        result, mean, variance = batch_norm_activation(given[0], None, *given[1:], 1e-3, "silu")
        return [result, mean, variance, *torch.autograd.grad(result, given, x)]

    expected = results()
    with auto_cast(policy=Policy.create("O2", torch.float16, **options)):
        found = results()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
