"""How a decision for float32 arithmetic on half inputs is carried out without a float32 copy.

`Policy.decide` decides; this table only names a faster way to the same result, by variant. Where the
way does not fit a call, its function returns None, and the kernel casts as for any other operator.

* Norms and the cross entropy have kernels of mezzo: half in memory, float32 in registers.
* Some CUDA kernels of torch are float32 inside on half inputs: they need no casts at all.
* The others stay: `log_softmax` (its backward takes the exponential of the rounded result),
  `group_norm` (half statistics), `cumsum` (sums in half), `var`, `std`, norms and `prod` (half steps
  in their backward), upsampling and `grid_sampler` (their backward adds half numbers by atomics).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.nn import Parameter

from mezzo._torch.dispatcher import is_key_included
from mezzo._torch.script import tracing_state
from mezzo._torch.step_tier import has_triton
from mezzo.amp._casting import TRANSFORMS
from mezzo.dtypes import HALF_DTYPES
from mezzo.kernels import MOST_NORMED, fused_cross_entropy, fused_layer_norm, fused_rms_norm

Carrier = Callable[[Sequence[Any], Mapping[str, Any]], Any]

_PLAIN = (Tensor, Parameter)
_REDUCTIONS = ("none", "mean", "sum")

FLOAT32_INSIDE = {
    "softmax": "forward and backward accumulate in float32",
    "sum.dim": "accumulates in float32 and rounds once; the gradient is a copy",
    "mean.dim": "accumulates in float32 and rounds once; the gradient is one division",
    "nansum.dim": "accumulates in float32 and rounds once; the gradient is a copy",
}
"""Variants whose CUDA kernels in torch compute in float32 on half inputs, with the reason."""


def carrier_of(variant: str, device_type: str) -> Carrier | None:
    """Return the function that carries out float32 arithmetic on half inputs; None: inputs are cast."""
    return _CARRIERS.get(variant) if device_type in ("cuda", "cpu") else None


def needs_no_casts(variant: str, device_type: str) -> bool:
    """Whether torch's own kernel is float32 inside on half inputs."""
    return device_type == "cuda" and variant in FLOAT32_INSIDE


def replaces_a_float32_copy(variant: str, device_type: str) -> bool:
    """Whether a variant with a float32 result has a carrier, so that torch's own cast is not wanted."""
    is_served = device_type == "cuda" or has_triton(torch.device(device_type))  # the latter: Triton's interpreter
    return variant == "cross_entropy_loss" and is_served


def is_plainly_called(args: Sequence[Any]) -> bool:
    """Whether a call has half data and ordinary tensors, outside of torch.func, forward AD and jit traces.

    A tensor of a tracer has a type of its own: in compiled graphs Inductor fuses these operators. So
    has one of another library (a sharded one).
    """
    if args[0].dtype not in HALF_DTYPES or is_key_included(TRANSFORMS) or tracing_state() is not None:
        return False
    tensors = [value for value in args if isinstance(value, Tensor)]
    return all(type(t) in _PLAIN and t.layout is torch.strided and unpack_dual(t).tangent is None for t in tensors)


def _get(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _fits_norm(args: Sequence[Any], shape: Sequence[int]) -> bool:
    """Whether mezzo's kernel takes a norm; anything odd goes to torch, which also words the errors."""
    x = args[0]
    if not is_plainly_called(args) or not has_triton(x.device):
        return False
    params = [value for value in args[2:4] if isinstance(value, Tensor)]
    fits = len(shape) > 0 and tuple(x.shape[x.dim() - len(shape) :]) == tuple(shape) and x.dim() >= len(shape)
    return (
        fits
        and math.prod(shape) <= MOST_NORMED
        and all(
            tuple(p.shape) == tuple(shape) and p.device == x.device and p.dtype in (*HALF_DTYPES, torch.float32)
            for p in params
        )
    )


def _layer_norm(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    shape = args[1]
    if not _fits_norm(args, shape):
        return None
    weight, bias = (_get(args, kwargs, position, name, None) for position, name in ((2, "weight"), (3, "bias")))
    return fused_layer_norm(args[0], shape, weight, bias, _get(args, kwargs, 4, "eps", 1e-5))


def _rms_norm(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    shape = args[1]
    if not _fits_norm(args[:3], shape):
        return None
    return fused_rms_norm(args[0], shape, _get(args, kwargs, 2, "weight", None), _get(args, kwargs, 3, "eps", None))


def _cross_entropy(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    logits, target = args[:2]
    weight = _get(args, kwargs, 2, "weight", None)
    if weight is not None or not is_plainly_called(args) or not has_triton(logits.device):
        return None
    if logits.dim() != 2 or target.dim() != 1 or target.dtype is not torch.int64 or target.device != logits.device:
        return None
    if len(logits) != len(target):
        return None
    reduction = _REDUCTIONS[_get(args, kwargs, 3, "reduction", 1)]
    ignored, smoothing = _get(args, kwargs, 4, "ignore_index", -100), _get(args, kwargs, 5, "label_smoothing", 0.0)
    return fused_cross_entropy(logits, target, reduction, ignored, smoothing) if 0 <= smoothing <= 1 else None


_CARRIERS: dict[str, Carrier] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "cross_entropy_loss": _cross_entropy,
}
