"""An FP8 linear layer in parts, for compiled code.

Inductor cannot look into `mezzo::fp8_linear`. So it gets the layer as several operators. The largest
magnitude of an operand is plain torch: Inductor computes it in the kernel that produces the operand,
such as a norm or SwiGLU, without a pass of its own. Converting an operand is one operator, which
layers with the same input share. The products are one operator each, as Inductor calls them anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from mezzo._torch.autograd_engine import graph_task_id
from mezzo._torch.dispatcher import AUTOCAST_KEYS, ExcludeKeys
from mezzo._torch.inductor import decompose_in_inductor
from mezzo.fp8._numbers import E4M3, FORMATS, round_to, scale_for
from mezzo.fp8._operands import Operand, make_operand, turn_operand
from mezzo.fp8._product import multiply, refuse_without_fp8
from mezzo.fp8._recipe import Fp8Recipe, recipe_from_text
from mezzo.fp8._weights import history_of, weight_operand

INPUT, GRADIENT = "input", "gradient"
"""Roles of an operand: the input of a layer, and the gradient of its output."""

_LIBRARY = torch.library.Library("mezzo", "FRAGMENT")


def format_of(role: str, rule: Fp8Recipe) -> torch.dtype:
    """Return the FP8 dtype of an operand."""
    return E4M3 if role == INPUT else FORMATS[rule.gradient]


def layer_operand(
    x: Tensor,
    rule: Fp8Recipe,
    role: str,
    *,
    weight: Tensor | None,
    amax: Tensor | None = None,
    values: bool = True,
    transposed: bool = True,
    sums: torch.dtype | None = None,
) -> Operand:
    """Return an operand of a layer in FP8.

    Args:
        x: [..., columns].
        rule: The recipe.
        role: INPUT or GRADIENT.
        weight: Of the layer: it has the history of delayed scaling. None: no history.
        amax: The largest magnitude if it is known; one number.
        values: Return the matrix.
        transposed: Return its transpose.
        sums: Return the sums of its columns in this dtype; None: no sums.
    """
    global _without_history
    history = None if weight is None else history_of(weight, role, rule)
    if history is None and weight is not None and rule.scaling == "delayed":
        _without_history += 1
    if history is not None and not history.is_empty and _is_recomputed(role):
        # With the same scale, and without a second entry in the history
        amax, history = history.used, None
    return make_operand(
        x.reshape(-1, x.shape[-1]).contiguous(),
        format_of(role, rule),
        values=values,
        transposed=transposed,
        sums=sums,
        by_row=rule.granularity == "row",
        history=history,
        amax=amax,
    )


_without_history = 0


def count_without_history() -> int:
    """Return how often an operand had current scaling although delayed was asked for: its weight has no master."""
    return _without_history


def _is_recomputed(role: str) -> bool:
    """Whether activation checkpointing computes a layer a second time."""
    return role == INPUT and graph_task_id() != -1


def multiply_by_weight(
    values: Tensor,
    inverse: Tensor,
    weight: Tensor,
    rule: Fp8Recipe,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    is_backward: bool = False,
) -> Tensor:
    """Return an FP8 operand times the transposed weight; in the backward pass times the weight.

    Args:
        values: The operand.
        inverse: Undoes its scale.
        weight: Half, [outputs, inputs].
        rule: The recipe.
        dtype: Of the result.
        bias: Added to the result.
        is_backward: `values` is the gradient of the layer's output.
    """
    by = weight_operand(weight, rule, transposed=is_backward)
    matrix, scale = (by.transposed, by.transposed_inverse) if is_backward else (by.values, by.inverse)
    return _multiply(values, inverse, matrix, scale, rule, dtype, bias, is_backward)


def _multiply(
    values: Tensor,
    inverse: Tensor,
    matrix: Tensor,
    matrix_inverse: Tensor,
    rule: Fp8Recipe,
    dtype: torch.dtype,
    bias: Tensor | None,
    is_backward: bool,
) -> Tensor:
    fast = rule.fast_accumulation == "always" if is_backward else rule.fast_accumulation != "never"
    return multiply(values, inverse, matrix, matrix_inverse, dtype, bias=bias, fast=fast, emulate=rule.emulate)


def multiply_gradient(
    grad_t: Tensor, grad_inverse: Tensor, input_t: Tensor, input_inverse: Tensor, rule: Fp8Recipe, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of a weight from the transposed FP8 operands of a layer."""
    fast = rule.fast_accumulation == "always"
    return multiply(grad_t, grad_inverse, input_t, input_inverse, dtype, fast=fast, emulate=rule.emulate)


