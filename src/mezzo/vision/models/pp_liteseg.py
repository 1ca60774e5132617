"""PP-LiteSeg on STDC: fuses three resolutions from coarse to fine with spatial attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mezzo.vision.models._blocks import ConvBN, ConvBNReLU, init_default, init_small, join
from mezzo.vision.models._registry import register_model
from mezzo.vision.models._resize import resize

_HEAD_KEYS = ("seg_heads.0.conv_out.", "seg_heads.1.conv_out.", "seg_heads.2.conv_out.")


class _ConvUnit(nn.Module):
    """Convolution, batch norm and ReLU, with the parameter names of STDC."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


class _STDCBlock(nn.Module):
    """Four units in sequence; their four outputs are concatenated."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        half, quarter, eighth = out_channels // 2, out_channels // 4, out_channels // 8
        self.conv_list = nn.ModuleList(
            [
                _ConvUnit(in_channels, half, 1),
                _ConvUnit(half, quarter, 3),
                _ConvUnit(quarter, eighth, 3),
                _ConvUnit(eighth, eighth, 3),
            ]
        )
        self.avd_layer: nn.Sequential | None = None
        if stride == 2:
            self.avd_layer = nn.Sequential(
                nn.Conv2d(half, half, 3, stride=2, padding=1, groups=half, bias=False), nn.BatchNorm2d(half)
            )

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.conv_list
        x = first(x)
        parts = [x]
        if self.avd_layer is not None:
            # The concatenated output is average-pooled, the input of the next unit is convolved.
            parts = [F.avg_pool2d(x, 3, stride=2, padding=1, count_include_pad=False)]
            x = self.avd_layer(x)
        for unit in others:
            x = unit(x)
            parts.append(x)
        return join(*parts)


class STDC(nn.Module):
    """The backbone: images (n, 3, h, w) to features at 1/8, 1/16 and 1/32.

    Args:
        blocks: Number of blocks in each of the three stages.
    """

    channels = (256, 512, 1024)
    """Channels of the features, from fine to coarse."""

    def __init__(self, blocks: Sequence[int]) -> None:
        super().__init__()
        if len(blocks) != len(self.channels):
            raise ValueError(f"STDC has {len(self.channels)} stages; got block counts for {len(blocks)}")
        parts: list[nn.Module] = [_ConvUnit(3, 32, 3, stride=2), _ConvUnit(32, 64, 3, stride=2)]
        last: list[int] = []
        in_channels = 64
        for count, out_channels in zip(blocks, self.channels, strict=True):
            for i in range(count):
                parts.append(_STDCBlock(in_channels, out_channels, stride=2 if i == 0 else 1))
                in_channels = out_channels
            last.append(len(parts) - 1)
        self.features = nn.Sequential(*parts)
        self._last = tuple(last)
        init_small(self)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the features, from fine to coarse."""
        features: list[Tensor] = []
        for i, part in enumerate(self.features):
            x = part(x)
            if i in self._last:
                features.append(x)
        return features


