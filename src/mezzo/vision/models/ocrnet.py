"""OCRNet on HRNet: classifies pixels with the help of the object regions that they belong to."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from mezzo.vision.models._blocks import ConvBNReLU, Padding, init_small, join
from mezzo.vision.models._registry import register_model
from mezzo.vision.models._resize import resize
from mezzo.vision.models.hrnet import HRNet, hrnet_w18, hrnet_w48

_register_ocrnet = register_model(
    task="segmentation", input_size=(512, 1024), train_outputs=2, head_keys=("head.aux_head.1.", "head.cls_head.")
)


def gather_regions(pixels: Tensor, regions: Tensor) -> Tensor:
    """Return the mean features of each region.

    Args:
        pixels: Features, (n, c, h, w).
        regions: Logits of the region of each pixel, (n, k, h, w).

    Returns:
        Features of the regions, (n, c, k, 1).
    """
    weights = F.softmax(regions.flatten(2), dim=2)  # over positions: the weights of a region sum to 1
    return (pixels.flatten(2) @ weights.transpose(1, 2)).unsqueeze(3)


class ObjectAttention(nn.Module):
    """Attention from pixels to regions: each pixel gets a mixture of the features of similar regions."""

    def __init__(self, in_channels: int, key_channels: int) -> None:
        super().__init__()
        self._scale = key_channels**-0.5
        self.f_pixel = nn.Sequential(
            ConvBNReLU(in_channels, key_channels, 1, bias=True), ConvBNReLU(key_channels, key_channels, 1, bias=True)
        )
        self.f_object = nn.Sequential(
            ConvBNReLU(in_channels, key_channels, 1, bias=True), ConvBNReLU(key_channels, key_channels, 1, bias=True)
        )
        self.f_down = ConvBNReLU(in_channels, key_channels, 1, bias=True)
        self.f_up = ConvBNReLU(key_channels, in_channels, 1, bias=True)

    def forward(self, pixels: Tensor, objects: Tensor) -> Tensor:
        """Return the context of each pixel, (n, c, h, w), from features of regions (n, c, k, 1)."""
        n, _, height, width = pixels.shape
        query = self.f_pixel(pixels).flatten(2).transpose(1, 2)
        # The key is the smallest operand; scaling it before the product avoids overflow in half precision.
        key = self.f_object(objects).flatten(2) * self._scale
        value = self.f_down(objects).flatten(2).transpose(1, 2)
        context = F.softmax(query @ key, dim=2) @ value
        up: Tensor = self.f_up(context.transpose(1, 2).reshape(n, -1, height, width))
        return up


class SpatialOCR(nn.Module):
    """Combines pixel features with their context."""

    def __init__(self, in_channels: int, key_channels: int, dropout: float) -> None:
        super().__init__()
        self.attention_block = ObjectAttention(in_channels, key_channels)
        self.conv1x1 = nn.Sequential(ConvBNReLU(2 * in_channels, in_channels, 1, bias=True), nn.Dropout2d(dropout))

    def forward(self, pixels: Tensor, objects: Tensor) -> Tensor:
        """Return the features."""
        features: Tensor = self.conv1x1(join(self.attention_block(pixels, objects), pixels))
        return features


class OCRHead(nn.Module):
    """Maps features (n, c, h, w) to logits and soft regions, both (n, classes, h, w)."""

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        *,
        mid_channels: int = 512,
        key_channels: int = 256,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.spatial_ocr = SpatialOCR(mid_channels, key_channels, dropout)
        self.conv3x3_ocr = ConvBNReLU(in_channels, mid_channels, 3, padding=1, bias=True)
        self.cls_head = nn.Conv2d(mid_channels, num_classes, 1)
        self.aux_head = nn.Sequential(
            ConvBNReLU(in_channels, in_channels, 1, bias=True), nn.Conv2d(in_channels, num_classes, 1)
        )
        init_small(self)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and the soft regions at the resolution of the features."""
        regions: Tensor = self.aux_head(x)
        pixels = self.conv3x3_ocr(x)
        logits: Tensor = self.cls_head(self.spatial_ocr(pixels, gather_regions(pixels, regions)))
        return logits, regions


class OCRNet(nn.Module):
    """The network: images (n, 3, h, w) to a list of logits (n, classes, h, w).

    Args:
        backbone: Computes the features.
        num_classes: Number of classes; each class is also a region.
        mid_channels: Channels of the features of pixels and regions.
        key_channels: Channels of the queries and keys of the attention.
        dropout: Share of the channels that are dropped before the last layer in training.
    """

    def __init__(
        self,
        backbone: HRNet,
        num_classes: int,
        *,
        mid_channels: int = 512,
        key_channels: int = 256,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = OCRHead(
            backbone.channels, num_classes, mid_channels=mid_channels, key_channels=key_channels, dropout=dropout
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the logits at the size of the images, and in training also the soft regions."""
        logits, regions = self.head(self.backbone(x))
        return [resize(logits, x), resize(regions, x)] if self.training else [resize(logits, x)]


@_register_ocrnet
def ocrnet_hrnetw18(num_classes: int = 19, dropout: float = 0.1, padding: Padding = "same") -> nn.Module:
    """Return a new OCRNet on HRNet-W18."""
    return OCRNet(hrnet_w18(padding), num_classes, dropout=dropout)


@_register_ocrnet
def ocrnet_hrnetw48(num_classes: int = 19, dropout: float = 0.1, padding: Padding = "same") -> nn.Module:
    """Return a new OCRNet on HRNet-W48."""
    return OCRNet(hrnet_w48(padding), num_classes, dropout=dropout)
