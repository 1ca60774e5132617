"""Convolutions and their gradients by our kernels: on a GPU, or in Triton's interpreter."""

import os

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from mezzo.kernels import (
    _convolutions,
    depthwise_conv,
    depthwise_input_grad,
    depthwise_weight_grad,
    narrow_weight_grad,
)
from mezzo.static._convolutions import use_own_convolutions

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else pytest.mark.gpu
#: Half a unit; Triton's interpreter cuts a bfloat16 off instead of rounding it, which is up to a whole one.
ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-7 if INTERPRETED else 2**-8}


Pair = tuple[int, int]
DEPTHWISE = pytest.mark.parametrize(
    ("channels", "kernel", "stride", "padding", "dilation", "size"),
    [
        (3, (3, 3), (1, 1), (1, 1), (1, 1), (5, 6)),
        (20, (3, 3), (2, 2), (1, 1), (1, 1), (7, 8)),
        (16, (5, 5), (2, 2), (2, 2), (1, 1), (9, 9)),
        (8, (3, 5), (2, 1), (0, 2), (1, 1), (8, 7)),  # nothing is equal in both directions
        (70, (3, 3), (3, 3), (1, 1), (1, 1), (10, 10)),  # the last row and column are met by no tap
        (4, (1, 1), (2, 2), (0, 0), (1, 1), (5, 5)),
        (16, (3, 3), (1, 1), (2, 2), (2, 2), (9, 8)),
        (40, (3, 3), (1, 1), (7, 7), (7, 7), (6, 9)),  # in one direction only the middle tap meets the image
        (8, (3, 2), (2, 1), (1, 3), (2, 5), (9, 11)),
    ],
)


def forward(
    x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair, bias: Tensor | None = None
) -> Tensor:
    """Return a depthwise convolution in float64, on the CPU."""
    x, weight = x.double().cpu(), weight.double().cpu()
    bias = None if bias is None else bias.double().cpu()
    return F.conv2d(x, weight, bias, stride, padding, dilation, groups=x.shape[1])


def gradients(
    grad: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair
) -> tuple[Tensor, Tensor]:
    """Return the gradients of input and weight in float64, on the CPU."""
    values = (grad.double().cpu(), x.double().cpu(), weight.double().cpu(), None)
    geometry = (stride, padding, dilation, False, [0, 0], x.shape[1])
    return torch.ops.aten.convolution_backward(*values, *geometry, [True, True, False])[:2]


def make(channels: int, kernel: Pair, size: Pair, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, channels, *size, device=DEVICE).to(dtype)
    return x, torch.randn(channels, 1, *kernel, device=DEVICE).to(dtype)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", list(ROUNDING))
@DEPTHWISE
def test_a_depthwise_convolution_is_that_of_float64(
    channels: int, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, size: Pair, dtype: torch.dtype,
    has_bias: bool,
) -> None:  # fmt: skip
    """Sums are float32, whose own error over 25 taps is far below, and rounded once."""
    x, weight = make(channels, kernel, size, dtype)
    bias = torch.randn(channels, device=DEVICE).to(dtype) if has_bias else None
    expected = forward(x, weight, stride, padding, dilation, bias)
    for given in (x, x.to(memory_format=torch.channels_last)):
        result = depthwise_conv(given, weight, bias, list(stride), list(padding), list(dilation))
        assert result.dtype is dtype
        assert result.is_contiguous(memory_format=torch.channels_last)
        error = (result.double().cpu() - expected).abs()
        assert (error <= ROUNDING[dtype] * expected.abs() + 1e-6).all()


@pytest.mark.parametrize("dtype", list(ROUNDING))
@DEPTHWISE
def test_the_gradient_is_that_of_float64(
    channels: int, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, size: Pair, dtype: torch.dtype
) -> None:
    """Sums are float32, whose own error over 25 taps is far below, and rounded once."""
    x, weight = make(channels, kernel, size, dtype)
    grad = torch.randn(forward(x, weight, stride, padding, dilation).shape, device=DEVICE).to(dtype)
    expected = gradients(grad, x, weight, stride, padding, dilation)[0]
    for given in (grad, grad.to(memory_format=torch.channels_last)):
        result = depthwise_input_grad(given, weight, *size, list(stride), list(padding), list(dilation))
        assert result.dtype is dtype
        assert result.is_contiguous(memory_format=torch.channels_last)
        error = (result.double().cpu() - expected).abs()
        assert (error <= ROUNDING[dtype] * expected.abs() + 1e-6).all()


