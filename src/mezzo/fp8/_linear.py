"""The FP8 linear layer as an operator with a gradient.

Level O3 calls it, eager or in a captured graph.

The forward pass saves the transposed input in FP8 for the backward pass: half the memory of a half
input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mezzo._torch.dispatcher import AUTOCAST_KEYS, ExcludeKeys, call_below_autograd
from mezzo._torch.modes import no_torch_function
from mezzo._torch.operators import unsafe_view
from mezzo.fp8._gathered import GatheredWeight, add_rule
from mezzo.fp8._inputs import input_operand
from mezzo.fp8._numbers import E4M3
from mezzo.fp8._parts import (
    GRADIENT,
    INPUT,
    define_operator,
    layer_operand,
    multiply_by_weight,
    multiply_gradient,
)
from mezzo.fp8._product import refuse_without_fp8
from mezzo.fp8._recipe import recipe_from_text
from mezzo.fp8._weights import copies_of, history_of

FP8_LINEAR, FP8_LINEAR_BACKWARD = "mezzo::fp8_linear", "mezzo::fp8_linear_backward"
"""Names of the operators in recordings and graphs."""

_LIBRARY = torch.library.Library("mezzo", "FRAGMENT")


def _register(name: str, function: Callable[..., Any], fake: Callable[..., Any], with_gradient: Any) -> None:
    """Register an operator.

    `torch.library.custom_op` does the same, but its checks cost 0.2 ms per call.

    Args:
        name: With its namespace.
        function: The implementation.
        fake: Returns empty tensors of the right shapes.
        with_gradient: Its autograd function; `forward` takes the dispatch keys first.
    """
    _LIBRARY.define(
        name.removeprefix("mezzo::") + torch.library.infer_schema(function, mutates_args=()),
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=_LIBRARY)
    operator = getattr(torch.ops.mezzo, name.removeprefix("mezzo::")).default

    def call(keys: Any, *args: Any) -> Any:
        wants_gradient = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)
        return with_gradient.apply(keys, *args) if wants_gradient else call_below_autograd(operator, keys, args)

    _LIBRARY.impl(name, call, "Autograd", with_keyset=True)


def _in_shape(matrix: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a matrix in another shape, not as a view.

    The next operator may write results in place.
    """
    result: Tensor = unsafe_view(matrix, shape)
    return result


def _fp8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, keeps_input: bool, shares_input: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, the transposed input in FP8 or an empty tensor, and its inverse scale.

    With `shares_input` the operand is reused if the layer before converted the same input.
    """
    rule = recipe_from_text(recipe)
    refuse_without_fp8(x.device, rule.emulate)
    by_row = rule.granularity == "row"
    with ExcludeKeys(AUTOCAST_KEYS):
        if shares_input and history_of(weight, INPUT, rule) is None:
            operand = input_operand(x, by_row=by_row)
        else:
            # Evaluation does not change scales
            learns = weight if keeps_input else None
            operand = layer_operand(x, rule, INPUT, weight=learns, transposed=keeps_input)
        result = multiply_by_weight(operand.values, operand.inverse, weight, rule, x.dtype, bias=bias)
    shaped = _in_shape(result, (*x.shape[:-1], weight.shape[0]))
    if keeps_input:
        return shaped, operand.transposed, operand.transposed_inverse
    return shaped, x.new_empty(0, dtype=E4M3), x.new_empty((0,) if by_row else (), dtype=torch.float32)


def _fake_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, keeps_input: bool, shares_input: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    by_row = recipe_from_text(recipe).granularity == "row"
    kept = (x.shape[-1], rows) if keeps_input else (0,)
    inverse = () if not by_row else (x.shape[-1], 1) if keeps_input else (0,)
    return (
        x.new_empty((*x.shape[:-1], weight.shape[0])),
        x.new_empty(kept, dtype=E4M3),
        x.new_empty(inverse, dtype=torch.float32),
    )


def _fp8_linear_backward(
    grad: Tensor,
    input_t: Tensor,
    input_inverse: Tensor,
    weight: Tensor,
    recipe: str,
    for_input: bool,
    for_weight: bool,
    for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias; empty if not asked for."""
    rule = recipe_from_text(recipe)
    of_input = of_weight = of_bias = None
    with ExcludeKeys(AUTOCAST_KEYS):
        operand = layer_operand(
            grad,
            rule,
            GRADIENT,
            weight=weight,
            values=for_input,
            transposed=for_weight,
            sums=grad.dtype if for_bias else None,
        )
        if for_input:
            of_input = multiply_by_weight(operand.values, operand.inverse, weight, rule, grad.dtype, is_backward=True)
            of_input = _in_shape(of_input, (*grad.shape[:-1], weight.shape[1]))
        if for_weight:
            of_weight = multiply_gradient(
                operand.transposed, operand.transposed_inverse, input_t, input_inverse, rule, weight.dtype
            )
        if for_bias:
            of_bias = operand.column_sums
    # An operator must return tensors, and no tensor twice.
    return (
        grad.new_empty(0) if of_input is None else of_input,
        grad.new_empty(0) if of_weight is None else of_weight,
        grad.new_empty(0) if of_bias is None else of_bias,
    )


