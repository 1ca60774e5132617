"""Eager and graph decide the same dtype for the same operator, and compute the same numbers."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from mezzo.amp import Policy, decorate
from mezzo.amp.debugging import OperatorStats, collect_operator_stats
from mezzo.static._graph import Capture
from mezzo.static._region import NoGuardError, Precision, fp16_guard, precision_of

WIDTH = 8
LISTED = ("linear", "softmax", "layer_norm", "gelu", "exp", "sigmoid", "add", "mul", "matmul", "cat", "sum", "relu")
#: Cleaning up is what the graph is for: it has fewer of these.
CASTS = ("_to_copy",)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


class Layer(nn.Module):
    """One operator of a kind, inside a guard or not."""

    def __init__(self, kind: str, is_guarded: bool) -> None:
        super().__init__()
        self.kind, self.is_guarded = kind, is_guarded
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        if not self.is_guarded:
            return self.compute(x, first)
        with fp16_guard():
            return self.compute(x, first)

    def compute(self, x: Tensor, first: Tensor) -> Tensor:
        kind = self.kind
        if kind == "linear":
            return self.linear(x)
        if kind == "layer_norm":
            return self.norm(x)
        if kind == "add":
            return x + first
        if kind == "mul":
            return x * first
        if kind == "matmul":
            return torch.matmul(x, first.t()) @ first
        if kind == "cat":
            return torch.cat([x, first], 1)[:, :WIDTH]
        if kind == "sum":
            return x - x.sum(1, keepdim=True) / WIDTH
        if kind == "softmax":
            return functional.softmax(x, 1)
        return getattr(functional if kind in ("gelu", "relu") else torch, kind)(x)


class Net(nn.Module):
    """Layers one after the other; what each of them gives is a result."""

    def __init__(self, layers: list[tuple[str, bool]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind, is_guarded) for kind, is_guarded in layers)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        first, results = x, []
        for layer in self.layers:
            x = layer(x, first)
            results.append(x)
        return (functional.mse_loss(x, target), *results)


def forward_counts(stats: OperatorStats) -> dict[str, tuple[int, ...]]:
    """Return calls by operator and dtype in the forward, casts left out."""
    counts: dict[str, list[int]] = {}
    for row in stats.rows:
        if row.phase == "forward" and row.op not in CASTS:
            sums = counts.setdefault(row.op, [0, 0, 0, 0])
            for column, calls in enumerate((row.fp16, row.bf16, row.fp32, row.other)):
                sums[column] += calls
    return {op: tuple(sums) for op, sums in counts.items()}


layers = st.lists(st.tuples(st.sampled_from(LISTED), st.booleans()), min_size=1, max_size=5)
lists = st.lists(st.sampled_from(LISTED), max_size=3, unique=True)


cases = st.fixed_dictionaries(
    {
        "layers": layers,
        "level": st.sampled_from(["O1", "O2", "OD"]),
        "dtype": st.sampled_from(["float16", "bfloat16"]),
        "white": lists,
        "black": lists,
        "use_promote": st.booleans(),
        "use_guard": st.booleans(),
        "is_decorated": st.booleans(),
        "cpu_compute": st.sampled_from(["native", "float32"]),
    }
)


def check_parity(case: dict[str, Any]) -> None:
    """Compare dtypes and values of every layer, gradients, and the operator tables of both modes."""
    black = [name for name in case["black"] if name not in case["white"]]
    policy = Policy.create(case["level"], case["dtype"], case["white"], black, case["use_promote"], case["cpu_compute"])
    precision = Precision(policy, case["use_guard"])
    torch.manual_seed(len(case["layers"]))
    net = Net(case["layers"])
    if case["is_decorated"] and case["level"] != "OD" and not case["use_guard"]:
        decorate(net, level=case["level"], dtype=case["dtype"])
    x, target = torch.rand(4, WIDTH), torch.rand(4, WIDTH)
    torch._dynamo.reset()
    capture = Capture(precision, "aot_eager")
    captured = capture.compile(net)

    with collect_operator_stats(print_table=False) as stats, precision_of(precision):
        expected = net(x, target)
    if case["use_guard"] and not any(is_guarded for _, is_guarded in case["layers"]):
        with pytest.raises(NoGuardError), precision_of(precision):
            captured(x, target)
        return
    with precision_of(precision):
        results = captured(x, target)
    assert [r.dtype for r in results] == [e.dtype for e in expected]
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=0, atol=0, equal_nan=True)
    assert forward_counts(capture.graphs[0].operators()) == forward_counts(stats)
    if results[0].requires_grad:
        assert gradients(net, results[0]) == gradients(net, expected[0])


@settings(max_examples=15, deadline=None)
@given(case=cases)
def test_eager_and_graph_decide_the_same(case: dict[str, Any]) -> None:
    check_parity(case)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(case=cases)
def test_eager_and_graph_decide_the_same_in_many_networks(case: dict[str, Any]) -> None:
    check_parity(case)


def gradients(net: nn.Module, loss: Tensor) -> dict[str, Any]:
    """Return what a loss gives, as bits."""
    net.zero_grad()
    loss.backward()
    return {name: p.grad.view(torch.uint8).tolist() for name, p in net.named_parameters() if p.grad is not None}
