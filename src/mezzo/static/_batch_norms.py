"""Batch norms in a captured graph: norm, residual and activation become one operator of mezzo's.

The pass works on the calls that Dynamo recorded, before they are traced into operators: one call
takes the place of two or three. While it is traced, `norm_and_activate` sees the real dtypes and
layouts, and decides whether mezzo's operator is used; otherwise it makes the original calls.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional as F

from mezzo._torch.foreach import foreach_add_number_, foreach_lerp_
from mezzo._torch.step_tier import has_triton
from mezzo.amp import current_policy
from mezzo.dtypes import HALF_DTYPES
from mezzo.kernels import BEFORE_RESIDUAL, NORM_ACTIVATIONS, batch_norm_activation, has_rules, uses_own_operators
from mezzo.static._writes import can_move, is_tensor, storages_of

_PARAMETERS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_DEFAULTS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
_ADDITIONS = (operator.add, operator.iadd, torch.add)
_ACTIVATIONS = {
    F.relu: "relu",
    torch.relu: "relu",
    F.relu6: "relu6",
    F.hardswish: "hardswish",
    F.silu: "silu",
    "relu": "relu",
    "relu_": "relu",
}
"""Functions, and names of methods."""
MOST_AT_ONCE = 124
"""Fills two kernels of Inductor for averages and one for counters: a kernel takes at most 250 arguments, and the update
of an average has four, of a counter two."""


def fuse_batch_norms(graph: Graph) -> int:
    """Let one call do the work of each batch norm in training and of what follows it.

    Returns:
        How many batch norms were found.
    """
    updates: list[tuple[Node, Node, Node, float]] = []
    read_elsewhere = _storages_read_elsewhere(graph)
    for node in [each for each in graph.nodes if each.target is F.batch_norm]:
        norm = _arguments(node)
        running = norm["running_mean"], norm["running_var"]
        if norm["training"] is not True or norm["momentum"] is None or not _looks_right(norm["input"]):
            continue
        if not all(_is_own_buffer(average, read_elsewhere) for average in running):
            continue  # the averages are updated at the end of the graph: nothing else may read or update them
        shift = _take_bias_of_convolution(node, norm)
        last, residual, activation = _followers(node, [norm["input"], norm["weight"], norm["bias"], shift])
        is_in_place = residual is not None and any(user.target is operator.iadd for user in node.users)
        with graph.inserting_before(last):
            arguments = (norm["input"], residual, *running, norm["weight"], norm["bias"], norm["eps"], activation)
            call = graph.call_function(norm_and_activate, (*arguments, is_in_place, shift))
            result, statistics = (graph.call_function(operator.getitem, (call, place)) for place in (0, 1))
        result.meta = dict(last.meta)
        last.replace_all_uses_with(result)
        while last is not node:
            before: Any = last.args[1] if last.args[0] is residual else last.args[0]
            graph.erase_node(last)
            last = before
        graph.erase_node(node)
        updates.append((*running, statistics, norm["momentum"]))
    _update_averages(graph, updates)
    _count_batches(graph)
    return len(updates)


def _arguments(node: Node) -> dict[str, Any]:
    return {**_DEFAULTS, **dict(zip(_PARAMETERS, node.args, strict=False)), **node.kwargs}


def _take_bias_of_convolution(node: Node, norm: dict[str, Any]) -> Node | None:
    """Take the bias out of the convolution in front of a batch norm; return it, or None if there is none to take.

    A batch norm in training subtracts the mean, and the bias with it: only the running mean depends on the bias.
    Adding it reads and writes the whole image. Its gradient, rounding noise around zero, reads another image.
    """
    convolution, bias_of_norm = norm["input"], norm["bias"]
    if convolution.target is not F.conv2d or len(convolution.users) > 1 or not isinstance(bias_of_norm, Node):
        return None
    is_by_place = len(convolution.args) > 2
    bias = convolution.args[2] if is_by_place else convolution.kwargs.get("bias")
    if not isinstance(bias, Node) or not can_move(convolution, node, [bias], norm_and_activate):
        return None
    if is_by_place:
        convolution.update_arg(2, None)
    else:
        convolution.update_kwarg("bias", None)
    return bias


def _looks_right(node: Any) -> bool:
    """Whether Dynamo saw an image in channels-last; `_takes` decides, with the dtypes of the traced graph."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return (
        isinstance(value, Tensor)
        and value.dim() == 4
        and has_triton(value.device)
        and value.is_contiguous(memory_format=torch.channels_last)
    )


