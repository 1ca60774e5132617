"""What is exported: one output of the wanted kind, and pooling that ONNX can say."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mezzo.amp import auto_cast, decorate
from mezzo.export._network import Deployable, PlainAdaptivePool, with_plain_pools


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 7), st.integers(1, 7))
def test_pooling_by_matrices_is_torchs(height: int, width: int, rows: int, columns: int) -> None:
    x = torch.randn(2, 3, height, width, dtype=torch.float64)
    right = nn.functional.adaptive_avg_pool2d(x, (rows, columns))
    # the matrices are made in float32: 2^-24 relative for each of up to 1600 terms
    torch.testing.assert_close(PlainAdaptivePool(rows, columns)(x), right, rtol=1e-6, atol=1e-6)


def test_pools_to_one_pixel_stay_and_others_are_replaced_in_a_copy() -> None:
    network = nn.Sequential(
        nn.AdaptiveAvgPool2d(2), nn.Sequential(nn.AdaptiveAvgPool2d(1)), nn.AdaptiveAvgPool2d((3, 1))
    )
    deployable = Deployable(network, "none")
    kinds = [type(part).__name__ for part in deployable.network.modules()]
    assert kinds == ["Sequential", "PlainAdaptivePool", "Sequential", "AdaptiveAvgPool2d", "PlainAdaptivePool"]
    assert isinstance(network[0], nn.AdaptiveAvgPool2d)


def test_a_pool_that_keeps_a_side_is_left_alone() -> None:
    kept = nn.Sequential(nn.AdaptiveAvgPool2d((None, 2)))
    assert isinstance(with_plain_pools(kept)[0], nn.AdaptiveAvgPool2d)  # type: ignore[index]


@pytest.mark.parametrize(
    ("output_op", "dtype", "shape"),
    [
        ("argmax", torch.int32, (2, 4, 4)),
        ("softmax", torch.float32, (2, 3, 4, 4)),
        ("none", torch.float32, (2, 3, 4, 4)),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_end_is_as_asked(output_op: str, dtype: torch.dtype, shape: tuple[int, ...], precision: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [self.conv(x), x]

    network = Net()
    x = torch.randn(2, 3, 4, 4)
    output = Deployable(network, output_op, precision)(x)  # type: ignore[arg-type]
    assert (output.dtype, tuple(output.shape)) == (dtype, shape)
    right = network(x)[0]
    if output_op == "softmax":
        torch.testing.assert_close(output, right.softmax(1), rtol=0.02, atol=0.02)  # bfloat16 has 8 bits
    assert network.conv.weight.dtype == torch.float32


def test_masters_are_exported_not_half_weights() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-5)
    decorate(network, optimizer, level="O2", dtype="bfloat16")
    with auto_cast(level="O2", dtype="bfloat16"):
        network(torch.randn(4, 3, 8, 8)).float().square().mean().backward()
    optimizer.step()
    masters = network.state_dict()
    assert not torch.equal(masters["0.weight"], network[0].weight.float())
    exported = Deployable(network, "none").network
    assert torch.equal(exported[0].weight, masters["0.weight"])  # type: ignore[index]
    assert network[0].weight.dtype == torch.bfloat16
