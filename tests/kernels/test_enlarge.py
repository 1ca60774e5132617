"""Bilinear enlargement: on a CPU by torch's operators, on a GPU or in Triton's interpreter by mezzo's kernels."""

import os
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from mezzo.kernels import enlarge_bilinear, enlarge_gradient

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LAYOUTS = [torch.contiguous_format, torch.channels_last]
#: Half a unit; Triton's interpreter cuts a bfloat16 off instead of rounding it, which is up to a whole one.
ROUNDING = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-7 if INTERPRETED else 2**-8}
SIZES = st.integers(1, 9)


def by_torch(x: Tensor, height: int, width: int) -> Tensor:
    """Return the result in float64, on the CPU."""
    return F.interpolate(x.double().cpu(), size=(height, width), mode="bilinear", align_corners=False)


def gradient_by_torch(grad: Tensor, height: int, width: int) -> Tensor:
    x = torch.zeros(*grad.shape[:2], height, width, dtype=torch.float64, requires_grad=True)
    by_torch(x, *grad.shape[-2:]).backward(grad.double().cpu())
    assert x.grad is not None
    return x.grad


def check(device: str, shape: tuple[int, int, int, int], size: tuple[int, int], layout: torch.memory_format) -> None:
    for dtype, rounding in ROUNDING.items():
        x = torch.randn(shape, device=device).to(dtype).to(memory_format=layout)
        result = enlarge_bilinear(x, *size)
        assert result.dtype is dtype
        assert result.is_contiguous(memory_format=layout)
        expected = by_torch(x, *size)
        # places of sources are float32 numbers: 2^-24 of up to 20, times differences of up to 8
        assert ((result.double().cpu() - expected).abs() <= rounding * expected.abs() + 2e-5).all()
        grad = torch.randn(*shape[:2], *size, device=device).to(dtype).to(memory_format=layout)
        found = enlarge_gradient(grad, *shape[2:])
        assert found.dtype is dtype
        assert found.is_contiguous(memory_format=layout)
        right = gradient_by_torch(grad, *shape[2:])
        # sums of up to 400 float32 products
        assert ((found.double().cpu() - right).abs() <= rounding * right.abs() + 1e-4).all()


@settings(deadline=None, max_examples=25)
@given(SIZES, SIZES, st.integers(1, 20), st.integers(1, 20), st.integers(1, 3), st.sampled_from(LAYOUTS))
def test_result_and_gradient_are_those_of_float64(
    height: int, width: int, to_height: int, to_width: int, channels: int, layout: torch.memory_format
) -> None:
    check("cpu", (2, channels, height, width), (to_height, to_width), layout)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [(96, 160), (352, 480), (13, 21), (12, 40)])
def test_on_cuda_they_are_those_of_float64(layout: torch.memory_format, size: tuple[int, int]) -> None:
    check("cuda", (3, 19, 12, 20), size, layout)


def test_half_gradients_are_added_in_float32() -> None:
    # 1024 ones and the weights of an enlargement by 32: added in half one by one, the sum stops growing at 2048 units
    grad = torch.full((1, 1, 64, 64), 1.0).half()
    found = enlarge_gradient(grad, 2, 2)
    assert torch.equal(found, torch.full((1, 1, 2, 2), 1024.0).half())


@pytest.mark.skipif(INTERPRETED, reason="gradcheck needs float64, which the kernels leave to torch")
def test_the_operator_is_differentiable_twice() -> None:
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: enlarge_bilinear(x, 7, 8), x)
    assert torch.autograd.gradgradcheck(lambda x: enlarge_bilinear(x, 7, 8) ** 2, x)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no fake tensors")
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # opcheck's own reading, since torch 2.14
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_and_autograd_rules_are_right(layout: torch.memory_format) -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=layout).requires_grad_()
    torch.library.opcheck(enlarge_bilinear, (x, 9, 7))


@pytest.mark.gpu
def test_on_cuda_the_gradient_is_the_same_every_time_and_in_a_cuda_graph() -> None:
    grad = torch.randn(4, 11, 96, 160, device="cuda").to(memory_format=torch.channels_last)
    first = enlarge_gradient(grad, 12, 20)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = enlarge_gradient(grad, 12, 20)
    graph.replay()
    assert torch.equal(first, kept)


@pytest.mark.skipif(not INTERPRETED, reason="no kernel is launched")
def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []
    monkeypatch.setattr("mezzo.kernels._enlarge.on_device", lambda device: nullcontext(entered.append(device)))
    x = torch.randn(1, 2, 3, 3, requires_grad=True)
    enlarge_bilinear(x, 6, 6).sum().backward()
    assert entered == [torch.device("cpu")] * 2  # forward and backward; Triton itself takes the current device
