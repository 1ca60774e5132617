"""Bilinear resizing of the networks: mezzo's operator where torch's gradient is slow."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mezzo._torch.functorch import innermost_transform
from mezzo._torch.script import tracing_state
from mezzo.kernels import enlarge_bilinear, uses_own_operators


def resize(x: Tensor, like: Tensor) -> Tensor:
    """Return `x` at the height and width of `like`: bilinear, with half-pixel centres."""
    height, width = like.shape[-2:]
    if uses_own_operators() and _is_trained(x) and height * width > x.shape[-2] * x.shape[-1]:
        enlarged: Tensor = enlarge_bilinear(x, height, width)
        return enlarged
    return F.interpolate(x, size=(height, width), mode="bilinear", align_corners=False)


def _is_trained(x: Tensor) -> bool:
    """Whether a backward pass follows that mezzo's operator speeds up: on CUDA, and in compiled code.

    Exporters get torch's operator, which other programs can read. So do `torch.func.grad` and
    `torch.func.vmap`, which registered operators do not support.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return False
    if torch.compiler.is_compiling():
        # Not `is_exporting()`: Dynamo of torch 2.11 takes it for True. Exports do not go through Dynamo by default.
        return torch.compiler.is_dynamo_compiling()
    return x.is_cuda and tracing_state() is None and innermost_transform() is None
