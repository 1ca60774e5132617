"""Parts of networks: padding as TensorFlow's 'same', and resizing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from mezzo.kernels import torch_operators_only
from mezzo.vision.models._blocks import pad_same
from mezzo.vision.models._resize import resize

LAYOUTS = [torch.contiguous_format, torch.channels_last]


def gradient_of_torch(grad: Tensor, height: int, width: int) -> Tensor:
    x = torch.zeros(*grad.shape[:2], height, width, dtype=grad.dtype, device=grad.device, requires_grad=True)
    F.interpolate(x, size=grad.shape[-2:], mode="bilinear", align_corners=False).backward(grad)
    assert x.grad is not None
    return x.grad


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_cuda_the_gradient_of_a_resize_is_torchs_and_the_same_every_time(layout: torch.memory_format) -> None:
    like = torch.empty(1, 1, 96, 160, device="cuda")
    x = torch.randn(4, 11, 12, 20, device="cuda").to(memory_format=layout).requires_grad_()
    grad = torch.randn(4, 11, 96, 160, device="cuda")

    def found() -> Tensor:
        (gradient,) = torch.autograd.grad(resize(x, like), x, grad)
        return gradient

    # sums of up to 256 products in float32, in another order
    torch.testing.assert_close(found(), gradient_of_torch(grad, 12, 20), rtol=1e-4, atol=1e-4)
    assert torch.equal(found(), found())
    assert "enlarge" in type(resize(x, like).grad_fn).__name__


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_resize_works_under_vmap(device: str) -> None:
    x = torch.randn(3, 1, 2, 3, 4, dtype=torch.float64, device=device)
    like = torch.empty(1, 1, 6, 8, device=device)
    gradients = torch.func.vmap(torch.func.grad(lambda x: (resize(x, like) ** 2).sum()))(x)
    right = torch.stack(
        [torch.func.grad(lambda x: (F.interpolate(x, size=(6, 8), mode="bilinear") ** 2).sum())(one) for one in x]
    )
    torch.testing.assert_close(gradients, right, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_on_cuda_the_switch_gives_torchs_own_resize() -> None:
    x = torch.randn(1, 2, 4, 4, device="cuda", requires_grad=True)
    like = torch.empty(1, 1, 8, 8)
    with torch_operators_only():
        with torch_operators_only():
            pass
        assert "UpsampleBilinear2D" in type(resize(x, like).grad_fn).__name__
    assert "enlarge" in type(resize(x, like).grad_fn).__name__


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
