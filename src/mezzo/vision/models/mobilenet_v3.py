"""MobileNetV3-small, a classifier, with the parameter names of torchvision, so that its weights load."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from mezzo.vision.models._blocks import init_default
from mezzo.vision.models._registry import register_model

#: Kernel, expanded channels, output channels, squeeze channels (0: none), hard-swish, stride.
_BLOCKS = (
    (3, 16, 16, 8, False, 2),
    (3, 72, 24, 0, False, 2),
    (3, 88, 24, 0, False, 1),
    (5, 96, 40, 24, True, 2),
    (5, 240, 40, 64, True, 1),
    (5, 240, 40, 64, True, 1),
    (5, 120, 48, 32, True, 1),
    (5, 144, 48, 40, True, 1),
    (5, 288, 96, 72, True, 2),
    (5, 576, 96, 144, True, 1),
    (5, 576, 96, 144, True, 1),
)


def _unit(
    in_channels: int,
    out_channels: int,
    kernel: int,
    stride: int = 1,
    groups: int = 1,
    act: type[nn.Module] | None = None,
) -> nn.Sequential:
    layers: list[nn.Module] = [
        nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=False),
        # TIPC's documents say 0.99, a momentum that forgets almost all statistics; torchvision has 0.01.
        nn.BatchNorm2d(out_channels, eps=1e-3, momentum=0.01),
    ]
    return nn.Sequential(*layers, *([act()] if act is not None else []))


class SqueezeExcitation(nn.Module):
    """Scales channels by a function of their means."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled features."""
        weight = self.fc2(F.relu(self.fc1(F.adaptive_avg_pool2d(x, 1))))
        return x * F.hardsigmoid(weight)


class InvertedResidual(nn.Module):
    """Expand, convolve depthwise, scale channels, project back."""

    def __init__(
        self, in_channels: int, kernel: int, expanded: int, out_channels: int, squeezed: int, swish: bool, stride: int
    ) -> None:
        super().__init__()
        self._adds = stride == 1 and in_channels == out_channels
        act: type[nn.Module] = nn.Hardswish if swish else nn.ReLU
        parts: list[nn.Module] = []
        if expanded != in_channels:
            parts.append(_unit(in_channels, expanded, 1, act=act))
        parts.append(_unit(expanded, expanded, kernel, stride, groups=expanded, act=act))
        if squeezed:
            parts.append(SqueezeExcitation(expanded, squeezed))
        parts.append(_unit(expanded, out_channels, 1))
        self.block = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block, plus the input if the shapes are equal."""
        out: Tensor = self.block(x)
        return out + x if self._adds else out


class MobileNetV3Small(nn.Module):
    """The network: images (n, 3, h, w) to logits (n, classes)."""

    def __init__(self, num_classes: int = 1000, dropout: float = 0.2) -> None:
        super().__init__()
        parts: list[nn.Module] = [_unit(3, 16, 3, 2, act=nn.Hardswish)]
        channels = 16
        for kernel, expanded, out_channels, squeezed, swish, stride in _BLOCKS:
            parts.append(InvertedResidual(channels, kernel, expanded, out_channels, squeezed, swish, stride))
            channels = out_channels
        parts.append(_unit(channels, 576, 1, act=nn.Hardswish))
        self.features = nn.Sequential(*parts)
        self.classifier = nn.Sequential(
            nn.Linear(576, 1024), nn.Hardswish(), nn.Dropout(dropout), nn.Linear(1024, num_classes)
        )
        init_default(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        pooled = F.adaptive_avg_pool2d(self.features(x), 1).flatten(1)
        logits: Tensor = self.classifier(pooled)
        return logits


@register_model(
    task="classification",
    input_size=(224, 224),
    head_keys=("classifier.3.",),
    aliases=("MobileNetV3_small", "mobilenetv3_small"),
)
def mobilenet_v3_small(num_classes: int = 1000, dropout: float = 0.2) -> nn.Module:
    """Return a new MobileNetV3-small."""
    return MobileNetV3Small(num_classes, dropout)
