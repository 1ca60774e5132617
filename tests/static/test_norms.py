"""A norm in front of a product of a captured graph is mezzo's operator, which takes the residual in front of it, too."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.fx import GraphModule
from torch.nn import functional as F

import mezzo
from graph_backends import skip_without_compiler
from joint_graphs import Trained, assert_same, train_once
from mezzo._torch.aot_autograd import trace_and_run
from mezzo.amp import Policy
from mezzo.static import _graph, _norms, _rows

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
    frozen: bool = False,
) -> Trained:
    torch.manual_seed(0)
    model = Block(kind, between, dtype, param_dtype or dtype)
    x = torch.randn(*rows, WIDTH, dtype=dtype).requires_grad_()
    if frozen:
        model.norm.requires_grad_(False)
    return train_once(model, x, _norms.fuse_norms if captured else None, policy, dynamic)


def sums_of(found: Trained) -> int:
    return sum(target is torch.ops.aten.sum.dim_IntList for target in found.operators)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [(24,), (4, 6)])
@pytest.mark.parametrize("kind", KINDS)
def test_norm_residual_and_bias_gradient_are_one_operator_in_each_direction(
    kind: str, rows: tuple[int, ...], dtype: torch.dtype
) -> None:
    found = train(kind, dtype=dtype, rows=rows)
    assert_same(found, train(kind, dtype=dtype, rows=rows, captured=False), RTOL)
    assert [found.operators.count(each) for each in OPERATORS[kind]] == [1, 1]
    additions = [each for each in found.operators if each is torch.ops.aten.add.Tensor]
    assert len(additions) <= 2  # the last residual, and the two gradients of x; not the residual in front of the norm
    assert sums_of(found) == 2  # of the biases of the second and third layer; the first is the operator's


def test_of_four_dimensions_a_norm_is_taken_and_its_residual_is_not() -> None:
    """Inductor would make channels-last copies of the sum; the rows of a norm are a view."""

    def without(block: Block, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return block.norm(y), x

    for between, count in ((plain, 0), (without, 1)):
        found = train(between=between, rows=(2, 3, 4))
        assert_same(found, train(between=between, rows=(2, 3, 4), captured=False), RTOL)
        assert found.operators.count(OPERATORS["layer_norm"][0]) == count


def test_a_frozen_norm_computes_no_gradients_of_its_parameters() -> None:
    found = train(frozen=True)
    assert_same(found, train(frozen=True, captured=False), RTOL)
    assert "norm.weight" not in found.numbers
    assert [found.operators.count(each) for each in OPERATORS["layer_norm"]] == [1, 1]


class Sum(nn.Module):
    """Two summands that a user may train, in front of a norm and a product."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.randn(*shape, WIDTH)) for _ in range(2))
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = self.one + self.other
        return self.last(self.norm(total)) + x, total


