"""Base classes of layers cover what rules mean by them."""

import pytest
import torch
from torch import nn

from mezzo._torch import layers


@pytest.mark.parametrize(
    ("base", "kinds", "others"),
    [
        (layers.ConvNd, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d), (nn.Linear,)),
        (layers.BatchNorm, (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm), (nn.InstanceNorm2d, nn.LayerNorm)),
        (layers.InstanceNorm, (nn.InstanceNorm1d, nn.InstanceNorm2d), (nn.BatchNorm2d,)),
        (layers.NormBase, (nn.BatchNorm2d, nn.InstanceNorm2d, nn.SyncBatchNorm), (nn.GroupNorm,)),
        (layers.DropoutNd, (nn.Dropout, nn.Dropout2d, nn.AlphaDropout), (nn.Identity,)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_base_class_has_these_layers(base: type, kinds: tuple[type, ...], others: tuple[type, ...]) -> None:
    assert all(issubclass(kind, base) for kind in kinds)
    assert not any(issubclass(kind, base) for kind in others)


@pytest.mark.parametrize("mode", ["zeros", "reflect"])
def test_a_convolution_with_another_weight_keeps_stride_and_padding(mode: str) -> None:
    layer = nn.Conv2d(1, 1, 3, stride=2, padding=1, padding_mode=mode)
    x = torch.randn(1, 1, 6, 6)
    assert torch.equal(layers.convolve(layer, x, layer.weight, layer.bias), layer(x))
    assert layers.convolve(layer, x, torch.ones(5, 1, 3, 3), None).shape == (1, 5, 3, 3)
