"""Layer norm and RMS norm: half in and out, float32 inside, one pass over memory in each direction.

torch's own float32 operator needs a float32 copy of its input, and keeps it for the backward. Here
the input is kept as it came, with one or two float32 numbers per row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mezzo._torch.modes import no_torch_function
from mezzo._torch.step_tier import has_triton
from mezzo.kernels._launch import differentiable_gradients, next_power_of_two, on_device, resident_programs
from mezzo.kernels._registry import register

MOST_NORMED = 16384
"""Elements of the longest row: a program holds whole rows in registers."""

_TILE = 4096
"""Elements that a program works on at a time, if a row is not longer."""
_PER_WARP = 512


def fused_layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Return the layer norm of `x` over its last dimensions, in the dtype of `x`.

    Args:
        x: float16, bfloat16 or float32.
        shape: The sizes of the last dimensions; at most `MOST_NORMED` elements together.
        weight: Of any floating dtype, with these sizes; None: no factor.
        bias: Likewise; None: nothing is added.
        eps: Added to the variance.
    """
    result: Tensor = layer_norm(x, weight, bias, len(shape), eps)[0]
    return result


def fused_rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Return the RMS norm of `x` over its last dimensions, in the dtype of `x`.

    `eps` is added to the mean square; None: the epsilon of float32, in which it is computed.
    """
    used = torch.finfo(torch.float32).eps if eps is None else eps
    result: Tensor = rms_norm(x, weight, len(shape), used)[0]
    return result


def _plain_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, dims: int, eps: float) -> Tensor:
    weight, bias = _in_float32(weight), _in_float32(bias)
    return F.layer_norm(x.float(), x.shape[x.dim() - dims :], weight, bias, eps).to(x.dtype)


def _plain_rms_norm(x: Tensor, weight: Tensor | None, dims: int, eps: float) -> Tensor:
    return F.rms_norm(x.float(), x.shape[x.dim() - dims :], _in_float32(weight), eps).to(x.dtype)


def _in_float32(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


def _sizes(x: Tensor, dims: int) -> tuple[int, int]:
    """Return the number of rows, and the elements of one."""
    return math.prod(x.shape[: x.dim() - dims]), math.prod(x.shape[x.dim() - dims :])


def _takes(x: Tensor, dims: int) -> bool:
    """Whether the Triton kernels take a call; otherwise torch computes it in float32."""
    return has_triton(x.device) and _sizes(x, dims)[1] <= MOST_NORMED


def _tile(size: int) -> dict[str, int]:
    """Return rows and columns of a tile, and the warps that work on it."""
    block = next_power_of_two(size)
    rows = max(1, min(16, _TILE // block))
    return {"ROWS": rows, "BLOCK": block, "num_warps": max(1, min(32, rows * block // _PER_WARP))}


def _statistics(x: Tensor, dims: int, eps: float, center: bool) -> tuple[Tensor, Tensor]:
    """Return mean (zero unless `center`) and inverse deviation of each row, by torch."""
    values = x.float().reshape(*_sizes(x, dims))
    mean = values.mean(1) if center else values.new_zeros(len(values))
    return mean, (values - mean[:, None]).square().mean(1).add(eps).rsqrt()


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, dims: int, eps: float, center: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel; return the result, and mean and inverse deviation of each row."""
    from mezzo.kernels._norm_kernels import norm_kernel

    rows, size = _sizes(x, dims)
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    means = torch.empty(rows if center else 0, dtype=torch.float32, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return result, means, scales.zero_()
    x, weight, bias = x.contiguous(), _contiguous(weight), _contiguous(bias)
    tile = _tile(size)
    with on_device(x.device):
        norm_kernel[(-(-rows // tile["ROWS"]),)](
            x, weight, bias, result, means, scales, rows, size, eps,
            CENTER=center, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, **tile,
        )  # fmt: skip
    return result, means, scales


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, means: Tensor, scales: Tensor, dims: int,
    center: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the kernels; return the gradients of input, weight and bias, empty for what is missing."""
    from mezzo.kernels._norm_kernels import norm_backward_kernel

    rows, size = _sizes(x, dims)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    of_weight, of_bias = _empty_grad(weight, x), _empty_grad(bias, x)
    if x.numel() == 0:
        return grad_x, of_weight.zero_(), of_bias.zero_()
    grad, x, weight = grad.contiguous(), x.contiguous(), _contiguous(weight)
    tile = _tile(size)
    tiles = -(-rows // tile["ROWS"])
    share = -(-tiles // resident_programs(x.device)) * tile["ROWS"]
    programs = -(-rows // share)
    weight_sums = x.new_empty((programs if weight is not None else 0, size), dtype=torch.float32)
    bias_sums = x.new_empty((programs if bias is not None else 0, size), dtype=torch.float32)
    with on_device(x.device):
        norm_backward_kernel[(programs,)](
            grad, x, weight, means, scales, grad_x, weight_sums, bias_sums, rows, size, share,
            CENTER=center, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, **tile,
        )  # fmt: skip
        _add_up(weight_sums, of_weight)
        _add_up(bias_sums, of_bias)
    return grad_x, of_weight, of_bias


def _add_up(sums: Tensor, total: Tensor) -> None:
    """Write the sum over the programs; do nothing if there are none."""
    from mezzo.kernels._norm_kernels import column_sums_kernel

    count, size = sums.shape
    if count:
        column_sums_kernel[(-(-size // 64),)](sums, total, count, size, ROWS=32, BLOCK=64, num_warps=4)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _empty_grad(param: Tensor | None, x: Tensor) -> Tensor:
    """Return memory for the gradient of a parameter; an empty tensor if there is no parameter."""
    if param is None:
        return x.new_empty(0, dtype=torch.float32)
    return torch.empty(param.shape, dtype=param.dtype, device=param.device)


def _plain_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, means: Tensor, scales: Tensor, dims: int,
    center: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what `_backward` returns, by torch in float32."""
    rows, size = _sizes(x, dims)
    given, values = (tensor.float().reshape(rows, size) for tensor in (grad, x))
    normed = (values - means[:, None] if center else values) * scales[:, None]
    of_bias = _empty_grad(None, x) if bias is None else given.sum(0).to(bias.dtype).reshape(bias.shape)
    of_weight = (
        _empty_grad(None, x) if weight is None else (given * normed).sum(0).to(weight.dtype).reshape(weight.shape)
    )
    given = given if weight is None else given * weight.float().reshape(1, size)
    change = given - normed * (given * normed).mean(1, keepdim=True)
    change = change - given.mean(1, keepdim=True) if center else change
    return (change * scales[:, None]).reshape(x.shape).to(x.dtype), of_weight, of_bias


# Layer norm


def _empty_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, dims: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows = _sizes(x, dims)[0]
    return x.new_empty(x.shape), x.new_empty(rows, dtype=torch.float32), x.new_empty(rows, dtype=torch.float32)


def _keep_layer_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, ctx.dims, ctx.eps = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, bias, *output[1:])


def _differentiate_layer_norm(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None, None
    x, weight, bias, means, scales = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph
        found = differentiable_gradients(
            partial(_plain_layer_norm, dims=ctx.dims, eps=ctx.eps), (x, weight, bias), grad
        )
        return *found, None, None
    with no_torch_function():  # recorded as a gradient, not as a call of the user
        of_x, of_weight, of_bias = layer_norm_backward(grad, x, weight, bias, means, scales, ctx.dims)
    return of_x, None if weight is None else of_weight, None if bias is None else of_bias, None, None


@register(fake=_empty_layer_norm, setup_context=_keep_layer_norm, backward=_differentiate_layer_norm)
def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, dims: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm over the last `dims` dimensions, and mean and inverse deviation of each row."""
    if _takes(x, dims):
        return _forward(x, weight, bias, dims, eps, center=True)
    return _plain_layer_norm(x, weight, bias, dims, eps).contiguous(), *_statistics(x, dims, eps, center=True)


def _empty_layer_norm_grads(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, means: Tensor, scales: Tensor, dims: int
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), _empty_grad(weight, x), _empty_grad(bias, x)


@register(fake=_empty_layer_norm_grads)
def layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, means: Tensor, scales: Tensor, dims: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias; an empty tensor for a missing one."""
    backward = _backward if _takes(x, dims) else _plain_backward
    return backward(grad, x, weight, bias, means, scales, dims, center=True)


# RMS norm


def _empty_rms_norm(x: Tensor, weight: Tensor | None, dims: int, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(_sizes(x, dims)[0], dtype=torch.float32)


def _keep_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, ctx.dims, ctx.eps = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, output[1])


def _differentiate_rms_norm(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None
    x, weight, scales = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph
        found = differentiable_gradients(partial(_plain_rms_norm, dims=ctx.dims, eps=ctx.eps), (x, weight), grad)
        return *found, None, None
    with no_torch_function():
        of_x, of_weight = rms_norm_backward(grad, x, weight, scales, ctx.dims)
    return of_x, None if weight is None else of_weight, None, None


@register(fake=_empty_rms_norm, setup_context=_keep_rms_norm, backward=_differentiate_rms_norm)
def rms_norm(x: Tensor, weight: Tensor | None, dims: int, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm over the last `dims` dimensions, and the inverse root mean square of each row."""
    if _takes(x, dims):
        result, _, scales = _forward(x, weight, None, dims, eps, center=False)
        return result, scales
    return _plain_rms_norm(x, weight, dims, eps).contiguous(), _statistics(x, dims, eps, center=False)[1]


def _empty_rms_norm_grads(
    grad: Tensor, x: Tensor, weight: Tensor | None, scales: Tensor, dims: int
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), _empty_grad(weight, x)


@register(fake=_empty_rms_norm_grads)
def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, scales: Tensor, dims: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of input and weight; an empty tensor for a missing weight."""
    backward = _backward if _takes(x, dims) else _plain_backward
    of_x, of_weight, _ = backward(grad, x, weight, None, scales, scales, dims, center=False)
    return of_x, of_weight
