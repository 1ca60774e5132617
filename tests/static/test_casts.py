"""Casts that give nothing new leave a graph, casts that round stay, and results are the same bits."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from mezzo.static._casts import drop_needless_casts

HALF, FULL, FP8 = torch.float16, torch.float32, torch.float8_e4m3fn


def traced(function: Callable[[Tensor], Tensor], like: Tensor) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(like)


def casts_in(graph: GraphModule) -> int:
    return sum(node.target is torch.ops.aten._to_copy.default for node in graph.graph.nodes)


@pytest.mark.parametrize(
    ("function", "dtype", "left"),
    [
        (lambda x: x.to(HALF) + x.to(HALF), FULL, 1),  # the same cast twice
        (lambda x: (x * 2).to(FULL).to(HALF) + 1, HALF, 0),  # out and back, exact
        (lambda x: x.to(FULL).to(HALF) + 1, HALF, 2),  # of an input, which may be written over: stays
        (lambda x: x.to(HALF).to(FULL) + 1, FULL, 2),  # rounds: both stay
        (lambda x: x.to(torch.bfloat16).to(HALF) + 1, HALF, 2),  # neither holds the other
        (lambda x: x.to(FULL).to(torch.float64).to(HALF) + 1, HALF, 3),  # not out and back of one tensor
        (lambda x: x.to(FULL).to(HALF), HALF, 2),  # what is returned stays a tensor of its own
        (lambda x: x.to(HALF, memory_format=torch.channels_last) + x.to(HALF), FULL, 2),  # another layout
        (lambda x: (x * 2).to(FULL).to(HALF).to(FULL) + 1, HALF, 1),  # out, back, out: one is enough
        (lambda x: (x * 2).to(FP8).to(HALF) + 1, HALF, 2),  # rounds to FP8
        (lambda x: (x * 2).to(FP8).to(HALF).to(FP8).to(HALF) + 1, HALF, 2),  # out of FP8 and back, exact
        (lambda x: (x * 2).to(FP8).to(torch.float8_e5m2).to(FP8).to(HALF), HALF, 4),  # neither holds the other
    ],
)
def test_each_kind_of_cast(function: Callable[[Tensor], Tensor], dtype: torch.dtype, left: int) -> None:
    x = torch.rand(2, 3, 4, 4).to(dtype)
    graph = traced(function, x)
    before = casts_in(graph)
    dropped = drop_needless_casts(graph.graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    assert casts_in(graph) == left
    assert dropped <= before - left
    assert torch.equal(graph(x), function(x))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.sampled_from([HALF, torch.bfloat16, FULL, torch.float64, FP8, torch.float8_e5m2]), min_size=1, max_size=7
    )
)
def test_any_chain_of_casts_gives_the_same_bits(dtypes: list[torch.dtype]) -> None:
    def function(x: Tensor) -> Tensor:
        total = x
        for dtype in dtypes:
            x = x.to(dtype)
            total = total + x.to(FULL)
        return total

    x = torch.randn(64)
    graph = traced(function, x)
    drop_needless_casts(graph.graph)
    graph.graph.lint()
    graph.recompile()
    assert torch.equal(graph(x), function(x))
