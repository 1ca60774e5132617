"""Parts of networks: padding as TensorFlow's 'same', and the gradient of a resize against autograd in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from mezzo.vision.models import torch_operators_only
from mezzo.vision.models._blocks import pad_same
from mezzo.vision.models._resize import _Enlarged, resize, resize_gradient

SIZES = st.integers(1, 9)
LAYOUTS = [torch.contiguous_format, torch.channels_last]


def gradient_of_torch(grad: Tensor, height: int, width: int) -> Tensor:
    x = torch.zeros(*grad.shape[:2], height, width, dtype=grad.dtype, device=grad.device, requires_grad=True)
    F.interpolate(x, size=grad.shape[-2:], mode="bilinear", align_corners=False).backward(grad)
    assert x.grad is not None
    return x.grad


@settings(deadline=None)
@given(SIZES, SIZES, st.integers(1, 20), st.integers(1, 20), st.integers(1, 3), st.sampled_from(LAYOUTS))
def test_the_gradient_is_torchs(
    height: int, width: int, to_height: int, to_width: int, channels: int, layout: torch.memory_format
) -> None:
    grad = torch.randn(2, channels, to_height, to_width, dtype=torch.float64).to(memory_format=layout)
    right = gradient_of_torch(grad, height, width)
    # the weights of the matrices are computed in float32: 2^-24 each, and a sum of up to 400 of them
    torch.testing.assert_close(resize_gradient(grad, height, width), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_lies_as_it_came(layout: torch.memory_format) -> None:
    grad = torch.randn(2, 5, 12, 16).to(memory_format=layout)
    assert resize_gradient(grad, 3, 4).is_contiguous(memory_format=layout)


def test_half_gradients_are_added_in_float32() -> None:
    # 1024 ones and the weights of an enlargement by 32: added in half one by one, the sum stops growing at 2048 units
    grad = torch.full((1, 1, 64, 64), 1.0).half()
    found = resize_gradient(grad, 2, 2)
    assert found.dtype == torch.float16
    assert torch.equal(found, torch.full((1, 1, 2, 2), 1024.0).half())


def test_the_function_is_differentiable_twice() -> None:
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    # eps and limits as the float32 weights of the backward allow
    assert torch.autograd.gradcheck(lambda x: _Enlarged.apply(x, 7, 8), x, atol=1e-5)
    assert torch.autograd.gradgradcheck(lambda x: _Enlarged.apply(x, 7, 8) ** 2, x, atol=1e-4)


def test_the_gradient_has_the_dtype_of_the_input_where_a_region_widens_it() -> None:
    x = torch.randn(1, 2, 3, 4, dtype=torch.bfloat16, requires_grad=True)
    _Enlarged.apply(x, 6, 8).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16


def test_the_function_works_under_vmap() -> None:
    x = torch.randn(3, 1, 2, 3, 4, dtype=torch.float64)
    gradients = torch.func.vmap(torch.func.grad(lambda x: (_Enlarged.apply(x, 6, 8) ** 2).sum()))(x)
    right = torch.stack(
        [torch.func.grad(lambda x: (F.interpolate(x, size=(6, 8), mode="bilinear") ** 2).sum())(one) for one in x]
    )
    torch.testing.assert_close(gradients, right, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_graph", [False, True])
def test_on_cuda_the_gradient_is_torchs_and_the_same_every_time(layout: torch.memory_format, is_graph: bool) -> None:
    like = torch.empty(1, 1, 96, 160, device="cuda")
    x = torch.randn(4, 11, 12, 20, device="cuda").to(memory_format=layout).requires_grad_()
    grad = torch.randn(4, 11, 96, 160, device="cuda")

    def found() -> Tensor:
        (gradient,) = torch.autograd.grad(resize(x, like), x, grad)
        return gradient

    if is_graph:  # the first use of this size: nothing made inside a graph may stay for later
        from mezzo.vision.models import _resize

        _resize._cached_weights.cache_clear()
        stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            kept = found()
        assert _resize._cached_weights.cache_info().currsize == 0
        graph.replay()
    else:
        kept = found()
    # sums of up to 256 products in float32, in another order
    torch.testing.assert_close(kept, gradient_of_torch(grad, 12, 20), rtol=1e-4, atol=1e-4)
    assert torch.equal(kept, found())
    assert "Enlarged" in type(resize(x, like).grad_fn).__name__


@pytest.mark.gpu
def test_on_cuda_the_switch_gives_torchs_own_resize() -> None:
    x = torch.randn(1, 2, 4, 4, device="cuda", requires_grad=True)
    like = torch.empty(1, 1, 8, 8)
    with torch_operators_only():
        with torch_operators_only():
            pass
        assert "UpsampleBilinear2D" in type(resize(x, like).grad_fn).__name__
    assert "Enlarged" in type(resize(x, like).grad_fn).__name__


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 7), st.integers(1, 5))
def test_a_convolution_gives_the_size_over_the_stride_and_the_smaller_half_is_in_front(
    height: int, width: int, kernel: int, stride: int
) -> None:
    x = torch.ones(1, 1, height, width)
    padded = pad_same(x, kernel, stride)
    for axis, size in ((2, height), (3, width)):
        total = max((-(-size // stride) - 1) * stride + kernel - size, 0)  # TensorFlow's formula
        assert padded.shape[axis] == size + total
        ones = padded.sum(dim=5 - axis).flatten().nonzero()
        assert ones[0] == total // 2