def _is_own_buffer(average: Any, read_elsewhere: set[int | None]) -> bool:
    """Whether a running average is an input of the graph that only this batch norm reads or writes."""
    if not isinstance(average, Node) or average.op != "placeholder" or len(average.users) > 1:
        return False
    return not storages_of([average]) & read_elsewhere


def _storages_read_elsewhere(graph: Graph) -> set[int | None]:
    """Return the memory that calls other than batch norms use."""
    used = (node for node in graph.nodes if any(user.target is not F.batch_norm for user in node.users))
    return storages_of(used)


def _followers(norm: Node, inputs: Sequence[Any]) -> tuple[Node, Node | None, str]:
    """Return the last call that can be joined with a batch norm, the residual and the activation.

    The joined call takes the place of the last one, so nothing in between may change what it reads.

    Args:
        norm: The batch norm.
        inputs: Its input, weight and bias, and the bias that was taken out of the convolution in front of it.
    """
    last = norm
    residual: Node | None = None
    user = _only_user(last)
    if user is not None and user.target in _ADDITIONS and len(user.args) == 2 and not user.kwargs:
        other: Any = user.args[1] if user.args[0] is norm else user.args[0]
        # `other += norm` changes `other` in place
        is_sum = is_tensor(other) and other is not norm and (user.target is not operator.iadd or user.args[0] is norm)
        if is_sum and can_move(norm, user, inputs, norm_and_activate):
            last, residual = user, other
            user = _only_user(last)
    activation = None if user is None else _ACTIVATIONS.get(user.target)
    if user is None or activation is None or user.args[:1] != (last,) or len(user.all_input_nodes) != 1:
        return last, residual, "none"
    if residual is not None and activation not in BEFORE_RESIDUAL:
        return last, residual, "none"
    if not can_move(last, user, [*inputs, residual], norm_and_activate):
        return last, residual, "none"
    return user, residual, activation


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _update_averages(graph: Graph, updates: Sequence[tuple[Node, Node, Node, float]]) -> None:
    """Add one call that updates the running averages of all batch norms: one kernel instead of many."""
    for momentum in dict.fromkeys(each[3] for each in updates):
        own = [each[:3] for each in updates if each[3] == momentum]
        means, variances, statistics = (list(column) for column in zip(*own, strict=True))
        with graph.inserting_before(next(node for node in graph.nodes if node.op == "output")):
            graph.call_function(update_averages, (means, variances, statistics, momentum))


def _count_batches(graph: Graph) -> None:
    """Let one call advance the counters of all batch norms, `num_batches_tracked`."""
    steps = [
        node
        for node in graph.nodes
        if node.op == "call_method" and node.target == "add_" and node.args[1:] == (1,) and not node.kwargs
        and not node.users and _is_counter(node.args[0])
    ]  # fmt: skip
    counters = [node.args[0] for node in steps]
    if len(set(counters)) == len(counters) > 1:
        with graph.inserting_before(steps[0]):
            graph.call_function(count_batches, (counters,))
        for node in steps:
            graph.erase_node(node)


def _is_counter(node: Any) -> bool:
    value = node.meta.get("example_value") if isinstance(node, Node) and node.op == "placeholder" else None
    return isinstance(value, Tensor) and value.dim() == 0 and value.dtype is torch.int64 and len(node.users) == 1


