"""A norm in front of a product of a captured graph is mezzo's operator, which takes the residual in front of it, too."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

from mezzo._torch.aot_autograd import trace_and_run
from mezzo.amp import Policy, auto_cast
from mezzo.static import _norms, _rows

#: Inductor of torch 2.11, which a reset imports.
pytestmark = pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
#: A gradient that mezzo's operator rounds once, against one that torch rounds two or three times.
RTOL = 2**-5
HALVES = (torch.float16, torch.bfloat16)
WIDTH = 48
OPERATORS = {
    kind: (getattr(torch.ops.mezzo, kind).default, getattr(torch.ops.mezzo, f"{kind}_backward").default)
    for kind in ("layer_norm", "rms_norm")
}
KINDS: dict[str, Callable[..., nn.Module]] = {"layer_norm": nn.LayerNorm, "rms_norm": nn.RMSNorm}

Between = Callable[["Block", Tensor, Tensor], tuple[Tensor, Tensor]]
"""Returns the norm and what the residual goes on with, from the result of the first layer and the residual."""


def plain(block: "Block", y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return block.norm(total), total


class Block(nn.Module):
    """A residual, a norm and a product, as in a transformer, between two products."""

    def __init__(self, kind: str, between: Between, dtype: torch.dtype, param_dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(3))
        self.norm = KINDS[kind](WIDTH, dtype=param_dtype, eps=1e-5)
        with torch.no_grad():
            for param in self.norm.parameters():
                param.uniform_(0.5, 1.5)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        norm, total = self.between(self, self.first(x), x)
        return total + self.third(self.second(norm))


class Trained(NamedTuple):
    """One training step: numbers by name, and the operators of forward and backward."""

    numbers: dict[str, Tensor]
    operators: list[Any]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rows, "has_triton", lambda device: True)  # the operator itself computes by torch


def train(
    kind: str = "layer_norm",
    between: Between = plain,
    captured: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    param_dtype: torch.dtype | None = None,
    rows: tuple[int, ...] = (4, 6),
    policy: Policy | None = None,
    dynamic: bool = False,
) -> Trained:
    torch.manual_seed(0)
    model = Block(kind, between, dtype, param_dtype or dtype)
    x = torch.randn(*rows, WIDTH, dtype=dtype).requires_grad_()
    operators: list[Any] = []

    def tidy(joint: GraphModule) -> None:
        _rows.take_sums_of_gradients(joint.graph)
        joint.graph.lint()
        joint.recompile()

    def backend(module: GraphModule, inputs: Any) -> Any:
        _norms.fuse_norms(module.graph)
        module.graph.lint()
        module.recompile()
        return trace_and_run(module, inputs, tidy, lambda part: operators.extend(n.target for n in part.graph.nodes))

    torch.compiler.reset()
    run = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic) if captured else model
    with auto_cast(policy=policy) if policy is not None else torch.enable_grad():
        result = run(x)
    result.float().square().sum().backward()
    numbers = {"result": result.detach(), "x": x.grad}
    numbers |= {name: param.grad for name, param in model.named_parameters()}
    return Trained({name: value for name, value in numbers.items() if value is not None}, operators)


def assert_same(found: Trained, expected: Trained) -> None:
    assert found.numbers.keys() == expected.numbers.keys()
    for name, value in expected.numbers.items():
        ours, theirs = found.numbers[name], value
        assert ours.dtype is theirs.dtype
        assert ours.shape == theirs.shape
        assert (ours.double() - theirs.double()).norm() <= RTOL * theirs.double().norm(), name


def sums_of(found: Trained) -> int:
    return sum(target is torch.ops.aten.sum.dim_IntList for target in found.operators)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [(24,), (4, 6), (2, 3, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_norm_residual_and_bias_gradient_are_one_operator_in_each_direction(
    kind: str, rows: tuple[int, ...], dtype: torch.dtype
) -> None:
    found = train(kind, dtype=dtype, rows=rows)
    assert_same(found, train(kind, dtype=dtype, rows=rows, captured=False))
    assert [found.operators.count(each) for each in OPERATORS[kind]] == [1, 1]
    additions = [each for each in found.operators if each is torch.ops.aten.add.Tensor]
    assert len(additions) <= 2  # the last residual, and the two gradients of x; not the residual in front of the norm
    assert sums_of(found) == 2  # of the biases of the second and third layer; the first is the operator's


def test_float32_parameters_of_a_norm_are_taken() -> None:
    """In float16 they stay float32 at O2, and the norm returns half."""
    options: dict[str, Any] = {
        "dtype": torch.float16, "param_dtype": torch.float32, "policy": Policy.create("O2", torch.float16)
    }  # fmt: skip
    found = train(**options)
    assert_same(found, train(captured=False, **options))
    assert OPERATORS["layer_norm"][0] in found.operators
    assert found.numbers["norm.weight"].dtype is torch.float32


BETWEEN: dict[str, Between] = {
    "no residual": lambda block, y, x: (block.norm(y), x),
    "behind views": lambda block, y, x: (block.norm(x + y).reshape(-1, WIDTH).view(x.shape), x),
    "the sum is used by the norm only": lambda block, y, x: (block.norm(x + y), x),
    "torch.add": lambda block, y, x: (block.norm(torch.add(x, y)), x),
    "twice the same": lambda block, y, x: (block.norm(y + y), x),
    "a factor behind the layer": lambda block, y, x: plain(block, y * 0.5, x),
    "an addition in place": lambda block, y, x: (block.norm(y.add_(x)), x),
    "a residual of one row": lambda block, y, x: (block.norm(y + x[:1]), x),
    "a number": lambda block, y, x: (block.norm(y + 1), x),
    "alpha": lambda block, y, x: (block.norm(torch.add(x, y, alpha=2)), x),
}
JOINED = (
    "the sum is used by the norm only",
    "torch.add",
    "twice the same",
    "a factor behind the layer",
    "behind views",
)


@pytest.mark.parametrize("name", BETWEEN)
def test_the_numbers_are_the_same_whatever_stands_in_front(name: str) -> None:
    found = train(between=BETWEEN[name])
    assert_same(found, train(between=BETWEEN[name], captured=False))
    assert OPERATORS["layer_norm"][0] in found.operators
    total = [each for each in found.operators if each is torch.ops.aten.add.Tensor]
    without = train(between=lambda block, y, x: (block.norm(y), x))
    extra = len(total) - sum(each is torch.ops.aten.add.Tensor for each in without.operators)
    assert extra <= (1 if name in JOINED else 2)  # the gradients of a part that is used twice


def test_a_sum_that_is_read_before_the_norm_stays_where_it_is() -> None:
    def between(block: Block, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        halved = total * 0.5
        return block.norm(total), halved

    found = train(between=between)
    assert_same(found, train(between=between, captured=False))
    assert OPERATORS["layer_norm"][0] in found.operators


def test_a_sum_whose_parts_change_before_the_norm_stays_where_it_is() -> None:
    def between(block: Block, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = y * 1.0
        total = x + y
        y.mul_(3.0)
        return block.norm(total), y

    found = train(between=between)
    assert_same(found, train(between=between, captured=False))


@pytest.mark.parametrize(
    "between",
    [
        lambda block, y, x: (block.norm(y) * 2, x),
        lambda block, y, x: plain(block, y, block.norm(x)),  # read by a product and by the sum
        lambda block, y, x: (F.layer_norm(y.unflatten(-1, (6, 8)), (6, 8)).flatten(-2), x),
        lambda block, y, x: (block.norm(y.mT.contiguous().mT), x),
        lambda block, y, x: (F.group_norm(y, 2), x),
    ],
)
def test_elsewhere_the_norm_stays_torchs(between: Between) -> None:
    found = train(between=between, rows=(4, 6))
    assert_same(found, train(between=between, captured=False, rows=(4, 6)))
    assert found.operators.count(OPERATORS["layer_norm"][0]) == (1 if "plain" in between.__code__.co_names else 0)


@pytest.mark.parametrize(
    "options",
    [
        {"dynamic": True},
        {"dtype": torch.float32},
        {"policy": Policy.create("O1", torch.bfloat16)},
        {"policy": Policy.create("O2", torch.bfloat16, custom_black_list={"layer_norm"})},
        {"policy": Policy.create("O2", torch.bfloat16, custom_black_list={"add"})},
        {"policy": Policy.create("O3", torch.bfloat16)},
    ],
)
def test_lists_fp8_and_what_the_operator_cannot_do_keep_it_torchs(options: dict[str, Any]) -> None:
    found = train(**options)
    assert_same(found, train(captured=False, **options))
    assert OPERATORS["layer_norm"][0] not in found.operators


def test_the_switch_keeps_torchs_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rows, "uses_own_operators", lambda: False)
    assert OPERATORS["layer_norm"][0] not in train().operators