def _fake_linear_backward(
    grad: Tensor,
    input_t: Tensor,
    input_inverse: Tensor,
    weight: Tensor,
    recipe: str,
    for_input: bool,
    for_weight: bool,
    for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    outputs, inputs = weight.shape
    return (
        grad.new_empty((*grad.shape[:-1], inputs) if for_input else (0,)),
        grad.new_empty((outputs, inputs) if for_weight else (0,), dtype=weight.dtype),
        grad.new_empty((outputs,) if for_bias else (0,)),
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keys: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        _, weight, bias, ctx.recipe, *_ = args
        result, input_t, inverse = call_below_autograd(torch.ops.mezzo.fp8_linear.default, keys, args)
        ctx.save_for_backward(weight, input_t, inverse)
        # Checkpointing hands an alias of a saved weight to the backward pass; copies and histories belong to the weight
        ctx.with_copies = weight if copies_of(weight) is not None else None
        ctx.has_bias = bias is not None
        ctx.mark_non_differentiable(input_t, inverse)
        ctx.set_materialize_grads(False)
        return result, input_t, inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * 7
        weight, input_t, inverse = ctx.saved_tensors
        weight = weight if ctx.with_copies is None else ctx.with_copies
        _, for_input, for_weight, for_bias = ctx.needs_input_grad[:4]
        for_bias = ctx.has_bias and for_bias
        # A recording shows it as a gradient, like the kernels that autograd calls
        with no_torch_function():
            found = torch.ops.mezzo.fp8_linear_backward(
                grad, input_t, inverse, weight, ctx.recipe, for_input, for_weight, for_bias
            )
        wanted = (for_input, for_weight, for_bias)
        gradients = (value if asked else None for value, asked in zip(found, wanted, strict=True))
        return (None, *gradients, None, None, None)


class _LinearBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keys: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = call_below_autograd(
            torch.ops.mezzo.fp8_linear_backward.default, keys, args
        )
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        raise RuntimeError(
            "level O3: FP8 products have no second derivative; use level O2, or keep layers out of FP8 with "
            "amp.keep_in_half(model, ...)"
        )


# The same with a weight that was gathered in FP8. A graph has these operators: it takes plain tensors.


def _gathered_linear(
    x: Tensor, values: Tensor, inverse: Tensor, bias: Tensor | None, recipe: str, keeps_input: bool, shares_input: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _fp8_linear(x, GatheredWeight(values, inverse, x.dtype), bias, recipe, keeps_input, shares_input)


def _fake_gathered_linear(
    x: Tensor, values: Tensor, inverse: Tensor, bias: Tensor | None, recipe: str, keeps_input: bool, shares_input: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_linear(x, values, bias, recipe, keeps_input, shares_input)


def _gathered_linear_backward(
    grad: Tensor,
    input_t: Tensor,
    input_inverse: Tensor,
    values: Tensor,
    inverse: Tensor,
    recipe: str,
    for_input: bool,
    for_weight: bool,
    for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    weight = GatheredWeight(values, inverse, grad.dtype)
    return _fp8_linear_backward(grad, input_t, input_inverse, weight, recipe, for_input, for_weight, for_bias)


def _fake_gathered_linear_backward(
    grad: Tensor,
    input_t: Tensor,
    input_inverse: Tensor,
    values: Tensor,
    inverse: Tensor,
    recipe: str,
    for_input: bool,
    for_weight: bool,
    for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    weight = values.new_empty(values.shape, dtype=grad.dtype)
    return _fake_linear_backward(grad, input_t, input_inverse, weight, recipe, for_input, for_weight, for_bias)


_register(FP8_LINEAR, _fp8_linear, _fake_linear, _Linear)
_register(FP8_LINEAR_BACKWARD, _fp8_linear_backward, _fake_linear_backward, _LinearBackward)

_by_gathered = define_operator("fp8_gathered_linear", _gathered_linear, _fake_gathered_linear)
_by_gathered_backward = define_operator(
    "fp8_gathered_linear_backward", _gathered_linear_backward, _fake_gathered_linear_backward
)
add_rule(
    torch.ops.mezzo.fp8_linear.default,
    lambda x, weight, *rest: _by_gathered(x, weight.numbers, weight.inverse_scale, *rest),
)
add_rule(
    torch.ops.mezzo.fp8_linear_backward.default,
    lambda grad, input_t, inverse, weight, *rest: _by_gathered_backward(
        grad, input_t, inverse, weight.numbers, weight.inverse_scale, *rest
    ),
)


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: str) -> Tensor:
    """Return `x @ weight.T + bias` with both operands in FP8; the backward pass uses FP8 too.

    Args:
        x: [..., inputs], half.
        weight: [outputs, inputs], of the same dtype.
        bias: [outputs], of the same dtype, or None.
        recipe: From `recipe_to_text`.
    """
    keeps_input = torch.is_grad_enabled() and weight.requires_grad
    # Compiled code reuses the memory of activations without a new version: do not share there.
    shares_input = keeps_input and type(x) in (Tensor, nn.Parameter)
    result: Tensor = torch.ops.mezzo.fp8_linear(x, weight, bias, recipe, keeps_input, shares_input)[0]
    return result
