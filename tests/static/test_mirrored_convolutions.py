"""Input gradients of large depthwise kernels as forward convolutions, through Inductor on a CPU."""

import time
from typing import Any

import pytest
import torch
from torch import nn

import mezzo
from graph_backends import skip_without_compiler
from mezzo.static import _convolutions, _graph


@pytest.mark.parametrize("options", [{"padding": 3}, {"padding": "valid"}, {"kernel_size": (1, 8), "padding": (0, 2)}])
def test_inductor_compiles_the_forward_convolution_of_a_gradient(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass of Inductor must not insert operators that it has decomposed already."""
    skip_without_compiler()
    monkeypatch.setattr(_convolutions, "uses_triton", lambda _: True)
    key = str(time.time_ns())  # a graph from the cache would skip the pass
    monkeypatch.setattr(_graph, "source_digest", lambda: key)
    found: list[int] = []
    monkeypatch.setattr(
        _graph, "use_own_convolutions", lambda graph: found.append(_convolutions.use_own_convolutions(graph))
    )
    curves = []
    for backend in ("aot_eager", "inductor"):
        torch.manual_seed(0)
        layers = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, **{"kernel_size": 7, "groups": 8, **options}), nn.Conv2d(8, 8, 1)
        net = nn.Sequential(*layers).to(memory_format=torch.channels_last)
        precision = mezzo.Precision("O2", "bfloat16")
        precision.prepare(net, optimizer := torch.optim.SGD(net[0].parameters(), lr=2.0))
        step = precision.compile(net, lambda y, _: y.float().square().mean(), optimizer, backend=backend)
        x = torch.randn(2, 8, 9, 10).to(memory_format=torch.channels_last)
        curves.append([step(x, x).item() for _ in range(4)])
        torch._dynamo.reset()
    assert found == [1]
    assert curves[1] == pytest.approx(curves[0], rel=2**-6)  # bfloat16 results, other orders of sums
    assert curves[0][-1] < 0.9 * curves[0][0]
