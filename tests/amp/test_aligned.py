"""Linear layers with an odd number of outputs: `prepare(fuse=True)` pads their products on CUDA."""

import copy

import pytest
import torch
from torch import nn

import mezzo

ODD = 1029


def make(bias: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.Linear(24, ODD, bias=bias))


def test_only_large_odd_layers_are_padded_and_their_state_stays() -> None:
    net = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 1031), nn.Linear(1031, 1024), nn.Linear(1024, 7))
    keys, weight = list(net.state_dict()), net[1].weight
    precision = mezzo.Precision("O2", "bfloat16")
    precision.prepare(net, fuse=True)
    assert [type(layer).__name__ for layer in net] == ["Linear", "AlignedLinear", "Linear", "Linear"]
    assert list(net.state_dict()) == keys
    assert net[1].weight is weight
    assert [part.name for part in precision.fused] == ["1"]
    assert type(copy.deepcopy(net)[1]).__name__ == "AlignedLinear"


def test_without_fuse_nothing_is_padded() -> None:
    net = make(bias=False)
    mezzo.Precision("O2", "bfloat16").prepare(net)
    assert type(net[1]) is nn.Linear


@pytest.mark.parametrize("bias", [True, False])
def test_on_a_cpu_it_is_the_plain_layer(bias: bool) -> None:
    net, x = make(bias), torch.randn(5, 16)
    expected = net(x)
    mezzo.Precision("O1", half_weights=False).prepare(net, fuse=True)
    assert torch.equal(net(x), expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [(5, 24), (2, 3, 24)])
def test_the_padded_product_and_its_gradients_are_those_of_float64(shape: tuple[int, ...], device: str) -> None:
    from mezzo.amp._aligned import _AlignedProduct

    x = torch.randn(shape, device=device).half().requires_grad_()
    weight = torch.randn(ODD, 24, device=device).half().requires_grad_()
    bias = torch.randn(ODD, device=device).half().requires_grad_()
    result = _AlignedProduct.apply(x, weight, bias)
    assert result.shape == (*shape[:-1], ODD)
    assert result.stride(-2) % 8 == 0
    grad = torch.randn(result.shape, device=device).half()
    result.backward(grad)
    wide_x, wide_weight, wide_bias = (t.detach().double().requires_grad_() for t in (x, weight, bias))
    expected = nn.functional.linear(wide_x, wide_weight, wide_bias)
    expected.backward(grad.double())
    # sums of 24 or 1029 products with float32 accumulation, rounded to half at the end
    for found, right in (
        (result, expected),
        (x.grad, wide_x.grad),
        (weight.grad, wide_weight.grad),
        (bias.grad, wide_bias.grad),
    ):
        assert found is not None
        assert right is not None
        assert ((found.double() - right).abs() <= 2**-10 * right.abs() + 2**-10).all()


def test_the_result_may_be_changed_in_place() -> None:
    from mezzo.amp._aligned import _AlignedProduct

    x, weight = torch.randn(5, 24), torch.randn(ODD, 24, requires_grad=True)
    logits = _AlignedProduct.apply(x, weight, None)
    logits /= 2  # a temperature
    logits[:, 7] = 0
    logits.sum().backward()
    expected = (x.sum(0) / 2).expand(ODD, 24).clone()
    expected[7] = 0
    torch.testing.assert_close(weight.grad, expected)


def test_calls_inside_of_torch_func_and_forward_ad_take_the_plain_layer() -> None:
    net = nn.Sequential(nn.Linear(24, ODD, bias=False)).half()
    mezzo.Precision("O0").prepare(net, fuse=True)
    layer, x = net[0], torch.randn(5, 24).half()
    assert layer._is_half(x)
    found = []
    torch.func.grad(lambda given: (found.append(layer._is_half(given)), given.sum())[1])(x)
    with torch.autograd.forward_ad.dual_level():
        found.append(layer._is_half(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))))
    assert found == [False, False]


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [True, False])
def test_on_cuda_a_fused_head_trains_as_the_plain_one(bias: bool) -> None:
    losses = []
    for fuse in (False, True):
        net = make(bias).cuda()
        precision = mezzo.Precision("O2", "bfloat16")
        net, optimizer = precision.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), fuse=fuse)
        x, y = torch.randn(64, 16, device="cuda"), torch.randint(ODD, (64,), device="cuda")
        for _ in range(5):
            with precision.autocast():
                loss = nn.functional.cross_entropy(net(x), y)
            precision.backward(loss)
            precision.step(optimizer)
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)  # bfloat16: 2^-8 of logits, averaged over 64 rows
