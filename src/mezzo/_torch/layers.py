"""Base classes of torch's layers, and the convolution of a layer with another weight than its own.

Why: one class for all convolutions, one for all batch norms, and so on: rules hold for each of
them. A list of the public classes would miss subclasses that torch adds.
Releases: 2.11 to 2.15.
Without it: `decorate` makes batch norms half, and layers are missed by FP8's rules.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.conv import _ConvNd as ConvNd
from torch.nn.modules.dropout import _DropoutNd as DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm

__all__ = ["BatchNorm", "ConvNd", "DropoutNd", "InstanceNorm", "NormBase", "convolve"]


def convolve(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the result of a `ConvNd` with another weight and bias, and its own padding and stride."""
    result: Tensor = layer._conv_forward(x, weight, bias)
    return result