@pytest.mark.parametrize("dtype", list(ROUNDING))
@DEPTHWISE
def test_the_gradient_of_a_depthwise_weight_is_that_of_float64(
    channels: int, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, size: Pair, dtype: torch.dtype
) -> None:
    """Products of two halves are exact in float32; each of n additions adds at most 2**-24 of the sum of magnitudes."""
    x, weight = make(channels, kernel, size, dtype)
    grad = torch.randn(forward(x, weight, stride, padding, dilation).shape, device=DEVICE).to(dtype)
    expected = gradients(grad, x, weight, stride, padding, dilation)[1]
    magnitudes = gradients(grad.abs(), x.abs(), weight, stride, padding, dilation)[1]
    additions = grad.numel() // channels
    for layout in (torch.contiguous_format, torch.channels_last):
        given = (grad.to(memory_format=layout), x.to(memory_format=layout))
        result = depthwise_weight_grad(*given, list(kernel), list(stride), list(padding), list(dilation))
        assert result.dtype is dtype
        assert result.shape == weight.shape
        error = (result.double().cpu() - expected).abs()
        assert (error <= ROUNDING[dtype] * expected.abs() + additions * 2**-24 * magnitudes + 1e-7).all()


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize(
    ("channels", "out_channels", "kernel", "stride", "padding", "size"),
    [
        (3, 16, (3, 3), (2, 2), (1, 1), (9, 9)),
        (4, 20, (3, 3), (1, 1), (1, 1), (8, 11)),
        (1, 5, (3, 5), (2, 1), (0, 2), (8, 7)),  # nothing is equal in both directions
        (3, 128, (1, 1), (1, 1), (0, 0), (4, 4)),
    ],
)
def test_the_weights_gradient_is_that_of_float64(
    channels: int, out_channels: int, kernel: tuple, stride: tuple, padding: tuple, size: tuple, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Products of two halves are exact in float32; each of n additions adds at most 2**-24 of the sum of magnitudes."""
    if INTERPRETED and dtype is torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as whole numbers")
    monkeypatch.setattr(_convolutions, "_SLICES", 3)
    torch.manual_seed(0)
    out = [(s + 2 * p - k) // step + 1 for s, p, k, step in zip(size, padding, kernel, stride, strict=True)]
    grad = torch.randn(3, out_channels, *out, device=DEVICE).to(dtype)
    x = torch.randn(3, channels, *size, device=DEVICE).to(dtype)

    def reference_of(grad: Tensor, x: Tensor) -> Tensor:
        weight = torch.zeros(out_channels, channels, *kernel, dtype=torch.float64)
        arguments = (grad.double().cpu(), x.double().cpu(), weight, None, stride, padding, [1, 1], False, [0, 0], 1)
        return torch.ops.aten.convolution_backward(*arguments, [False, True, False])[1]

    expected, magnitudes = reference_of(grad, x), reference_of(grad.abs(), x.abs())
    additions = 3 * out[0] * out[1]
    for layout in (torch.contiguous_format, torch.channels_last):
        given = (grad.to(memory_format=layout), x.to(memory_format=layout))
        result = narrow_weight_grad(*given, list(kernel), list(stride), list(padding))
        assert result.dtype is dtype
        assert result.shape == expected.shape
        assert result.permute(0, 2, 3, 1).is_contiguous()
        error = (result.double().cpu() - expected).abs()
        assert (error <= ROUNDING[dtype] * expected.abs() + additions * 2**-24 * magnitudes + 1e-7).all()


def test_no_images_give_a_gradient_of_zero() -> None:
    grad, x = (torch.empty(0, n, 4, 4, device=DEVICE, dtype=torch.float16) for n in (16, 3))
    assert not narrow_weight_grad(grad, x, [3, 3], [1, 1], [1, 1]).any()
    assert not depthwise_weight_grad(grad, grad, [3, 3], [1, 1], [2, 2], [2, 2]).any()
    weight = torch.ones(16, 1, 3, 3, device=DEVICE, dtype=torch.float16)
    assert depthwise_conv(grad, weight, None, [1, 1], [2, 2], [2, 2]).shape == grad.shape


class Net(nn.Module):
    """A narrow convolution and a plain one, and depthwise ones of which cuDNN is slow at some."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(3, 8, 3, padding=1)
        self.plain = nn.Conv2d(8, 16, 1)
        self.strided = nn.Conv2d(16, 16, 3, stride=2, padding=1, groups=16)
        self.large = nn.Conv2d(16, 16, 5, padding=2, groups=16)
        self.dilated = nn.Conv2d(16, 16, 3, padding=2, dilation=2, groups=16)
        self.small = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False)
        self.mirrored = nn.Conv2d(16, 16, (7, 6), padding=(3, 1), groups=16)

    def forward(self, x: Tensor) -> Tensor:
        return self.mirrored(self.small(self.dilated(self.large(self.strided(self.plain(self.narrow(x)))))))