# The operators of compiled code


def _operand(
    x: Tensor,
    amax: Tensor | None,
    weight: Tensor | None,
    recipe: str,
    role: str,
    values: bool,
    transposed: bool,
    sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the matrix in FP8, its transpose, the inverse scales of both, and the sums of columns.

    Parts that were not asked for are empty. With one scale per tensor the second inverse is empty.
    """
    rule = recipe_from_text(recipe)
    with ExcludeKeys(AUTOCAST_KEYS):
        found = layer_operand(
            x, rule, role, weight=weight, amax=amax, values=values, transposed=transposed,
            sums=x.dtype if sums else None,
        )  # fmt: skip
    nothing = x.new_empty(0, dtype=torch.float32)
    return (
        found.values,
        found.transposed,
        found.inverse,
        found.transposed_inverse if rule.granularity == "row" else nothing,
        x.new_empty(0) if found.column_sums is None else found.column_sums,
    )


def _fake_operand(
    x: Tensor,
    amax: Tensor | None,
    weight: Tensor | None,
    recipe: str,
    role: str,
    values: bool,
    transposed: bool,
    sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rule, (rows, columns) = recipe_from_text(recipe), x.shape
    dtype, by_row = format_of(role, rule), rule.granularity == "row"
    return (
        x.new_empty((rows, columns) if values else (0,), dtype=dtype),
        x.new_empty((columns, rows) if transposed else (0,), dtype=dtype),
        x.new_empty(((rows, 1) if values else (0,)) if by_row else (), dtype=torch.float32),
        x.new_empty((columns, 1) if by_row and transposed else (0,), dtype=torch.float32),
        x.new_empty((columns,) if sums else (0,)),
    )


def _product(
    values: Tensor, inverse: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, is_backward: bool
) -> Tensor:
    rule = recipe_from_text(recipe)
    refuse_without_fp8(values.device, rule.emulate)
    with ExcludeKeys(AUTOCAST_KEYS):
        return multiply_by_weight(values, inverse, weight, rule, weight.dtype, bias=bias, is_backward=is_backward)


def _fake_product(
    values: Tensor, inverse: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, is_backward: bool
) -> Tensor:
    return weight.new_empty(values.shape[0], weight.shape[1 if is_backward else 0])


def _product_of_rows(
    values: Tensor,
    inverse: Tensor,
    matrix: Tensor,
    matrix_inverse: Tensor,
    bias: Tensor | None,
    recipe: str,
    is_backward: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Return a product with scales per row; the graph holds the converted weight, for both passes."""
    rule = recipe_from_text(recipe)
    refuse_without_fp8(values.device, rule.emulate)
    with ExcludeKeys(AUTOCAST_KEYS):
        return _multiply(values, inverse, matrix, matrix_inverse, rule, dtype, bias, is_backward)


def _fake_product_of_rows(
    values: Tensor,
    inverse: Tensor,
    matrix: Tensor,
    matrix_inverse: Tensor,
    bias: Tensor | None,
    recipe: str,
    is_backward: bool,
    dtype: torch.dtype,
) -> Tensor:
    return values.new_empty((values.shape[0], matrix.shape[0]), dtype=dtype)


def _weight_gradient(
    grad_t: Tensor, grad_inverse: Tensor, input_t: Tensor, input_inverse: Tensor, recipe: str, dtype: torch.dtype
) -> Tensor:
    rule = recipe_from_text(recipe)
    with ExcludeKeys(AUTOCAST_KEYS):
        return multiply_gradient(grad_t, grad_inverse, input_t, input_inverse, rule, dtype)


def _fake_weight_gradient(
    grad_t: Tensor, grad_inverse: Tensor, input_t: Tensor, input_inverse: Tensor, recipe: str, dtype: torch.dtype
) -> Tensor:
    return grad_t.new_empty((grad_t.shape[0], input_t.shape[0]), dtype=dtype)


def _known_amax(weight: Tensor, recipe: str, role: str) -> Tensor:
    """Return the amax that gives the delayed scale of an operand."""
    history = history_of(weight, role, recipe_from_text(recipe))
    if history is None or history.is_empty:
        raise RuntimeError(
            "level O3: a compiled layer with delayed scaling ran before its first scale was known; compile the step with "
            "mezzo.static.compile_step, or use scaling='current'"
        )
    return history.amax.clone()


def _fake_known_amax(weight: Tensor, recipe: str, role: str) -> Tensor:
    return weight.new_empty(1, dtype=torch.float32)


def _turned(values: Tensor, amax: Tensor, weight: Tensor, recipe: str, role: str) -> Tensor:
    """Return an FP8 matrix transposed, and store its amax in the history of the weight.

    Only the backward pass needs the transpose. So with activation checkpointing, too, compiled code
    calls this once per step, after the last use of the scale.
    """
    history = history_of(weight, role, recipe_from_text(recipe))
    with ExcludeKeys(AUTOCAST_KEYS):
        return turn_operand(values.contiguous(), amax, history)


def _fake_turned(values: Tensor, amax: Tensor, weight: Tensor, recipe: str, role: str) -> Tensor:
    return values.new_empty(values.shape[1], values.shape[0])


def define_operator(name: str, function: Any, fake: Any) -> Any:
    """Define an operator of mezzo without a gradient; return its overload."""
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mezzo::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.mezzo, name).default


