"""Forward and backward are traced, shown, and run operator by operator."""

from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from mezzo._torch.aot_autograd import trace_and_run


@pytest.mark.parametrize("training", [True, False])
def test_each_graph_is_tidied_before_it_is_shown(training: bool) -> None:
    tidied: list[GraphModule] = []
    shown: list[GraphModule] = []

    def backend(module: GraphModule, inputs: Any) -> Any:
        return trace_and_run(module, inputs, tidied.append, shown.append)

    function = torch.compile(lambda x: (x * 2).sin(), backend=backend, fullgraph=True)
    try:
        x = torch.ones(2, requires_grad=training)
        with torch.set_grad_enabled(training):
            out = function(x)
        torch.testing.assert_close(out, (torch.ones(2) * 2).sin())
        if training:
            out.sum().backward()
            torch.testing.assert_close(x.grad, 2 * (torch.ones(2) * 2).cos())
    finally:
        torch.compiler.reset()
    assert len(tidied) == 1
    assert len(shown) == (2 if training else 1), "AOTAutograd no longer hands forward and backward to the partitioner"
    assert any(node.target is torch.ops.aten.sin.default for node in shown[0].graph.nodes)


def test_the_backward_is_traced_outside_of_autocast() -> None:
    shown: list[GraphModule] = []

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return x @ weight

    def backend(module: GraphModule, inputs: Any) -> Any:
        return trace_and_run(module, inputs, lambda _: None, shown.append)

    try:
        with torch.autocast("cpu", torch.bfloat16):
            torch.compile(product, backend=backend, fullgraph=True)(
                *(torch.ones(2, 2, requires_grad=True) for _ in "xw")
            )
    finally:
        torch.compiler.reset()
    dtypes = [n.meta["val"].dtype for n in shown[1].graph.nodes if n.target is torch.ops.aten.mm.default]
    assert dtypes == [torch.float32] * 2, "AOTAutograd no longer takes backward_pass_autocast"
