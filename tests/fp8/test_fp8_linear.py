"""The FP8 linear operator against float64 on the rounded operands: forward, and the three gradients."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.fp8 import (
    E4M3,
    FORMATS,
    HEADROOM,
    Fp8Recipe,
    amax_of,
    fp8_linear,
    recipe_to_text,
    refuse_without_fp8,
    round_to,
    scale_for,
    why_no_fp8,
)
from mezzo.optim import attach_master

EMULATED: dict[str, Any] = {"emulate": True}
RECIPES = [
    Fp8Recipe(**EMULATED),
    Fp8Recipe(gradient="e4m3", **EMULATED),
    Fp8Recipe(granularity="row", **EMULATED),
    Fp8Recipe(granularity="row", gradient="e4m3", **EMULATED),
]
# Both sum exact products in float32, in another order, and round to half once: a unit of the last place, rarely more.
ULP = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def on_grid(x: Tensor, dtype: torch.dtype, rows: bool, headroom: float = 1.0) -> Tensor:
    """Return a matrix as its FP8 numbers say, in float64."""
    scale = scale_for(amax_of(x, dim=1) if rows else amax_of(x), dtype, headroom)
    return round_to(x, scale, dtype).double() / scale.double()


def expected(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, recipe: Fp8Recipe) -> tuple[Tensor, ...]:
    rows = recipe.granularity == "row"
    headroom = 1.0 if rows else HEADROOM
    small = FORMATS[recipe.gradient]
    result = on_grid(x, E4M3, rows) @ on_grid(weight, E4M3, rows, headroom).t() + bias.double()
    of_input = on_grid(grad, small, rows) @ on_grid(weight.t(), E4M3, rows, headroom).t()
    of_weight = on_grid(grad.t(), small, rows) @ on_grid(x.t(), E4M3, rows).t()
    return result, of_input, of_weight, grad.double().sum(0)


def leaves(half: torch.dtype, rows: int = 48, inputs: int = 64, outputs: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(rows, inputs).to(half).requires_grad_()
    value = torch.randn(outputs, inputs) / 8
    weight = nn.Parameter(value.to(half))
    attach_master(weight, value)  # so that copies of it are kept
    bias = nn.Parameter(torch.randn(outputs).to(half))
    return x, weight, bias


def assert_near(found: Tensor, right: Tensor) -> None:
    assert found.isfinite().all()
    atol = ULP[found.dtype] * right.abs().max().item()
    torch.testing.assert_close(found.double(), right, rtol=ULP[found.dtype], atol=atol)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.gradient}-{r.granularity}")
def test_forward_and_gradients_are_products_of_the_rounded_operands(recipe: Fp8Recipe, half: torch.dtype) -> None:
    x, weight, bias = leaves(half)
    result = fp8_linear(x, weight, bias, recipe_to_text(recipe))
    grad = torch.randn(result.shape).to(half)
    result.backward(grad)
    assert x.grad is not None
    assert weight.grad is not None
    assert bias.grad is not None
    found = (result.detach(), x.grad, weight.grad, bias.grad)
    for value, right in zip(found, expected(x.detach(), weight.detach(), bias.detach(), grad, recipe), strict=True):
        assert value.dtype is half
        assert_near(value, right)


def test_fp8_is_really_used() -> None:
    x, weight, _ = leaves(torch.bfloat16)
    exact = x.double() @ weight.double().t()
    found = fp8_linear(x, weight, None, recipe_to_text(Fp8Recipe(**EMULATED))).double()
    error = ((found - exact).norm() / exact.norm()).item()
    # Two operands with errors up to 2^-4, 2^-4/sqrt(3) at the root mean square, averaged over a power of two: about 3.7 %.
    assert 0.02 < error < 0.06


def test_more_dimensions_are_folded_and_gradients_may_have_any_strides() -> None:
    recipe = recipe_to_text(Fp8Recipe(**EMULATED))
    x, weight, bias = leaves(torch.bfloat16)
    deep = x.detach().reshape(3, 16, 64).transpose(0, 1).requires_grad_()  # not contiguous
    result = fp8_linear(deep, weight, bias, recipe)
    assert result.shape == (16, 3, 32)
    flat = fp8_linear(deep.detach().reshape(48, 64), weight, bias, recipe)
    assert torch.equal(result.reshape(48, 32), flat)
    result.sum().backward()  # its gradient is one number, expanded
    assert deep.grad is not None
    right = on_grid(weight.detach().t(), E4M3, False, HEADROOM).sum(1)
    assert_near(deep.grad[5, 2], right)


@pytest.mark.parametrize("wanted", list(itertools.product([True, False], repeat=3)))
def test_only_gradients_that_are_wanted_are_made(wanted: tuple[bool, bool, bool]) -> None:
    tensors = [leaf.detach().requires_grad_(asked) for leaf, asked in zip(leaves(torch.bfloat16), wanted, strict=True)]
    result = fp8_linear(*tensors, recipe_to_text(Fp8Recipe(**EMULATED)))
    assert result.requires_grad == any(wanted)
    if any(wanted):
        result.sum().backward()
    assert [tensor.grad is not None for tensor in tensors] == list(wanted)


def test_the_input_is_kept_for_the_backward_in_one_byte_a_number_and_only_where_the_weight_learns() -> None:
    x, weight, bias = leaves(torch.bfloat16)
    recipe = recipe_to_text(Fp8Recipe(**EMULATED))
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fp8_linear(x, weight, bias, recipe)
    of_input = [tensor for tensor in kept if tensor.numel() == x.numel()]
    assert [(tensor.dtype, tuple(tensor.shape)) for tensor in of_input] == [(E4M3, (64, 48))]
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fp8_linear(x, weight.detach(), bias, recipe)
    assert not [tensor for tensor in kept if tensor.numel() == x.numel()]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("scaling", ["current", "delayed"])
def test_an_overflow_in_the_input_or_gradient_reaches_the_results(scaling: str, bad: float) -> None:
    recipe = recipe_to_text(Fp8Recipe(scaling=scaling, **EMULATED))
    x, weight, bias = leaves(torch.float16)
    fp8_linear(x, weight, bias, recipe).sum().backward()  # a first call, for the histories
    weight.grad = None
    result = fp8_linear(x, weight, bias, recipe)
    grad = torch.ones_like(result)
    grad[1, 2] = bad
    result.backward(grad)
    assert weight.grad is not None
    assert not weight.grad.isfinite().all()
    broken = x.detach().clone()
    broken[0, 0] = bad
    assert not fp8_linear(broken, weight, bias, recipe)[0].isfinite().any()


def test_delayed_scaling_follows_what_it_saw_before() -> None:
    recipe = Fp8Recipe(scaling="delayed", history=2, **EMULATED)
    x, weight, bias = leaves(torch.bfloat16)
    first = fp8_linear(x, weight, bias, recipe_to_text(recipe))
    current = fp8_linear(x, weight, bias, recipe_to_text(Fp8Recipe(**EMULATED)))
    assert torch.equal(first, current)  # the first call is scaled by itself
    grown = fp8_linear(x.detach() * 1000, weight, None, recipe_to_text(recipe))
    limit = 448 / scale_for(amax_of(x.detach()), E4M3)  # what the scale of the first call has room for
    cut = (x.detach().float() * 1000).clamp(-limit.item(), limit.item())
    rounded = on_grid(cut, E4M3, False)
    assert_near(grown, rounded @ on_grid(weight.detach(), E4M3, False, HEADROOM).t())


def test_a_device_without_fp8_gets_one_line_that_offers_emulation() -> None:
    x, weight, bias = leaves(torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"^level O3: a CPU .*fp8=\{'emulate': True\}.*$"):
        fp8_linear(x, weight, bias, recipe_to_text(Fp8Recipe()))


def test_a_gpu_below_ada_is_named_with_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA A100")
    device = torch.device("cuda", 99)  # what is known of a GPU is kept: one that no other test asks for
    assert "A100 has compute capability 8.0" in (why_no_fp8(device) or "")
    with pytest.raises(RuntimeError, match=r"A100.*fp8=\{'emulate': True\}"):
        refuse_without_fp8(device, emulate=False)
    refuse_without_fp8(device, emulate=True)


@pytest.mark.parametrize("recipe", RECIPES[:3:2], ids=["tensor", "row"])
def test_torch_finds_nothing_wrong_with_the_operator(recipe: Fp8Recipe) -> None:
    x, weight, bias = leaves(torch.bfloat16)
    arguments = (x, weight, bias, recipe_to_text(recipe), True, False)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.mezzo.fp8_linear.default, arguments, test_utils=checks)
    with torch.no_grad():
        torch.library.opcheck(
            torch.ops.mezzo.fp8_linear.default,
            (x, weight, None, recipe_to_text(recipe), False, False),
            test_utils=checks,
        )
