"""DeepLabV3+ on ResNet-vd: dilated convolutions at several rates, refined by early features."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from mezzo.vision.models._blocks import ConvBN, ConvBNReLU, SeparableConvBNReLU, init_default, join
from mezzo.vision.models._registry import register_model
from mezzo.vision.models._resize import resize

#: Strides and dilations of the four stages by output stride.
_STAGES = {
    8: ((1, 2, 1, 1), (1, 1, 2, 4)),
    16: ((1, 2, 2, 1), (1, 1, 1, 2)),
    32: ((1, 2, 2, 2), (1, 1, 1, 1)),
}
#: Additional dilation of the blocks of the last stage, if that stage is dilated.
_MULTI_GRID = (1, 2, 4)


class _VdBottleneck(nn.Module):
    """Residual block of 1x1, 3x3 and 1x1 convolutions."""

    def __init__(self, in_channels: int, planes: int, *, stride: int, dilation: int, project: bool) -> None:
        super().__init__()
        out_channels = 4 * planes
        self.conv0 = ConvBNReLU(in_channels, planes, 1)
        self.conv1 = ConvBNReLU(planes, planes, 3, stride=stride, padding=dilation, dilation=dilation)
        self.conv2 = ConvBN(planes, out_channels, 1)
        self._pools = stride == 2
        self.short = ConvBN(in_channels, out_channels, 1) if project else None

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        if self.short is not None:
            if self._pools:
                # At an odd edge the window is clipped, and the average is over the remaining pixels.
                shortcut = F.avg_pool2d(shortcut, 2, stride=2, ceil_mode=True, count_include_pad=False)
            shortcut = self.short(shortcut)
        return F.relu(self.conv2(self.conv1(self.conv0(x))) + shortcut)


class ResNetVd(nn.Module):
    """The backbone: images (n, 3, h, w) to the features of four stages, the first at 1/4.

    Args:
        blocks: Number of blocks in each of the four stages.
        output_stride: 8, 16 or 32: ratio of the image size to that of the last features.
    """

    channels = (256, 512, 1024, 2048)
    """Channels of the features, by stage."""

    def __init__(self, blocks: Sequence[int], output_stride: int = 8) -> None:
        super().__init__()
        if len(blocks) != len(self.channels):
            raise ValueError(f"ResNet has {len(self.channels)} stages; got block counts for {len(blocks)}")
        if output_stride not in _STAGES:
            raise ValueError(f"output_stride={output_stride}: must be one of {', '.join(map(str, _STAGES))}")
        strides, dilations = _STAGES[output_stride]
        self.conv1_1 = ConvBNReLU(3, 32, 3, stride=2, padding=1)
        self.conv1_2 = ConvBNReLU(32, 32, 3, padding=1)
        self.conv1_3 = ConvBNReLU(32, 64, 3, padding=1)
        in_channels = 64
        self._stages: list[list[str]] = []
        for stage, count in enumerate(blocks):
            names = [f"bb_{stage}_{i}" for i in range(count)]
            for i, name in enumerate(names):
                dilation = dilations[stage]
                if stage == 3 and dilation > 1:
                    dilation *= _MULTI_GRID[i % len(_MULTI_GRID)]
                block = _VdBottleneck(
                    in_channels,
                    self.channels[stage] // 4,
                    stride=strides[stage] if i == 0 else 1,
                    dilation=dilation,
                    project=i == 0,
                )
                self.add_module(name, block)
                in_channels = self.channels[stage]
            self._stages.append(names)
        init_default(self)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the features of all four stages."""
        x = F.max_pool2d(self.conv1_3(self.conv1_2(self.conv1_1(x))), 3, stride=2, padding=1)
        features: list[Tensor] = []
        for names in self._stages:
            for name in names:
                x = getattr(self, name)(x)
            features.append(x)
        return features


class _ASPP(nn.Module):
    """Atrous spatial pyramid pooling: convolutions at several dilations, and the global average."""

    def __init__(self, in_channels: int, channels: int, rates: Sequence[int], dropout: float) -> None:
        super().__init__()
        blocks: list[nn.Module] = [ConvBNReLU(in_channels, channels, 1, bias=True)]
        blocks += [SeparableConvBNReLU(in_channels, channels, dilation=rate, bias=True) for rate in rates]
        self.aspp_blocks = nn.ModuleList(blocks)
        self.global_avg_pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), ConvBNReLU(in_channels, channels, 1))
        self.conv_bn_relu = ConvBNReLU(channels * (len(blocks) + 1), channels, 1, bias=True)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        parts = [block(x) for block in self.aspp_blocks]
        parts.append(resize(self.global_avg_pool(x), x))
        features: Tensor = self.dropout(self.conv_bn_relu(join(*parts)))
        return features


class _DeepLabDecoder(nn.Module):
    """Combines early features with those of the ASPP, and computes the logits."""

    def __init__(self, in_channels: int, low_channels: int, num_classes: int) -> None:
        super().__init__()
        self.conv_bn_relu1 = ConvBNReLU(low_channels, 48, 1, bias=True)
        self.conv_bn_relu2 = SeparableConvBNReLU(in_channels + 48, 256, bias=True)
        self.conv_bn_relu3 = SeparableConvBNReLU(256, 256, bias=True)
        self.conv = nn.Conv2d(256, num_classes, 1)

    def forward(self, x: Tensor, low: Tensor) -> Tensor:
        low = self.conv_bn_relu1(low)
        x = join(resize(x, low), low)
        logits: Tensor = self.conv(self.conv_bn_relu3(self.conv_bn_relu2(x)))
        return logits


class _DeepLabHead(nn.Module):
    """ASPP on the last features, then the decoder with the first ones."""

    def __init__(self, channels: Sequence[int], num_classes: int, rates: Sequence[int], dropout: float) -> None:
        super().__init__()
        self.aspp = _ASPP(channels[-1], 256, rates, dropout)
        self.decoder = _DeepLabDecoder(256, channels[0], num_classes)
        init_default(self)

    def forward(self, features: list[Tensor]) -> Tensor:
        logits: Tensor = self.decoder(self.aspp(features[-1]), features[0])
        return logits


class DeepLabV3P(nn.Module):
    """The network: images (n, 3, h, w) to a list of one tensor of logits (n, classes, h, w).

    Args:
        backbone: Returns features from fine to coarse; the first and the last are used. See `ResNetVd`.
        num_classes: Number of classes.
        rates: Dilations of the ASPP. The defaults fit output stride 8; use half of them for 16.
        dropout: Probability of the dropout after the ASPP.
    """

    def __init__(
        self, backbone: ResNetVd, num_classes: int = 2, *, rates: Sequence[int] = (12, 24, 36), dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = _DeepLabHead(backbone.channels, num_classes, rates, dropout)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the logits."""
        return [resize(self.head(self.backbone(x)), x)]


def resnet50_vd(output_stride: int = 8) -> ResNetVd:
    """Return a new ResNet50-vd backbone."""
    return ResNetVd((3, 4, 6, 3), output_stride)


@register_model(
    task="segmentation",
    input_size=(512, 512),
    head_keys=("head.decoder.conv.",),
    aliases=("deeplabv3p_resnet50",),
)
def pp_humanseg_server(num_classes: int = 2, dropout: float = 0.1) -> nn.Module:
    """Return a new DeepLabV3+ on ResNet50-vd at output stride 8."""
    return DeepLabV3P(resnet50_vd(output_stride=8), num_classes, dropout=dropout)
