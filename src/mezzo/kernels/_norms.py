"""Layer norm and RMS norm: half in and out, float32 inside, one pass over memory in each direction.

torch's own float32 operator needs a float32 copy of its input, and keeps it for the backward. Here
the input is kept as it came, with one or two float32 numbers per row.

A residual can be added in the same pass. The backward pass then adds the gradient that the sum gets
elsewhere, and can add up its rows: that is the gradient of the bias of the layer before. Graph mode
uses both (`static/_norms.py`).
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
from mezzo.kernels._launch import differentiable_gradients, next_power_of_two, on_device
from mezzo.kernels._registry import register
from mezzo.kernels._tiles import STAGES, add_up, share_rows

MOST_NORMED = 16384
"""Elements of the longest row: a program holds whole rows in registers."""

_TILE = 2048
"""Elements that a program works on at a time, if a row is not longer."""
_PER_WARP = 512
_STAGE_BYTES = 8192 * STAGES
"""Bytes of a tensor that a program has in flight."""


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
    result: Tensor = layer_norm(x, None, weight, bias, len(shape), eps)[0]
    return result


def fused_rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Return the RMS norm of `x` over its last dimensions, in the dtype of `x`.

    `eps` is added to the mean square; None: the epsilon of float32, in which it is computed.
    """
    result: Tensor = rms_norm(x, None, weight, len(shape), _epsilon(eps))[0]
    return result


def add_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the layer norm of `x + residual` over the last dimension, and that sum, empty without a residual.

    Both have the same shape and dtype.
    """
    result, total, _, _ = layer_norm(x, residual, weight, bias, 1, eps)
    return result, total


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of `x + residual` over the last dimension, and that sum, empty without a residual."""
    result, total, _ = rms_norm(x, residual, weight, 1, _epsilon(eps))
    return result, total


def _epsilon(eps: float | None) -> float:
    return torch.finfo(torch.float32).eps if eps is None else eps


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