_fp8_operand = define_operator("fp8_operand", _operand, _fake_operand)
_fp8_product = define_operator("fp8_product", _product, _fake_product)
_fp8_product_of_rows = define_operator("fp8_product_of_rows", _product_of_rows, _fake_product_of_rows)
_fp8_weight_gradient = define_operator("fp8_weight_gradient", _weight_gradient, _fake_weight_gradient)
_fp8_known_amax = define_operator("fp8_known_amax", _known_amax, _fake_known_amax)
_fp8_turned = define_operator("fp8_turned", _turned, _fake_turned)


# Delayed scaling in one kernel with what produces an operand


_writes_fp8 = False


@contextmanager
def fp8_written_by_producers() -> Iterator[None]:
    """Inside, Inductor compiles layers with delayed scaling so that the producer of an operand writes it in FP8.

    Only for layers whose histories are not empty: the scale must be known before the operand is.
    """
    global _writes_fp8
    before, tag = _writes_fp8, torch.compiler.config.cache_key_tag
    _writes_fp8, torch.compiler.config.cache_key_tag = True, f"{tag}-fp8-by-producers"
    try:
        yield
    finally:
        _writes_fp8, torch.compiler.config.cache_key_tag = before, tag


# The layer, written with them


def _traced_operand(
    x: Tensor, weight: Tensor, recipe: str, role: str, values: bool, transposed: bool, sums: bool, has_history: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rule, matrix = recipe_from_text(recipe), x.reshape(-1, x.shape[-1])
    is_written = has_history and transposed and _writes_fp8
    amax = None
    if is_written or (not has_history and rule.granularity == "tensor"):
        # By rows first: that is the shape of the kernels which produce the matrix.
        amax = matrix.abs().amax(1).amax().float().reshape(1)
    if is_written:
        scale = scale_for(_fp8_known_amax(weight, recipe, role), format_of(role, rule)).reshape(())
        small = round_to(matrix, scale, format_of(role, rule))
        turned = _fp8_turned(small, amax, weight, recipe, role)
        column_sums = matrix.float().sum(0).to(x.dtype) if sums else x.new_empty(0)
        inverse = 1.0 / scale
        return small, turned, inverse, inverse, column_sums
    found: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = _fp8_operand(
        matrix, amax, weight if has_history else None, recipe, role, values, transposed, sums
    )
    small, turned, inverse, turned_inverse, column_sums = found
    return small, turned, inverse, turned_inverse if rule.granularity == "row" else inverse, column_sums


def _traced_product(
    values: Tensor, inverse: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, is_backward: bool
) -> Tensor:
    found: Tensor
    if recipe_from_text(recipe).granularity == "tensor":
        found = _fp8_product(values, inverse, weight, bias, recipe, is_backward)
        return found
    # The same call in both passes, which Inductor joins: the weight is converted once per step.
    plain, turned, plain_inverse, turned_inverse, _ = _fp8_operand(
        weight.detach(), None, None, recipe, INPUT, True, True, False
    )
    matrix, scale = (turned, turned_inverse) if is_backward else (plain, plain_inverse)
    found = _fp8_product_of_rows(values, inverse, matrix, scale, bias, recipe, is_backward, weight.dtype)
    return found


def _linear_in_parts(
    x: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, keeps_input: bool, shares_input: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `mezzo::fp8_linear` returns."""
    rule = recipe_from_text(recipe)
    with ExcludeKeys(AUTOCAST_KEYS):
        has_history = keeps_input and rule.scaling == "delayed"
        values, transposed, inverse, transposed_inverse, _ = _traced_operand(
            x, weight, recipe, INPUT, True, keeps_input, False, has_history
        )
        result = _traced_product(values, inverse, weight, bias, recipe, False).view(*x.shape[:-1], weight.shape[0])
        if not keeps_input:
            transposed_inverse = x.new_empty((0,) if rule.granularity == "row" else (), dtype=torch.float32)
    return result, transposed, transposed_inverse


def _linear_backward_in_parts(
    grad: Tensor,
    input_t: Tensor,
    input_inverse: Tensor,
    weight: Tensor,
    recipe: str,
    for_input: bool,
    for_weight: bool,
    for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `mezzo::fp8_linear_backward` returns."""
    rule = recipe_from_text(recipe)
    with ExcludeKeys(AUTOCAST_KEYS):
        values, transposed, inverse, transposed_inverse, sums = _traced_operand(
            grad, weight, recipe, GRADIENT, for_input, for_weight, for_bias, rule.scaling == "delayed"
        )
        if for_input:
            of_input = _traced_product(values, inverse, weight, None, recipe, True)
            of_input = of_input.view(*grad.shape[:-1], weight.shape[1])
        else:
            of_input = grad.new_empty(0)
        if for_weight:
            of_weight = _fp8_weight_gradient(
                transposed, transposed_inverse, input_t, input_inverse, recipe, weight.dtype
            )
        else:
            of_weight = grad.new_empty(0)
    return of_input, of_weight, sums


def show_parts_to_inductor() -> None:
    """Let Inductor compile FP8 layers in parts; call it before a compilation. Loads Inductor."""
    decompose_in_inductor(
        {
            torch.ops.mezzo.fp8_linear.default: _linear_in_parts,
            torch.ops.mezzo.fp8_linear_backward.default: _linear_backward_in_parts,
        }
    )


_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)


def _viewed(matrix: Node) -> tuple[Any, ...]:
    """Return the tensor that a matrix is a view of, and its shape: each layer makes its own view of an input."""
    shape = tuple(matrix.meta["val"].shape)
    return (matrix.args[0] if matrix.target in _VIEWS else matrix, *shape)


def share_delayed_operands(graph: Graph) -> None:
    """Let layers with the same input and delayed scaling share one conversion, in a captured graph.

    Their histories would have the same numbers: the first layer's serves all.
    """
    _share_written_operands(graph)
    first: dict[tuple[Any, ...], Node] = {}
    for node in list(graph.nodes):
        if node.target is not _fp8_operand:
            continue
        x, amax, weight, *rest = node.args
        if weight is None:
            continue  # equal calls, which Inductor joins itself
        known = first.setdefault((_viewed(x), amax, *rest), node)
        if known is not node:
            node.replace_all_uses_with(known)
            graph.erase_node(node)


def _share_written_operands(graph: Graph) -> None:
    """Let layers with the same input use the history of the first one; Inductor then joins their equal calls."""
    layers: dict[tuple[Any, ...], list[Node]] = {}
    for node in graph.nodes:
        if node.target is _fp8_turned and node.args[4] == INPUT:
            layers.setdefault(_viewed(_measured(node.args[1])), []).append(node.args[2])
    uses = Counter(weight for weights in layers.values() for weight in weights)
    first = {
        weight: weights[0]
        for weights in layers.values()
        for weight in weights[1:]
        if uses[weight] == uses[weights[0]] == 1
    }
    for node in graph.nodes:
        place = {_fp8_turned: 2, _fp8_known_amax: 0}.get(node.target)
        if place is not None and node.args[-1] == INPUT and node.args[place] in first:
            node.update_arg(place, first[node.args[place]])


def _measured(amax: Any) -> Node:
    """Return the matrix whose amax a node computes."""
    while amax.target is not torch.ops.aten.abs.default:
        amax = amax.args[0]
    matrix: Node = amax.args[0]
    return matrix