@pytest.mark.parametrize("shape", [(6,), (2, 6), (2, 2, 6)])
def test_the_gradients_of_two_summands_do_not_share_memory(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second backward pass adds to both: to one memory, it would add twice. Through Inductor, as users run it."""
    skip_without_compiler()
    key = str(time.time_ns())  # a graph from the cache would skip the pass
    monkeypatch.setattr(_graph, "source_digest", lambda: key)
    calls: list[int] = []
    monkeypatch.setattr(_graph, "fuse_norms", lambda graph: calls.append(_norms.fuse_norms(graph)) or calls[-1])
    torch.manual_seed(0)
    precision = mezzo.Precision("O2", "bfloat16")
    model = precision.prepare(Sum(shape))
    run = mezzo.static.to_static(model, backend="inductor")
    norms = []
    for _ in range(2):
        with precision.autocast():
            result, _ = run(torch.zeros(WIDTH))
        result.float().square().mean().backward()
        norms.append([model.one.grad.norm().item(), model.other.grad.norm().item()])
    assert calls == [1]
    assert model.one.grad.data_ptr() != model.other.grad.data_ptr()
    assert norms[1] == pytest.approx([2 * value for value in norms[0]], rel=2**-7)  # bfloat16 numbers
    torch._dynamo.reset()


def test_a_sum_of_frozen_tensors_requires_no_gradient() -> None:
    """Otherwise later layers compute gradients that nobody needs, and `numpy()` is an error."""
    model = Sum((4,))
    for name in ("one", "other"):
        getattr(model, name).requires_grad_(False)
    model.bfloat16()

    def backend(module: GraphModule, inputs: Any) -> Any:
        assert _norms.fuse_norms(module.graph) == 1
        module.recompile()
        return trace_and_run(module, inputs, lambda _: None, lambda _: None)

    torch.compiler.reset()
    result, total = torch.compile(model, backend=backend)(torch.zeros(WIDTH, dtype=torch.bfloat16))
    assert result.requires_grad
    assert not total.requires_grad


def test_a_width_that_is_not_known_keeps_the_norm_torchs() -> None:
    function = mezzo.static.to_static(lambda x: F.layer_norm(x, x.shape[-1:]) @ x.mT)
    for shape in ((4, 48), (5, 48), (5, 64), (6, 72)):
        x = torch.randn(shape)
        assert torch.allclose(function(x), F.layer_norm(x, x.shape[-1:]) @ x.mT, atol=1e-4)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.func.grad(lambda x: f(x).square().sum()),
        torch.func.vmap,
        lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[1],
    ],
)
def test_functions_with_torch_func_are_captured_with_torchs_operators(transform: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    weight, bias, x = (torch.randn(*shape, dtype=torch.bfloat16) for shape in ((WIDTH, WIDTH), (WIDTH,), (4, WIDTH)))

    def layers(x: Tensor) -> Tensor:
        product, shift = weight.to(x.dtype), bias.to(x.dtype)
        return F.layer_norm(F.gelu(x @ product + shift) @ product + x, (WIDTH,)) @ product

    function = transform(layers)
    exact, found = function(x.double()), mezzo.static.to_static(function)(x)
    # a derivative of a norm is a difference of larger numbers: eager mode errs as much
    errors = [float((each.double() - exact).norm() / exact.norm()) for each in (found, function(x))]
    assert errors[0] <= max(RTOL, 1.5 * errors[1]), errors


@pytest.mark.parametrize("dual", ["x", "weight"])
def test_forward_mode_derivatives_inside_of_a_graph_are_torchs(dual: str) -> None:
    """Mezzo's operators have no rule for them: the derivative would be missing, without a message."""
    torch.manual_seed(0)
    given = {"x": torch.randn(4, WIDTH, dtype=torch.bfloat16), "weight": torch.rand(WIDTH, dtype=torch.bfloat16)}
    product = torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16)

    def derivative(x: Tensor, weight: Tensor) -> Tensor | None:
        with dual_level():
            tensors = {"x": x, "weight": weight}
            tensors[dual] = make_dual(tensors[dual], torch.ones_like(tensors[dual]))
            norm = F.rms_norm(tensors["x"], (WIDTH,), tensors["weight"], 1e-5)  # Dynamo refuses a layer norm here
            return unpack_dual(F.gelu(norm @ product) @ product).tangent

    found, expected = mezzo.static.to_static(derivative)(**given), derivative(**given)
    assert found is not None
    assert (found - expected).norm() <= RTOL * expected.norm()


def test_float32_parameters_of_a_norm_are_taken() -> None:
    """In float16 they stay float32 at O2, and the norm returns half."""
    options: dict[str, Any] = {
        "dtype": torch.float16, "param_dtype": torch.float32, "policy": Policy.create("O2", torch.float16)
    }  # fmt: skip
    found = train(**options)
    assert_same(found, train(captured=False, **options), RTOL)
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
    "a float32 residual": lambda block, y, x: (block.norm((y + x.float()).to(y.dtype)), x),
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
    assert_same(found, train(between=BETWEEN[name], captured=False), RTOL)
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
    assert_same(found, train(between=between, captured=False), RTOL)
    assert OPERATORS["layer_norm"][0] in found.operators


def test_a_sum_whose_parts_change_before_the_norm_stays_where_it_is() -> None:
    def between(block: Block, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = y * 1.0
        total = x + y
        y.mul_(3.0)
        return block.norm(total), y

    found = train(between=between)
    assert_same(found, train(between=between, captured=False), RTOL)


@pytest.mark.parametrize(
    "between",
    [
        lambda block, y, x: (block.norm(y) * 2, x),
        lambda block, y, x: plain(block, y, block.norm(x)),  # read by a product and by the sum
        lambda block, y, x: (F.layer_norm(y.unflatten(-1, (6, 8)), (6, 8)).flatten(-2), x),
        lambda block, y, x: (block.norm(y.mT.contiguous().mT), x),
        lambda block, y, x: (F.group_norm(y, 2), x),
        lambda block, y, x: (block.norm(y + x[:1].expand_as(y)), x),
        lambda block, y, x: (block.norm(y + x.mT.contiguous().mT), x),
    ],
)
def test_elsewhere_the_norm_stays_torchs(between: Between) -> None:
    found = train(between=between, rows=(4, 6))
    assert_same(found, train(between=between, captured=False, rows=(4, 6)), RTOL)
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
    assert_same(found, train(captured=False, **options), RTOL)
    assert OPERATORS["layer_norm"][0] not in found.operators


@pytest.mark.parametrize("policy", [None, Policy.create("O2", torch.bfloat16)])
def test_inside_of_torchs_autocast_the_norm_is_torchs(policy: Policy | None) -> None:
    """On CUDA it returns float32, which a product outside of that region may expect. A region of mezzo returns half."""

    def between(block: Block, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(block, y, x)

    found = train(between=between, policy=policy)
    assert_same(found, train(between=between, captured=False, policy=policy), RTOL)
    assert (OPERATORS["layer_norm"][0] in found.operators) == (policy is not None)


def test_the_switch_keeps_torchs_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rows, "uses_own_operators", lambda: False)
    assert OPERATORS["layer_norm"][0] not in train().operators
