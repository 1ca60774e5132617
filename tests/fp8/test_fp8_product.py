"""One product of FP8 operands: emulated as exact arithmetic has it, and as torch's own operator computes it."""

import pytest
import torch
from torch import Tensor

from mezzo.fp8 import E4M3, E5M2, make_operand, multiply

HALVES = (torch.bfloat16, torch.float16)


def operands(dtype: torch.dtype, half: torch.dtype, by_row: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return FP8 numbers [48, 64] and [80, 64] and what undoes their scales."""
    left = make_operand(torch.randn(48, 64).to(half), dtype, by_row=by_row)
    right = make_operand(torch.randn(80, 64).to(half), by_row=by_row)
    return left.values, left.inverse, right.values, right.inverse


def exact(a: Tensor, a_inverse: Tensor, b: Tensor, b_inverse: Tensor) -> Tensor:
    """Return the product in float64."""
    return (a.double() * a_inverse.double()) @ (b.double() * b_inverse.double()).t()


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_emulation_is_the_exact_product_rounded_once(dtype: torch.dtype, by_row: bool, half: torch.dtype) -> None:
    parts, bias = operands(dtype, half, by_row), torch.randn(80).to(half)
    made = multiply(*parts, half, bias=bias, emulate=True)
    want = exact(*parts) + bias.double()
    assert made.dtype is half
    # Half a unit of the result, and what 64 float32 sums can be off where a result is near to a middle.
    torch.testing.assert_close(made.double(), want, rtol=0.51 * torch.finfo(half).eps, atol=1e-5)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_operator_of_torch_computes_what_emulation_does(
    with_bias: bool, dtype: torch.dtype, half: torch.dtype
) -> None:
    parts, bias = operands(dtype, half, by_row=False), torch.randn(80).to(half) if with_bias else None
    made = multiply(*parts, half, bias=bias)
    want = multiply(*parts, half, bias=bias, emulate=True)
    # Sums in another order: a result near to a middle is rounded the other way.
    torch.testing.assert_close(made, want, rtol=torch.finfo(half).eps, atol=1e-5)


def skip_without_rows() -> None:
    try:
        multiply(*operands(E4M3, torch.bfloat16, by_row=True), torch.bfloat16)
    except RuntimeError as error:
        if "per-tensor scaling for CPU" not in str(error):
            raise
        pytest.skip("this torch multiplies on a CPU with one scale a tensor alone")


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_by_row_each_row_and_column_has_its_scale(with_bias: bool, half: torch.dtype) -> None:
    skip_without_rows()
    parts, bias = operands(E5M2, half, by_row=True), torch.randn(80).to(half) if with_bias else None
    made = multiply(*parts, half, bias=bias)
    product = exact(*parts)
    want = product if bias is None else product + bias.double()
    # The product is made in bfloat16, then the bias is added and the sum rounded.
    bound = 2.0**-8 * (product.abs() + want.abs())
    assert made.dtype is half
    assert bool(((made.double() - want).abs() <= bound).all())


@pytest.mark.parametrize("by_row", [False, True])
def test_a_bias_may_have_strides(by_row: bool) -> None:
    if by_row:
        skip_without_rows()
    parts = operands(E4M3, torch.bfloat16, by_row)
    every_other = torch.randn(160).bfloat16()[::2]
    for bias in (every_other, torch.ones(1).bfloat16().expand(80)):
        made = multiply(*parts, torch.bfloat16, bias=bias)
        assert torch.equal(made, multiply(*parts, torch.bfloat16, bias=bias.contiguous()))
        torch.testing.assert_close(
            made.double(), exact(*parts) + bias.double(), rtol=2.0**-7, atol=2.0**-7 * 8
        )  # two roundings


@pytest.mark.parametrize(("by_row", "how"), [(False, "one scale"), (True, "a scale for each row")])
def test_what_a_library_does_not_do_is_said_in_one_line(
    by_row: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Tensor, **options: object) -> Tensor:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic(...`")

    monkeypatch.setattr("mezzo.fp8._product.scaled_mm", refuse)
    with pytest.raises(RuntimeError, match=rf"float8_e5m2.*float8_e4m3fn.*{how}"):
        multiply(*operands(E5M2, torch.bfloat16, by_row), torch.bfloat16)


def test_other_errors_of_a_product_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*args: Tensor, **options: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("mezzo.fp8._product.scaled_mm", run_out)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        multiply(*operands(E4M3, torch.bfloat16, False), torch.bfloat16)
