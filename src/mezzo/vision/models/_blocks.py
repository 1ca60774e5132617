"""Blocks that several networks share, with the parameter names of PaddleSeg, so that its weights load directly."""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Padding = int | Literal["same"]


def _missing(size: int, kernel: int, stride: int) -> int:
    """Return how many pixels of padding a side needs.

    In an export with a free size, the padded size is an expression of it. This form has the free size once; with twice,
    the expressions of deep networks would double with every stride.
    """
    grown = (size + stride - 1) // stride * stride + kernel - stride - size
    return grown if kernel >= stride else max(grown, 0)


def pad_same(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Pad so that a convolution without padding returns ceil(size / stride); the smaller half goes in front."""
    height, width = x.shape[-2:]
    down, right = _missing(height, kernel, stride), _missing(width, kernel, stride)
    return F.pad(x, (right // 2, right - right // 2, down // 2, down - down // 2))


class ConvBN(nn.Module):
    """Convolution, batch norm, and ReLU if `relu`. Padding "same" is that of TensorFlow: asymmetric for stride 2."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int,
        *,
        stride: int = 1,
        padding: Padding = 0,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = False,
        relu: bool = False,
    ) -> None:
        super().__init__()
        # With stride 1 'same' is symmetric, and the convolution does the padding.
        self._pads = padding == "same" and stride > 1
        inside = 0 if self._pads else kernel // 2 if padding == "same" else padding
        self._kernel, self._stride = kernel, stride
        self._conv = nn.Conv2d(
            in_channels,
            out_channels,
            kernel,
            stride=stride,
            padding=inside,
            dilation=dilation,
            groups=groups,
            bias=bias,
        )
        self._batch_norm = nn.BatchNorm2d(out_channels)
        self._relu = relu

    def forward(self, x: Tensor) -> Tensor:
        """Return the features."""
        if self._pads:
            x = pad_same(x, self._kernel, self._stride)
        x = self._batch_norm(self._conv(x))
        return F.relu(x) if self._relu else x


#: Convolution, batch norm, ReLU.
ConvBNReLU = functools.partial(ConvBN, relu=True)


class SeparableConvBNReLU(nn.Module):
    """A depthwise 3x3 convolution with batch norm, then a 1x1 convolution with batch norm and ReLU."""

    def __init__(
        self, in_channels: int, out_channels: int, *, stride: int = 1, dilation: int = 1, bias: bool = False
    ) -> None:
        super().__init__()
        self.depthwise_conv = ConvBN(
            in_channels,
            in_channels,
            3,
            stride=stride,
            padding=dilation,
            dilation=dilation,
            groups=in_channels,
            bias=bias,
        )
        self.piontwise_conv = ConvBNReLU(in_channels, out_channels, 1, bias=bias)  # misspelled in published weights

    def forward(self, x: Tensor) -> Tensor:
        """Return the features."""
        features: Tensor = self.piontwise_conv(self.depthwise_conv(x))
        return features


def init_default(module: nn.Module) -> None:
    """Initialise weights with PaddleSeg's default."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            # The fan-in counts all input channels, even in a grouped convolution.
            nn.init.normal_(
                part.weight, std=(2.0 / (part.kernel_size[0] * part.kernel_size[1] * part.in_channels)) ** 0.5
            )
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight)
            nn.init.zeros_(part.bias)


def init_small(module: nn.Module) -> None:
    """Initialise convolutions: weights from a normal distribution of standard deviation 0.001, biases 0."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.normal_(part.weight, std=0.001)
            if part.bias is not None:
                nn.init.zeros_(part.bias)


def shuffle_channels(x: Tensor, groups: int) -> Tensor:
    """Interleave the channels of `groups` equal parts."""
    n, channels, height, width = x.shape
    return x.view(n, groups, channels // groups, height, width).transpose(1, 2).reshape(n, channels, height, width)


def join(*parts: Tensor) -> Tensor:
    """Concatenate tensors along the channels."""
    return torch.cat(parts, dim=1)
