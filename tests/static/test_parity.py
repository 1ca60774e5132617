"""Eager and graph decide the same dtype for the same operator, and compute the same numbers."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from mezzo.amp import Fp8Recipe, Policy, decorate
from mezzo.amp.debugging import OperatorStats, collect_operator_stats
from mezzo.static._graph import Capture
from mezzo.static._region import CastRules, NoGuardError, casting_region, fp16_guard

LISTED = ("linear", "softmax", "layer_norm", "gelu", "exp", "sigmoid", "add", "mul", "matmul", "cat", "sum", "relu")
#: Cleaning up is what the graph is for: it has fewer of these.
CASTS = ("_to_copy",)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


class Layer(nn.Module):
    """One operator of a kind, inside a guard or not."""

    def __init__(self, kind: str, is_guarded: bool, width: int) -> None:
        super().__init__()
        self.kind, self.is_guarded, self.width = kind, is_guarded, width
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

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
            return torch.cat([x, first], 1)[:, : self.width]
        if kind == "sum":
            return x - x.sum(1, keepdim=True) / self.width
        if kind == "softmax":
            return functional.softmax(x, 1)
        return getattr(functional if kind in ("gelu", "relu") else torch, kind)(x)


class Net(nn.Module):
    """Layers one after the other; what each of them gives is a result."""

    def __init__(self, layers: list[tuple[str, bool]], width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind, is_guarded, width) for kind, is_guarded in layers)

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


#: Rows and width; FP8 takes multiples of 16.
ODD, EVEN = (4, 8), (16, 32)
#: Of level O3, on any device and at any size; a delayed scale depends on the calls before.
recipes = st.builds(
    Fp8Recipe,
    gradient=st.sampled_from(["e5m2", "e4m3"]),
    granularity=st.sampled_from(["tensor", "row"]),
    min_width=st.just(0),
    min_size=st.just(0),
    emulate=st.just(True),
)


def cases_of(levels: list[str], sizes: list[tuple[int, int]]) -> st.SearchStrategy[dict[str, Any]]:
    """Return networks, and precisions of some levels to run them in."""
    return st.fixed_dictionaries(
        {
            "layers": layers,
            "level": st.sampled_from(levels),
            "dtype": st.sampled_from(["float16", "bfloat16"]),
            "white": lists,
            "black": lists,
            "use_promote": st.booleans(),
            "use_guard": st.booleans(),
            "is_decorated": st.booleans(),
            "cpu_compute": st.sampled_from(["native", "float32"]),
            "fp8": recipes,
            "half_layers": st.sampled_from([None, (), "layers.0"]),
            "size": st.sampled_from(sizes),
        }
    )


cases = cases_of(["O1", "O2", "OD", "O3"], [ODD, EVEN])


def check_parity(case: dict[str, Any]) -> OperatorStats:
    """Compare dtypes and values of every layer, gradients, and the operator tables of both modes; return eager's."""
    black = [name for name in case["black"] if name not in case["white"]]
    rows, width = case["size"]
    of_o3: dict[str, Any] = {"fp8": case["fp8"]} if case["level"] == "O3" else {}
    policy = Policy.create(
        case["level"], case["dtype"], case["white"], black, case["use_promote"], case["cpu_compute"], **of_o3
    )
    precision = CastRules(policy, case["use_guard"])
    torch.manual_seed(len(case["layers"]))
    net = Net(case["layers"], width)
    if case["is_decorated"] and case["level"] != "OD" and not case["use_guard"]:
        of_o3 |= {"half_layers": case["half_layers"]} if of_o3 else {}
        decorate(net, level=case["level"], dtype=case["dtype"], **of_o3)
    x, target = torch.rand(rows, width), torch.rand(rows, width)
    torch._dynamo.reset()
    capture = Capture(precision, "aot_eager")
    captured = capture.compile(net)

    with collect_operator_stats(print_table=False) as stats, casting_region(precision):
        expected = net(x, target)
    if case["use_guard"] and not any(is_guarded for _, is_guarded in case["layers"]):
        with pytest.raises(NoGuardError), casting_region(precision):
            captured(x, target)
        return stats
    with casting_region(precision):
        results = captured(x, target)
    assert [r.dtype for r in results] == [e.dtype for e in expected]
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=0, atol=0, equal_nan=True)
    assert forward_counts(capture.graphs[0].operators()) == forward_counts(stats)
    if results[0].requires_grad:
        assert gradients(net, results[0]) == gradients(net, expected[0])
    return stats


@settings(max_examples=15, deadline=None)
@given(case=cases)
def test_eager_and_graph_decide_the_same(case: dict[str, Any]) -> None:
    check_parity(case)


PLAIN_FP8: dict[str, Any] = {
    "layers": [("linear", False), ("gelu", False), ("matmul", False), ("linear", False)],
    "level": "O3",
    "dtype": "bfloat16",
    "white": [],
    "black": [],
    "use_promote": False,
    "use_guard": False,
    "is_decorated": True,
    "cpu_compute": "native",
    "fp8": Fp8Recipe(emulate=True, min_width=0, min_size=0),
    "half_layers": "layers.0",
    "size": EVEN,
}


@settings(max_examples=10, deadline=None)
@given(case=cases_of(["O3"], [EVEN]))
def test_eager_and_graph_compute_the_same_in_fp8(case: dict[str, Any]) -> None:
    check_parity(case)


def test_a_graph_shows_which_products_are_fp8() -> None:
    calls = {op: sum(counts) for op, counts in check_parity(PLAIN_FP8).totals().items()}
    assert calls["mezzo::fp8_linear"] == 3  # both of matmul's, and the linear layer that is not kept in half
    assert calls["addmm"] == 1


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
