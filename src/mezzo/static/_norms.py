"""Layer norms and RMS norms in a captured graph: operators of mezzo's, where one product is all that reads the result.

If the input of a norm is a sum, as behind a residual, one operator computes both. Its backward joins the
gradients of the norm and of the sum.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional as F

from mezzo.amp import current_policy
from mezzo.dtypes import HALF_DTYPES
from mezzo.kernels import MOST_NORMED, add_layer_norm, add_rms_norm
from mezzo.static._rows import CONVOLUTIONS, as_rows, feeds_one_product, takes_rows
from mezzo.static._writes import can_move, is_tensor

_ADDITIONS = (operator.add, torch.add)
_LAYER, _RMS = "layer_norm", "rms_norm"
_KINDS = {F.layer_norm: _LAYER, torch.layer_norm: _LAYER, F.rms_norm: _RMS, torch.rms_norm: _RMS}
_PARAMETERS = {
    _LAYER: ("input", "normalized_shape", "weight", "bias", "eps"),
    _RMS: ("input", "normalized_shape", "weight", "eps"),
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    _LAYER: {"weight": None, "bias": None, "eps": 1e-5},
    _RMS: {"weight": None, "bias": None, "eps": None},
}
_MOST_DIMS = 3
"""Dimensions of a sum: of four, Inductor would make channels-last copies."""


def fuse_norms(graph: Graph) -> int:
    """Let each norm over the last dimension in Dynamo's graph that only one product reads call mezzo's.

    Returns:
        How many were found. `add_and_normalise` decides with the dtypes of the traced graph.
    """
    found = 0
    for node in [each for each in graph.nodes if each.target in _KINDS]:
        kind = _KINDS[node.target]
        norm = {**_DEFAULTS[kind], **dict(zip(_PARAMETERS[kind], node.args, strict=False)), **node.kwargs}
        shape = norm["normalized_shape"]
        if isinstance(shape, Node) or len(shape) != 1:
            continue  # a dynamic size, or several dimensions
        if not isinstance(norm["input"], Node) or not feeds_one_product(node, CONVOLUTIONS):
            continue
        addition = norm["input"] if _is_residual(norm["input"], node) else None
        x, residual = (norm["input"], None) if addition is None else addition.args
        with graph.inserting_before(node):
            arguments = (x, residual, shape, norm["weight"], norm["bias"], norm["eps"], kind)
            call = graph.call_function(add_and_normalise, arguments)
            result, total = (graph.call_function(operator.getitem, (call, place)) for place in (0, 1))
        for old, new in ((node, result), (addition, total)):
            if old is not None:
                new.meta = dict(old.meta)
                old.replace_all_uses_with(new)
                graph.erase_node(old)
        if addition is None:
            graph.erase_node(total)
        found += 1
    return found


def _is_residual(addition: Node, norm: Node) -> bool:
    """Whether the input of a norm is a sum of two tensors that can be computed where the norm is."""
    if addition.target not in _ADDITIONS or len(addition.args) != 2 or addition.kwargs:
        return False
    shapes = [part.meta["example_value"].shape for part in addition.args if isinstance(part, Node) and is_tensor(part)]
    if len(shapes) != 2 or not all(isinstance(size, int) for size in (*shapes[0], *shapes[1])):
        return False  # a number, or a dynamic size, of which a comparison would make a guard
    if shapes[0] != shapes[1]:
        return False
    return all(not user < norm for user in addition.users) and can_move(addition, norm, addition.args)


def add_and_normalise(
    x: Tensor, residual: Tensor | None, shape: Any, weight: Tensor | None, bias: Tensor | None, eps: Any, kind: str
) -> tuple[Tensor, Tensor]:
    """Return the norm of `x + residual`, and that sum."""
    if _takes(x, residual, shape, weight, bias, kind):
        # Both summands get the same gradient. If each were a view of its own, two leaves would share its memory.
        rows = as_rows(x) if residual is None else x
        is_layer = kind == _LAYER
        norm, total = (
            add_layer_norm(rows, residual, weight, bias, eps) if is_layer else add_rms_norm(rows, residual, weight, eps)
        )
        return norm.view(x.shape), x if residual is None else total
    total = x if residual is None else x + residual
    if kind == _LAYER:
        return F.layer_norm(total, shape, weight, bias, eps), total
    return F.rms_norm(total, shape, weight, eps), total


NORM_CALLS = (add_and_normalise,)
"""What this pass puts into a graph."""


def _takes(
    x: Tensor, residual: Tensor | None, shape: Any, weight: Tensor | None, bias: Tensor | None, kind: str
) -> bool:
    """Whether mezzo's operator computes a call: half rows with parameters of their length, and no list says otherwise."""
    if current_policy() is None and torch.is_autocast_enabled(x.device.type):
        return False  # torch's autocast, which returns float32 on CUDA
    params = [param for param in (weight, bias) if param is not None]
    others = params if residual is None else [residual, *params]
    if not takes_rows(x, (kind,) if residual is None else ("add", kind), others) or x.shape[-1] > MOST_NORMED:
        return False
    if residual is not None:
        if not residual.is_contiguous() or (residual.dtype, residual.device) != (x.dtype, x.device):
            return False
        if residual.shape != x.shape or x.dim() > _MOST_DIMS:
            return False
        if not (x.requires_grad or residual.requires_grad) and any(param.requires_grad for param in params):
            return False  # the sum would require a gradient, too
    dtypes = (*HALF_DTYPES, torch.float32)
    return tuple(shape) == x.shape[-1:] and all(p.shape == x.shape[-1:] and p.dtype in dtypes for p in params)
