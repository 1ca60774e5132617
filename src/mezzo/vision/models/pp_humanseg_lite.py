"""PP-HumanSeg-lite: shuffle blocks and a small decoder, for portraits on a phone."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from mezzo.vision.models._blocks import ConvBNReLU, SeparableConvBNReLU, init_small, join, shuffle_channels
from mezzo.vision.models._registry import register_model
from mezzo.vision.models._resize import resize


class _ShuffleBlock(nn.Module):
    """Two paths with half of the output channels each, concatenated and shuffled."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        half = out_channels // 2
        self._splits = stride == 1
        # Unused with stride 1, but published weights contain it.
        self._depthwise_separable_0 = SeparableConvBNReLU(in_channels, half, stride=stride)
        self._conv = ConvBNReLU(half if self._splits else in_channels, half, 1)
        self._depthwise_separable_1 = SeparableConvBNReLU(half, half, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        if self._splits:
            first, second = x.chunk(2, dim=1)
        else:
            first, second = self._depthwise_separable_0(x), x
        second = self._depthwise_separable_1(self._conv(second))
        return shuffle_channels(join(first, second), 2)


def _stage(in_channels: int, out_channels: int, blocks: int) -> nn.Sequential:
    parts = [_ShuffleBlock(in_channels, out_channels, stride=2)]
    parts += [_ShuffleBlock(out_channels, out_channels, stride=1) for _ in range(blocks - 1)]
    return nn.Sequential(*parts)


class PPHumanSegLite(nn.Module):
    """The network: images (n, 3, h, w) to a list of one tensor of logits (n, classes, h, w); they are never negative.

    Args:
        num_classes: Number of classes.
    """

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        self.conv_bn0 = ConvBNReLU(3, 36, 3, stride=2, padding=1)
        self.conv_bn1 = ConvBNReLU(36, 18, 1)
        self.block1 = _stage(36, 72, blocks=4)
        self.block2 = _stage(72, 144, blocks=8)
        self.depthwise_separable0 = SeparableConvBNReLU(144, 64)
        self.depthwise_separable1 = SeparableConvBNReLU(64 + 18, 64)
        # The logits also pass a batch norm and a ReLU.
        self.depthwise_separable2 = SeparableConvBNReLU(64, num_classes)
        init_small(self)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the logits."""
        stem = self.conv_bn0(x)
        shortcut = self.conv_bn1(stem)
        y = F.max_pool2d(stem, 3, stride=2, padding=1)
        y = self.depthwise_separable0(self.block2(self.block1(y)))
        y = self.depthwise_separable1(join(shortcut, resize(y, shortcut)))
        return [resize(self.depthwise_separable2(y), x)]


@register_model(
    task="segmentation",
    input_size=(192, 192),
    head_keys=("depthwise_separable2.piontwise_conv.",),
    aliases=("PPHumanSegLite", "pphumanseg_lite"),
)
def pp_humanseg_lite(num_classes: int = 2) -> nn.Module:
    """Return a new PP-HumanSeg-lite."""
    return PPHumanSegLite(num_classes)