class _Context(nn.Module):
    """Pyramid pooling: sums averages over grids of several sizes."""

    def __init__(self, in_channels: int, channels: int, bins: Sequence[int]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(size), ConvBNReLU(in_channels, channels, 1, bias=True)) for size in bins
        )
        self.conv_out = ConvBNReLU(channels, channels, 3, padding=1, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        first, *others = (resize(stage(x), x) for stage in self.stages)
        total = first
        for part in others:
            total = total + part
        context: Tensor = self.conv_out(total)
        return context


class _Fusion(nn.Module):
    """Attention-weighted sum of fine and coarse features, with one weight per position."""

    _scale: Tensor

    def __init__(self, fine_channels: int, coarse_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv_x = ConvBNReLU(fine_channels, coarse_channels, 3, padding=1)
        self.conv_out = ConvBNReLU(coarse_channels, out_channels, 3, padding=1)
        self.conv_xy_atten = nn.Sequential(ConvBNReLU(4, 2, 3, padding=1), ConvBN(2, 1, 3, padding=1))
        # A constant that published weights contain.
        self.register_buffer("_scale", torch.ones(1))

    def forward(self, fine: Tensor, coarse: Tensor) -> Tensor:
        x = self.conv_x(fine)
        y = resize(coarse, x)
        planes = join(
            x.mean(dim=1, keepdim=True),
            x.amax(dim=1, keepdim=True),
            y.mean(dim=1, keepdim=True),
            y.amax(dim=1, keepdim=True),
        )
        share = torch.sigmoid(self.conv_xy_atten(planes))
        # a float32 tensor of one element would promote everything after it to float32
        rest = self._scale.to(share.dtype) - share
        fused: Tensor = self.conv_out(x * share + y * rest)
        return fused


class _PyramidDecoder(nn.Module):
    """Pyramid pooling of the coarsest features, then one fusion per resolution."""

    def __init__(
        self, in_channels: Sequence[int], out_channels: Sequence[int], context_channels: int, bins: Sequence[int]
    ) -> None:
        super().__init__()
        self.cm = _Context(in_channels[-1], context_channels, bins)
        coarse_channels = (*out_channels[1:], context_channels)
        self.arm_list = nn.ModuleList(
            _Fusion(fine, coarse, out)
            for fine, coarse, out in zip(in_channels, coarse_channels, out_channels, strict=True)
        )

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        y = self.cm(features[-1])
        fused: list[Tensor] = []
        for arm, fine in zip(reversed(self.arm_list), reversed(features), strict=True):
            y = arm(fine, y)
            fused.append(y)
        return fused[::-1]


class _ConvHead(nn.Module):
    """A 3x3 convolution unit, then a 1x1 convolution to the classes."""

    def __init__(self, in_channels: int, channels: int, num_classes: int) -> None:
        super().__init__()
        self.conv = ConvBNReLU(in_channels, channels, 3, padding=1)
        self.conv_out = nn.Conv2d(channels, num_classes, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.conv_out(self.conv(x))
        return logits


class PPLiteSeg(nn.Module):
    """The network: images (n, 3, h, w) to a list of logits (n, classes, h, w).

    Args:
        backbone: Returns features of three resolutions, from fine to coarse; see `STDC`.
        num_classes: Number of classes.
        arm_channels: Channels of the fused features, from fine to coarse.
        head_channels: Channels before the last convolution of each head, from fine to coarse.
        context_channels: Channels of the pyramid pooling.
        bins: Grid sizes of the pyramid pooling.
    """

    def __init__(
        self,
        backbone: STDC,
        num_classes: int = 19,
        *,
        arm_channels: Sequence[int] = (64, 96, 128),
        head_channels: Sequence[int] = (64, 64, 64),
        context_channels: int = 128,
        bins: Sequence[int] = (1, 2, 4),
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.ppseg_head = _PyramidDecoder(backbone.channels, arm_channels, context_channels, bins)
        self.seg_heads = nn.ModuleList(
            _ConvHead(arm, head, num_classes) for arm, head in zip(arm_channels, head_channels, strict=True)
        )
        init_default(self.ppseg_head)
        init_default(self.seg_heads)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the logits of 1/8, 1/16 and 1/32 in training, only those of 1/8 in evaluation."""
        fused = self.ppseg_head(self.backbone(x))
        if not self.training:
            return [resize(self.seg_heads[0](fused[0]), x)]
        return [resize(head(y), x) for head, y in zip(self.seg_heads, fused, strict=True)]


def stdc1() -> STDC:
    """Return a new STDC1 backbone."""
    return STDC((2, 2, 2))


def stdc2() -> STDC:
    """Return a new STDC2 backbone."""
    return STDC((4, 5, 3))


@register_model(
    task="segmentation",
    input_size=(512, 1024),
    train_outputs=3,
    head_keys=_HEAD_KEYS,
    aliases=("pp_liteseg_t",),
)
def pp_liteseg_stdc1(num_classes: int = 19) -> nn.Module:
    """Return a new PP-LiteSeg-T."""
    return PPLiteSeg(stdc1(), num_classes, arm_channels=(32, 64, 128), head_channels=(32, 64, 64))


@register_model(
    task="segmentation",
    input_size=(512, 1024),
    train_outputs=3,
    head_keys=_HEAD_KEYS,
    aliases=("pp_liteseg_b",),
)
def pp_liteseg_stdc2(num_classes: int = 19) -> nn.Module:
    """Return a new PP-LiteSeg-B."""
    return PPLiteSeg(stdc2(), num_classes)
