"""Operators of mezzo's own, registered with torch: eager mode and compiled graphs call the same kernels.

Importing this package registers them all: compiled code from a cache on disk may call any of them.
"""

from mezzo.kernels._batch_norm import ACTIVATIONS as NORM_ACTIVATIONS
from mezzo.kernels._batch_norm import BEFORE_RESIDUAL, batch_norm_activation
from mezzo.kernels._convolutions import BLOCK as CONVOLUTION_BLOCK
from mezzo.kernels._convolutions import (
    depthwise_conv,
    depthwise_input_grad,
    depthwise_weight_grad,
    narrow_weight_grad,
)
from mezzo.kernels._cross_entropy import fused_cross_entropy
from mezzo.kernels._enlarge import enlarge_bilinear, enlarge_gradient
from mezzo.kernels._gelu import LEAST_COLUMNS, fused_gelu
from mezzo.kernels._linear_cross_entropy import linear_cross_entropy
from mezzo.kernels._norms import MOST_NORMED, add_layer_norm, add_rms_norm, fused_layer_norm, fused_rms_norm
from mezzo.kernels._pixel_loss import pixel_cross_entropy, pixel_loss
from mezzo.kernels._registry import has_rules, operator_name
from mezzo.kernels._switch import torch_operators_only, uses_own_operators

__all__ = [
    "BEFORE_RESIDUAL",
    "NORM_ACTIVATIONS",
    "batch_norm_activation",
    "CONVOLUTION_BLOCK",
    "depthwise_conv",
    "depthwise_input_grad",
    "depthwise_weight_grad",
    "narrow_weight_grad",
    "LEAST_COLUMNS",
    "fused_gelu",
    "MOST_NORMED",
    "add_layer_norm",
    "add_rms_norm",
    "fused_cross_entropy",
    "linear_cross_entropy",
    "fused_layer_norm",
    "fused_rms_norm",
    "enlarge_bilinear",
    "enlarge_gradient",
    "pixel_cross_entropy",
    "pixel_loss",
    "has_rules",
    "operator_name",
    "torch_operators_only",
    "uses_own_operators",
]
