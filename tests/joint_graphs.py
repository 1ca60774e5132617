"""One training step of a module: its numbers and, if it is captured, the operators of forward and backward."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from mezzo._torch.aot_autograd import trace_and_run
from mezzo.amp import Policy, auto_cast
from mezzo.static import _rows


class Trained(NamedTuple):
    """Numbers by name, and operators in their order."""

    numbers: dict[str, Tensor]
    operators: list[Any]


def train_once(
    model: nn.Module,
    x: Tensor,
    change: Callable[[Graph], int] | None,
    policy: Policy | None = None,
    dynamic: bool = False,
) -> Trained:
    """Return result and gradients of a step.

    Args:
        model: Called on `x`.
        x: Requires a gradient.
        change: A pass over Dynamo's graph; the sums of gradients are taken from the joint graph. None: run as written.
        policy: Of the forward pass.
        dynamic: Sizes are not known.
    """
    operators: list[Any] = []

    def tidy(joint: GraphModule) -> None:
        _rows.take_sums_of_gradients(joint.graph)
        joint.graph.lint()
        joint.recompile()

    def backend(module: GraphModule, inputs: Any) -> Any:
        change(module.graph)
        module.graph.lint()
        module.recompile()
        return trace_and_run(module, inputs, tidy, lambda part: operators.extend(n.target for n in part.graph.nodes))

    torch.compiler.reset()
    run = model if change is None else torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    with auto_cast(policy=policy) if policy is not None else torch.enable_grad():
        result = run(x)
    result.float().square().sum().backward()
    numbers = {"result": result.detach(), "x": x.grad}
    numbers |= {name: param.grad for name, param in model.named_parameters()}
    return Trained({name: value for name, value in numbers.items() if value is not None}, operators)


def assert_same(found: Trained, expected: Trained, rtol: float) -> None:
    """Check that two steps have the same numbers, each but for `rtol` of its norm."""
    assert found.numbers.keys() == expected.numbers.keys()
    for name, theirs in expected.numbers.items():
        ours = found.numbers[name]
        assert ours.dtype is theirs.dtype
        assert ours.shape == theirs.shape
        assert (ours.double() - theirs.double()).norm() <= rtol * theirs.double().norm(), name