def _stages(tile: dict[str, int], dtype: torch.dtype) -> int:
    """Return how many tiles a program may have in flight: they take shared memory."""
    return max(1, min(STAGES, _STAGE_BYTES // (tile["ROWS"] * tile["BLOCK"] * dtype.itemsize)))


def _total(x: Tensor, residual: Tensor | None) -> Tensor:
    return x if residual is None else x + residual


def _empty_total(x: Tensor, residual: Tensor | None) -> Tensor:
    """Return memory for the sum with a residual; without one, nothing is written."""
    return x.new_empty(0 if residual is None else x.shape)


def _statistics(x: Tensor, dims: int, eps: float, center: bool) -> tuple[Tensor, Tensor]:
    """Return mean (zero unless `center`) and inverse deviation of each row, by torch."""
    values = x.float().reshape(*_sizes(x, dims))
    mean = values.mean(1) if center else values.new_zeros(len(values))
    return mean, (values - mean[:, None]).square().mean(1).add(eps).rsqrt()


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, dims: int, eps: float,
    center: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the kernel; return the result, the sum with the residual, and mean and inverse deviation of each row."""
    from mezzo.kernels._norm_kernels import norm_kernel

    rows, size = _sizes(x, dims)
    result, total = x.new_empty(x.shape), _empty_total(x, residual)
    means = torch.empty(rows if center else 0, dtype=torch.float32, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return result, total, means, scales.zero_()
    x, residual, weight, bias = x.contiguous(), _contiguous(residual), _contiguous(weight), _contiguous(bias)
    tile = _tile(size)
    with on_device(x.device):
        norm_kernel[(-(-rows // tile["ROWS"]),)](
            x, residual, weight, bias, result, total, means, scales, rows, size, eps,
            CENTER=center, HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
            **tile,
        )  # fmt: skip
    return result, total, means, scales


def _backward(
    grad: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor | None, bias: Tensor | None, means: Tensor,
    scales: Tensor, dims: int, adds_up: bool, weight_grad: bool, center: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the kernels; return the gradients of input, weight and bias, and the first one's sum over the rows.

    What is missing, or not asked for, is empty.
    """
    from mezzo.kernels._norm_kernels import norm_backward_kernel

    rows, size = _sizes(total, dims)
    grad_x, sums = total.new_empty(total.shape), total.new_empty(size if adds_up else 0)
    of_weight, of_bias = _empty_grad(weight if weight_grad else None, total), _empty_grad(bias, total)
    if total.numel() == 0:
        return grad_x, of_weight.zero_(), of_bias.zero_(), sums.zero_()
    grad, grad_total = grad.contiguous(), _contiguous(grad_total)
    total, weight = total.contiguous(), _contiguous(weight)
    tile = _tile(size)
    programs, steps = share_rows(rows, 1, tile["ROWS"], total.device)
    has = {"WEIGHT_GRAD": weight is not None and weight_grad, "BIAS_GRAD": bias is not None, "ADDS_UP": adds_up}
    wanted = [of for of, is_wanted in zip((of_weight, of_bias, sums), has.values(), strict=True) if is_wanted]
    parts = total.new_empty((len(wanted), programs, size), dtype=torch.float32)
    of_each = iter(parts)
    with on_device(total.device):
        norm_backward_kernel[(programs,)](
            grad, grad_total, total, weight, means, scales, grad_x,
            *(next(of_each) if is_wanted else parts for is_wanted in has.values()), rows, size,
            CENTER=center, HAS_GRAD_TOTAL=grad_total is not None, HAS_WEIGHT=weight is not None, **has,
            STEPS=steps, STAGES=_stages(tile, total.dtype), **tile,
        )  # fmt: skip
        if wanted:
            add_up(parts, *wanted)
    return grad_x, of_weight, of_bias, sums


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _empty_grad(param: Tensor | None, x: Tensor) -> Tensor:
    """Return memory for the gradient of a parameter; an empty tensor if there is no parameter."""
    if param is None:
        return x.new_empty(0, dtype=torch.float32)
    return torch.empty(param.shape, dtype=param.dtype, device=param.device)


def _plain_backward(
    grad: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor | None, bias: Tensor | None, means: Tensor,
    scales: Tensor, dims: int, adds_up: bool, weight_grad: bool, center: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what `_backward` returns, by torch in float32."""
    rows, size = _sizes(total, dims)
    given, values = (tensor.float().reshape(rows, size) for tensor in (grad, total))
    normed = (values - means[:, None] if center else values) * scales[:, None]
    of_bias = _empty_grad(None, total) if bias is None else given.sum(0).to(bias.dtype).reshape(bias.shape)
    of_weight = _empty_grad(None, total)
    if weight is not None and weight_grad:
        of_weight = (given * normed).sum(0).to(weight.dtype).reshape(weight.shape)
    given = given if weight is None else given * weight.float().reshape(1, size)
    change = given - normed * (given * normed).mean(1, keepdim=True)
    change = change - given.mean(1, keepdim=True) if center else change
    change = change * scales[:, None]
    change = change if grad_total is None else change + grad_total.float().reshape(rows, size)
    sums = change.sum(0).to(total.dtype) if adds_up else total.new_empty(0)
    return change.reshape(total.shape).to(total.dtype), of_weight, of_bias, sums


# Layer norm


def _empty_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, dims: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    means, scales = (x.new_empty(_sizes(x, dims)[0], dtype=torch.float32) for _ in range(2))
    return x.new_empty(x.shape), _empty_total(x, residual), means, scales


def _keep_layer_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, ctx.dims, ctx.eps = inputs
    ctx.has_residual = residual is not None
    ctx.mark_non_differentiable(*output[2 if ctx.has_residual else 1 :])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1] if ctx.has_residual else x, weight, bias, *output[2:])


def _differentiate_layer_norm(
    ctx: Any, grad: Tensor | None, grad_total: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    if grad is None:
        return grad_total, grad_total, None, None, None, None
    total, weight, bias, means, scales = ctx.saved_tensors
    _, _, wants_weight, wants_bias, _, _ = ctx.needs_input_grad
    if torch.is_grad_enabled():  # create_graph
        plain = partial(_plain_layer_norm, dims=ctx.dims, eps=ctx.eps)
        of_x, of_weight, of_bias = differentiable_gradients(plain, (total, weight, bias), grad)
        of_x = _joined(of_x, grad_total)
    else:
        with no_torch_function():  # recorded as a gradient, not as a call of the user
            of_x, of_weight, of_bias, _ = layer_norm_backward(
                grad, grad_total, total, weight, bias if wants_bias else None, means, scales, ctx.dims, False,
                wants_weight,
            )  # fmt: skip
    of_residual = of_x if ctx.has_residual else None
    return of_x, of_residual, of_weight if wants_weight else None, of_bias if wants_bias else None, None, None


def _joined(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the sum of two gradients, either of which may be missing."""
    return other if one is None else one if other is None else one + other


@register(fake=_empty_layer_norm, setup_context=_keep_layer_norm, backward=_differentiate_layer_norm)
def layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, dims: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the norm over the last `dims` dimensions, `x + residual`, and mean and inverse deviation of each row."""
    if _takes(x, dims):
        return _forward(x, residual, weight, bias, dims, eps, center=True)
    total = _total(x, residual)
    result = _plain_layer_norm(total, weight, bias, dims, eps).contiguous()
    statistics = _statistics(total, dims, eps, center=True)
    return result, total.contiguous() if residual is not None else _empty_total(x, None), *statistics


def _empty_layer_norm_grads(
    grad: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor | None, bias: Tensor | None, means: Tensor,
    scales: Tensor, dims: int, adds_up: bool, weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    sums = total.new_empty(_sizes(total, dims)[1] if adds_up else 0)
    of_weight, of_bias = _empty_grad(weight if weight_grad else None, total), _empty_grad(bias, total)
    return total.new_empty(total.shape), of_weight, of_bias, sums


@register(fake=_empty_layer_norm_grads)
def layer_norm_backward(
    grad: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor | None, bias: Tensor | None, means: Tensor,
    scales: Tensor, dims: int, adds_up: bool, weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of input, weight and bias, and the first one's sum over the rows.

    What is missing, or not asked for by `adds_up` and `weight_grad`, is an empty tensor.
    """
    backward = _backward if _takes(total, dims) else _plain_backward
    return backward(grad, grad_total, total, weight, bias, means, scales, dims, adds_up, weight_grad, center=True)


# RMS norm


def _empty_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, dims: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    scales = x.new_empty(_sizes(x, dims)[0], dtype=torch.float32)
    return x.new_empty(x.shape), _empty_total(x, residual), scales


def _keep_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, ctx.dims, ctx.eps = inputs
    ctx.has_residual = residual is not None
    ctx.mark_non_differentiable(*output[2 if ctx.has_residual else 1 :])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1] if ctx.has_residual else x, weight, output[2])


def _differentiate_rms_norm(
    ctx: Any, grad: Tensor | None, grad_total: Tensor | None, _: Any
) -> tuple[Tensor | None, ...]:
    if grad is None:
        return grad_total, grad_total, None, None, None
    total, weight, scales = ctx.saved_tensors
    wants_weight = ctx.needs_input_grad[2]
    if torch.is_grad_enabled():  # create_graph
        plain = partial(_plain_rms_norm, dims=ctx.dims, eps=ctx.eps)
        of_x, of_weight = differentiable_gradients(plain, (total, weight), grad)
        of_x = _joined(of_x, grad_total)
    else:
        with no_torch_function():
            of_x, of_weight, _ = rms_norm_backward(
                grad, grad_total, total, weight, scales, ctx.dims, False, wants_weight
            )
    return of_x, of_x if ctx.has_residual else None, of_weight if wants_weight else None, None, None


@register(fake=_empty_rms_norm, setup_context=_keep_rms_norm, backward=_differentiate_rms_norm)
def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, dims: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm over the last `dims` dimensions, `x + residual`, and each row's inverse root mean square."""
    if _takes(x, dims):
        result, total, _, scales = _forward(x, residual, weight, None, dims, eps, center=False)
        return result, total, scales
    total = _total(x, residual)
    result = _plain_rms_norm(total, weight, dims, eps).contiguous()
    scales = _statistics(total, dims, eps, center=False)[1]
    return result, total.contiguous() if residual is not None else _empty_total(x, None), scales


def _empty_rms_norm_grads(
    grad: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor | None, scales: Tensor, dims: int,
    adds_up: bool, weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    sums = total.new_empty(_sizes(total, dims)[1] if adds_up else 0)
    return total.new_empty(total.shape), _empty_grad(weight if weight_grad else None, total), sums


@register(fake=_empty_rms_norm_grads)
def rms_norm_backward(
    grad: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor | None, scales: Tensor, dims: int,
    adds_up: bool, weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of input and weight, and the first one's sum over the rows; empty for what is missing."""
    backward = _backward if _takes(total, dims) else _plain_backward
    of_x, of_weight, _, sums = backward(
        grad, grad_total, total, weight, None, scales, scales, dims, adds_up, weight_grad, center=False
    )
    return of_x, of_weight, sums
