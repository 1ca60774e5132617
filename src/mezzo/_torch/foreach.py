"""Kernels over lists of tensors: torch's multi-tensor arithmetic and its fused optimizer updates.

Why: one launch for many tensors. The public optimizers use these kernels, but only on their own
parameters and gradients; mezzo runs them on float32 masters and on gradients that carry a loss
scale.
Releases: all of 2.11 to 2.15 have them; `foreach_norm` takes a dtype only in some
(`norm_takes_dtype`).
Without them: no step of the fused tier, no check of gradients, no copy of masters into half
weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

foreach_copy_ = torch._foreach_copy_
foreach_lerp_ = torch._foreach_lerp_
foreach_norm = torch._foreach_norm

# By overload: the Python bindings read a tensor argument as a number, which waits for the device.
foreach_mul: Callable[..., Any] = torch.ops.aten._foreach_mul.Tensor
foreach_mul_: Callable[..., Any] = torch.ops.aten._foreach_mul_.Tensor
foreach_add_: Callable[..., Any] = torch.ops.aten._foreach_add_.Tensor
foreach_add_number_: Callable[..., Any] = torch.ops.aten._foreach_add_.Scalar

fused_sgd_ = torch._fused_sgd_
fused_adam_ = torch._fused_adam_
fused_adamw_ = torch._fused_adamw_


@functools.cache
def norm_takes_dtype() -> bool:
    """Whether `foreach_norm` can sum in a wider dtype than that of its inputs."""
    return "dtype" in str(torch.ops.aten._foreach_norm.Scalar._schema)
