"""Batch norm with residual and activation as one operator: half in and out, float32 inside.

For training in channels-last. The forward reads the input twice and writes the result; the backward
reads gradient and input twice and writes the gradient. Nothing between norm and activation is stored.
Graph mode puts it into captured graphs (`static/_batch_norms.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mezzo._torch.modes import no_torch_function
from mezzo._torch.step_tier import has_triton
from mezzo.kernels._launch import differentiable_gradients, next_power_of_two, on_device
from mezzo.kernels._registry import register
from mezzo.kernels._tiles import STAGES, add_up, column_tile, in_rows, share_rows

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "relu": F.relu,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "silu": F.silu,
}
"""By the name that the operator takes; the kernels know them by their position."""
_GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda grad, y: torch.where(y <= 0, 0.0, grad),
    "relu6": lambda grad, y: torch.where((y <= 0) | (y >= 6), 0.0, grad),
    "hardswish": lambda grad, y: torch.where(y <= -3, 0.0, torch.where(y < 3, grad * (y / 3 + 0.5), grad)),
    "silu": lambda grad, y: grad * y.sigmoid() * (1 + y * (1 - y.sigmoid())),
}
"""The gradient of an activation's input, from the gradient of its result and the input."""
BEFORE_RESIDUAL = ("none", "relu")
"""Activations that may follow a residual: their slope is known from their result."""

_JOINED = 8
"""Channels whose sums one program joins."""