@pytest.mark.parametrize(("layout", "ours"), [(torch.channels_last, 6), (torch.contiguous_format, 0)])
def test_a_graph_gets_our_kernels_where_cudnn_is_slow_and_gives_the_same(
    layout: torch.memory_format, ours: int
) -> None:
    torch.manual_seed(0)
    net = Net().to(DEVICE, torch.float16).to(memory_format=layout)
    x = torch.randn(2, 3, 8, 8, device=DEVICE, dtype=torch.float16).to(memory_format=layout)
    params = dict(net.named_parameters())

    def gradients(x: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(params, values, strict=True))
        loss = torch.func.functional_call(net, named, (x,)).float().square().sum()
        return torch.autograd.grad(loss, values)

    values = [p.detach().requires_grad_() for p in params.values()]
    graph = make_fx(gradients)(x, *values)
    expected = graph(x, *values)
    assert use_own_convolutions(graph.graph) == (ours + 1 if ours else 0), "one more is a forward convolution"
    graph.graph.lint()
    graph.recompile()
    names = [str(node.target) for node in graph.graph.nodes]
    assert sum(name.startswith("mezzo.") for name in names) == ours
    assert names.count("mezzo.narrow_weight_grad.default") == (ours > 0)
    assert names.count("prims.rev.default") == (ours > 0)
    for node in graph.graph.nodes:  # strides that Inductor must keep, otherwise each operator copies its input
        if str(node.target).startswith("mezzo."):
            (first, *_), _ = node.meta["eager_input_vals"]
            assert first.is_contiguous(memory_format=torch.channels_last)
    for seen, wanted in zip(graph(x, *values), expected, strict=True):
        # a chain of seven layers whose sums are rounded to half
        torch.testing.assert_close(seen, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("options", "ours"), [({"dilation": 2}, 3), ({"dilation": 2, "kernel_size": 9}, 0)])
def test_kernels_with_many_taps_stay_cudnns(options: dict[str, int], ours: int) -> None:
    """Triton writes each tap out: 21x21 of them compile for minutes."""
    net = nn.Conv2d(**{"in_channels": 8, "out_channels": 8, "kernel_size": 3, "groups": 8, **options})
    net.to(DEVICE, torch.float16)
    x = torch.randn(1, 8, 24, 24, device=DEVICE, dtype=torch.float16).to(memory_format=torch.channels_last)

    def gradients(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y = torch.func.functional_call(net, {"weight": weight, "bias": net.bias.detach()}, (x,))
        return torch.autograd.grad(y, (x, weight), torch.ones_like(y))

    graph = make_fx(gradients)(x.requires_grad_(), net.weight.detach().requires_grad_())
    assert use_own_convolutions(graph.graph) == ours


def test_padding_as_wide_as_a_large_kernel_keeps_the_gradient_of_torch() -> None:
    """The padding of its forward convolution would be negative."""
    torch.manual_seed(0)
    x = torch.randn(1, 8, 9, 9, device=DEVICE, dtype=torch.float16).to(memory_format=torch.channels_last)
    weight = torch.randn(8, 1, 7, 7, device=DEVICE, dtype=torch.float16)

    def gradient(x: Tensor) -> Tensor:
        y = F.conv2d(x.requires_grad_(), weight, padding=(7, 3), groups=8)
        return torch.autograd.grad(y, x, torch.ones_like(y))[0]

    graph = make_fx(gradient)(x)
    assert use_own_convolutions(graph.graph) == 0
