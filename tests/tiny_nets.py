"""Networks that are exported in no time."""

import torch
from torch import Tensor, nn


class TinySegmenter(nn.Module):
    """Three classes by brightness and position, pooled to 2 x 2 and enlarged again: what exporters stumble over."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> list[Tensor]:
        features = self.conv(x)
        pooled = nn.functional.interpolate(self.pool(features), size=features.shape[2:], mode="bilinear")
        return [nn.functional.interpolate(self.head(features + pooled), size=x.shape[2:], mode="bilinear")]


class TinyClassifier(nn.Module):
    """Four classes of the mean of some features."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Hardswish())
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.conv(x).mean((2, 3)))
        return logits


def tiny_segmenter() -> TinySegmenter:
    torch.manual_seed(0)
    return TinySegmenter().eval()