def batch_norm_activation(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str = "none"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `activation(batch norm of x + residual)`, and mean and unbiased variance of each channel.

    Args:
        x: (N, C, H, W), float16, bfloat16 or float32; more than one value per channel.
        residual: Of the same shape and dtype; None: nothing is added. Only `BEFORE_RESIDUAL` may follow it.
        weight: One per channel, of any floating dtype; None: no factor.
        bias: Likewise; None: nothing is added.
        eps: Added to the variance.
        activation: A key of `ACTIVATIONS`.
    """
    result, statistics = batch_norm(x, residual, weight, bias, eps, activation)
    return result, statistics[0], statistics[2]


def _plain(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str
) -> Tensor:
    weight, bias = (None if param is None else param.float() for param in (weight, bias))
    y = F.batch_norm(x.float(), None, None, weight, bias, training=True, eps=eps)
    y = y if residual is None else y + residual.float()
    return ACTIVATIONS[activation](y).to(x.dtype)


def _statistics(x: Tensor, eps: float) -> Tensor:
    """Return mean, inverse deviation and unbiased variance of each channel, by torch."""
    variance, mean = torch.var_mean(x.float(), dim=(0, 2, 3), correction=0)
    count = x.numel() // x.shape[1]
    return torch.stack([mean, (variance + eps).rsqrt(), variance * (count / (count - 1))])


def _pixels(x: Tensor) -> int:
    return x.shape[0] * x.shape[2] * x.shape[3]


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _switches(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, activation: str
) -> dict[str, Any]:
    return {
        "ACTIVATION": list(ACTIVATIONS).index(activation),
        "HAS_RESIDUAL": residual is not None,
        "HAS_WEIGHT": weight is not None,
        "HAS_BIAS": bias is not None,
        "CHANNELS": x.shape[1],
    }


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str
) -> tuple[Tensor, Tensor]:
    from mezzo.kernels import _batch_norm_kernels as kernels

    channels, pixels = x.shape[1], _pixels(x)
    x, residual = in_rows(x), None if residual is None else in_rows(residual)
    tile = column_tile(channels)
    columns = tile["COLUMNS"]
    programs, steps = share_rows(pixels, columns, tile["ROWS"], x.device)
    parts = x.new_empty((1, programs, 2 * channels), dtype=torch.float32)
    statistics = x.new_empty((3, channels), dtype=torch.float32)
    result = _like(x)
    with on_device(x.device):
        kernels.batch_statistics_kernel[(programs * columns,)](
            x, parts, pixels, STEPS=steps, STAGES=STAGES, CHANNELS=channels, **tile
        )
        kernels.join_statistics_kernel[(-(-channels // _JOINED),)](
            parts, statistics, programs, pixels, steps * tile["ROWS"], eps,
            CHANNELS=channels, PARTS=next_power_of_two(programs), BLOCK=_JOINED, num_warps=4,
        )  # fmt: skip
        kernels.batch_norm_kernel[(-(-pixels // tile["ROWS"]) * columns,)](
            x, residual, weight, bias, statistics, result, pixels,
            **_switches(x, residual, weight, bias, activation), **tile,
        )  # fmt: skip
    return result, statistics


def _backward(
    grad: Tensor, x: Tensor, result: Tensor | None, weight: Tensor | None, bias: Tensor | None, statistics: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from mezzo.kernels import _batch_norm_kernels as kernels

    channels, pixels = x.shape[1], _pixels(x)
    grad, x, result = in_rows(grad), in_rows(x), None if result is None else in_rows(result)
    tile = column_tile(channels)
    columns = tile["COLUMNS"]
    programs, steps = share_rows(pixels, columns, tile["ROWS"], x.device)
    parts = x.new_empty((1, programs, 2 * channels), dtype=torch.float32)
    sums = x.new_empty((2, channels), dtype=torch.float32)
    grad_x, grad_residual = _like(x), _like(x) if result is not None else x.new_empty(0)
    switches = _switches(x, result, weight, bias, activation)
    with on_device(x.device):
        kernels.batch_norm_sums_kernel[(programs * columns,)](
            grad, x, result, weight, bias, statistics, parts, pixels, STEPS=steps, STAGES=STAGES, **switches, **tile
        )
        add_up(parts, sums)
        kernels.batch_norm_backward_kernel[(-(-pixels // tile["ROWS"]) * columns,)](
            grad, x, result, weight, bias, statistics, sums, grad_x, grad_residual, pixels, **switches, **tile
        )
    return grad_x, grad_residual, sums


def _plain_backward(
    grad: Tensor, x: Tensor, result: Tensor | None, weight: Tensor | None, bias: Tensor | None, statistics: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what `_backward` returns, by torch in float32."""

    def per_channel(values: Tensor) -> Tensor:
        return values.float().view(1, -1, 1, 1)

    mean, scale = per_channel(statistics[0]), per_channel(statistics[1])
    normed, given = (x.float() - mean) * scale, grad.float()
    if activation != "none":
        y = normed if weight is None else normed * per_channel(weight)
        y = (y if bias is None else y + per_channel(bias)) if result is None else result.float()
        given = _GRADIENTS[activation](given, y)
    sums = torch.stack([given.sum((0, 2, 3)), (given * normed).sum((0, 2, 3))])
    of_bias, of_weight = (per_channel(each / _pixels(x)) for each in sums)
    whole = scale if weight is None else scale * per_channel(weight)
    grad_x = in_rows(((given - of_bias - normed * of_weight) * whole).to(x.dtype))
    return grad_x, in_rows(given.to(x.dtype)) if result is not None else x.new_empty(0), sums


# The operators


def _empty_batch_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str
) -> tuple[Tensor, Tensor]:
    return _like(x), x.new_empty((3, x.shape[1]), dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, residual, weight, bias, ctx.eps, ctx.activation = inputs
    result, statistics = output
    ctx.mark_non_differentiable(statistics)
    ctx.set_materialize_grads(False)
    ctx.has_residual = residual is not None
    needs_result = ctx.has_residual and ctx.activation != "none"
    ctx.save_for_backward(
        x, result if needs_result else None, weight, bias, statistics, residual if needs_result else None
    )


def _differentiate(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None, None, None
    x, result, weight, bias, statistics, residual = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph
        compute = partial(_plain, eps=ctx.eps, activation=ctx.activation)
        found = differentiable_gradients(compute, (x, residual, weight, bias), grad)
        of_residual = grad if ctx.has_residual and residual is None else found[1]
        return found[0], of_residual, *found[2:], None, None
    with no_torch_function():  # recorded as a gradient, not as a call of the user
        of_x, of_residual, sums = batch_norm_backward(grad, x, result, weight, bias, statistics, ctx.activation)
    return (
        of_x,
        None if not ctx.has_residual else grad if result is None else of_residual,
        None if weight is None else sums[1].to(weight.dtype),
        None if bias is None else sums[0].to(bias.dtype),
        None,
        None,
    )


@register(fake=_empty_batch_norm, setup_context=_keep, backward=_differentiate)
def batch_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str
) -> tuple[Tensor, Tensor]:
    """Return the result in channels-last, and mean, inverse deviation and unbiased variance of each channel."""
    if has_triton(x.device):
        return _forward(x, residual, weight, bias, eps, activation)
    return in_rows(_plain(x, residual, weight, bias, eps, activation)), _statistics(x, eps)


def _empty_gradients(
    grad: Tensor, x: Tensor, result: Tensor | None, weight: Tensor | None, bias: Tensor | None, statistics: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    of_residual = _like(x) if result is not None else x.new_empty(0)
    return _like(x), of_residual, x.new_empty((2, x.shape[1]), dtype=torch.float32)


@register(fake=_empty_gradients)
def batch_norm_backward(
    grad: Tensor, x: Tensor, result: Tensor | None, weight: Tensor | None, bias: Tensor | None, statistics: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of input and residual, and those of bias and weight as rows of one tensor.

    Args:
        grad: Of the result of `batch_norm`.
        x: Its input.
        result: Its result, if a residual was added before an activation; None otherwise. Without it
            the gradient of the residual is an empty tensor.
        weight: One per channel, or None.
        bias: Likewise.
        statistics: What `batch_norm` returned.
        activation: A key of `ACTIVATIONS`.
    """
    backward = _backward if has_triton(x.device) else _plain_backward
    return backward(grad, x, result, weight, bias, statistics, activation)
