"""Checks one layer: every kernel of its forward, every gradient of its backward."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from mezzo._torch.modes import no_dispatch_modes
from mezzo._torch.pytree import tree_leaves
from mezzo.record._checker_config import TensorCheckerConfig
from mezzo.record._checking import checking
from mezzo.record._findings import Finding, Kind, readable
from mezzo.record._kernel_runs import floating
from mezzo.record._listening import node_origins
from mezzo.record._tensor_checker import extremes
from mezzo.record._tensor_numbers import NonFiniteError, measure, undisturbed

P = ParamSpec("P")
R = TypeVar("R")


def check_layer_numerics(forward: Callable[P, R]) -> Callable[P, R]:
    """Check every kernel of a layer's forward, and every gradient of its backward: decorator for `forward`.

    The first NaN or inf raises `NonFiniteError`. Module paths are relative to the layer. In the backward it checks the
    autograd nodes and does not analyse the cause: use `tensor_checker` around the whole step for that. It does not change
    arguments or random numbers. Checking is off after the forward, also after an exception.
    """

    @functools.wraps(forward)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        layer = args[0] if args and isinstance(args[0], nn.Module) else None
        with checking(TensorCheckerConfig(), inside=layer):
            result = forward(*args, **kwargs)
            _watch_backward(_tensors(result), _tensors((args, kwargs)))
        return result

    return checked


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _watch_backward(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Put a hook on each autograd node between a layer's outputs and its inputs."""
    if not torch.is_grad_enabled():
        return
    passed = {tensor.grad_fn for tensor in inputs}  # not of the layer
    nodes, waiting = [], [tensor.grad_fn for tensor in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in passed or node.name().endswith("AccumulateGrad"):
            continue
        passed.add(node)
        nodes.append(node)
        waiting += [following for following, _ in node.next_functions]
    for node, origin in zip(nodes, node_origins(nodes), strict=True):
        node.register_hook(functools.partial(_check_node, node.name(), origin))


def _check_node(name: str, origin: tuple[str, str, str], grad_inputs: Any, grad_outputs: Any) -> None:
    """Raise if a node has made NaN or inf. The names are torch's: `grad_inputs` are the outputs of the node."""
    given = [(f"out[{i}]", tensor) for i, tensor in enumerate(floating(grad_inputs)) if readable(tensor)]
    if not given:
        return
    with no_dispatch_modes(), undisturbed():
        if extremes([tensor for _, tensor in given])[0]:
            return
        got = [(f"grad[{i}]", tensor) for i, tensor in enumerate(floating(grad_outputs)) if readable(tensor)]
        outputs, inputs = measure(given), measure(got)
    bad = next((each for each in inputs if not each.is_finite), None)
    kind: Kind = "unknown" if bad is None else "outside"
    cause = "finite gradients came in; `tensor_checker` around the whole step repeats the kernel in float32"
    if bad is not None:
        cause = f"gradient `{bad.name}` was not finite already when it came into the layer"
    module, line, op = origin
    finding = Finding(
        name,
        op,
        module,
        "backward",
        (line,) if line else (),
        outputs[0].dtype,
        tuple(inputs),
        tuple(outputs),
        kind,
        cause,
    )
    raise NonFiniteError(str(finding), finding)