def count_batches(counters: list[Tensor]) -> None:
    """Add one to each counter."""
    for part in _in_parts(counters):
        foreach_add_number_(part, 1)


def norm_and_activate(
    x: Tensor, residual: Tensor | None, running_mean: Tensor, running_var: Tensor, weight: Tensor | None,
    bias: Tensor | None, eps: float, activation: str, adds_in_place: bool, shift: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
    """Return `activation(batch norm of x + residual)`, and the means and unbiased variances of the batch.

    A sum in place keeps the dtype of the batch norm, also with a wider residual. `shift` is the bias of the convolution
    that made x, which x lacks: it moves the means only, and its gradient is zero.
    """
    if shift is not None and bias is not None:
        with torch.autocast(x.device.type, enabled=False):  # a policy must not round these sums
            bias = torch.add(bias, shift.to(bias.dtype), alpha=0.0)  # so its gradient is zero, not missing
        result, (mean, variance) = norm_and_activate(
            x, residual, running_mean, running_var, weight, bias, eps, activation, adds_in_place
        )
        with torch.autocast(x.device.type, enabled=False):
            return result, (mean + shift.detach().to(mean.dtype), variance)
    if _takes(x, residual, weight, bias, activation):
        result, mean, variance = batch_norm_activation(x, residual, weight, bias, eps, activation)
        return result, (mean.to(running_mean.dtype), variance.to(running_var.dtype))
    # momentum 1: what torch updates becomes the statistics of this batch
    statistics = torch.zeros_like(running_mean), torch.zeros_like(running_var)
    y = F.batch_norm(x, *statistics, weight, bias, training=True, momentum=1.0, eps=eps)
    if residual is not None and adds_in_place:
        y += residual
    elif residual is not None:
        y = y + residual  # wider than y, if the residual is
    return NORM_ACTIVATIONS[activation](y), statistics


def update_averages(
    means: list[Tensor], variances: list[Tensor], statistics: list[tuple[Tensor, Tensor]], momentum: float
) -> None:
    """Move running means and variances towards those of the batch."""
    batch = [each[place] for place in (0, 1) for each in statistics]
    with torch.no_grad():
        for averages, values in zip(_in_parts([*means, *variances]), _in_parts(batch), strict=True):
            foreach_lerp_(averages, values, momentum)


def _in_parts(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Return parts of a list, whose lengths fill kernels of Inductor.

    Inductor looks at all tensors of a list once for each of them: lists of 612, as in HRNet, took a tenth of a build.
    """
    for start in range(0, len(tensors), MOST_AT_ONCE):
        yield tensors[start : start + MOST_AT_ONCE]


JOINED_CALLS = (norm_and_activate, update_averages, count_batches)
"""What this pass puts into a graph."""


def _takes(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, activation: str) -> bool:
    """Whether mezzo's operator computes a call: half images in channels-last, and no list says otherwise."""
    if x.dim() != 4 or x.dtype not in HALF_DTYPES or not has_triton(x.device) or not uses_own_operators():
        return False
    if not all(isinstance(size, int) and size > 0 for size in x.shape) or x.numel() == x.shape[1]:
        return False  # a dynamic size, or one value per channel, which torch refuses
    if not x.is_contiguous(memory_format=torch.channels_last):
        return False
    if residual is not None and (residual.shape != x.shape or residual.dtype is not x.dtype):
        return False
    if any(param is not None and not param.is_floating_point() for param in (weight, bias)):
        return False
    if not has_rules(*(tensor for tensor in (x, residual, weight, bias) if tensor is not None)):
        return False
    policy = current_policy()
    operators = [
        "batch_norm",
        *(["add"] if residual is not None else []),
        *([activation] if activation != "none" else []),
    ]
    return policy is None or all(policy.decide(name, (x.dtype,)).dtype in (None, x.dtype) for name in operators)
