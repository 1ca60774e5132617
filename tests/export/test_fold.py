"""Batch norms in convolutions: the same result without them."""

import pytest
import torch
from torch import Tensor, nn

from mezzo.export._files import trace
from mezzo.export._fold import fold_batch_norms


def calibrated(network: nn.Module) -> nn.Module:
    """Return a network whose norms are far from doing nothing."""
    torch.manual_seed(0)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = torch.randn(module.num_features)
            module.running_var = torch.rand(module.num_features) + 0.1
            if module.affine:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
    return network.double().eval()


def norms(network: nn.Module) -> int:
    return sum(isinstance(module, nn.BatchNorm2d) for module in network.modules())


class Wide(nn.Module):
    """Takes the exporter's float32 sample."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.network(x.double())
        return out


def check(network: nn.Module, left: int) -> None:
    wide = Wide(calibrated(network))
    better = fold_batch_norms(wide, trace(wide, (-1, 3, -1, -1)))
    x = torch.randn(2, 3, 12, 10)
    with torch.no_grad():
        torch.testing.assert_close(better(x), wide(x), rtol=1e-12, atol=1e-12)  # float64
    assert norms(better) == left


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(3, 6, 3, padding=1),
        nn.Conv2d(3, 6, 3, bias=False, stride=2),
        nn.Conv2d(3, 6, 1, groups=3),
        nn.Conv2d(3, 6, 3, padding="same"),
    ],
)
@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_behind_a_convolution_is_folded(conv: nn.Conv2d, affine: bool) -> None:
    check(nn.Sequential(conv, nn.BatchNorm2d(6, affine=affine), nn.ReLU()), left=0)


def test_a_norm_of_another_kind_stays() -> None:
    class Active(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu()

    check(nn.Sequential(nn.Conv2d(3, 6, 1), Active(6)), left=1)


def test_a_norm_behind_something_else_stays() -> None:
    check(nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1), nn.ReLU(), nn.BatchNorm2d(4)), left=2)


def test_a_convolution_whose_result_is_used_twice_stays() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            out: Tensor = self.norm(y) + y
            return out

    check(Twice(), left=1)


def test_modules_that_are_used_twice_stay() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.other = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.other(self.conv(self.norm(self.conv(x))))
            return out

    check(Shared(), left=2)


def test_the_network_itself_is_not_changed() -> None:
    network = Wide(calibrated(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))))
    weight = network.network[0].weight.clone()  # type: ignore[index,union-attr,operator]
    fold_batch_norms(network, trace(network, (-1, 3, -1, -1)))
    assert norms(network) == 1
    assert torch.equal(network.network[0].weight, weight)  # type: ignore[index,union-attr]
