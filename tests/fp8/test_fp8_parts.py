"""FP8 layers in compiled code: conversions that are shared, numbers as in eager mode, one entry per call."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from o3_nets import RECIPE, batch, decorated, region
from torch import Tensor, nn
from torch.nn.functional import mse_loss, silu
from torch.utils.checkpoint import checkpoint

from graph_backends import skip_without_compiler
from mezzo import static
from mezzo.amp import Fp8Recipe, Policy, fp8_scales, load_fp8_scales
from mezzo.fp8 import _operands, _parts, copies_of

RTOL_BF16 = 2.0**-7  # Inductor keeps float32 between operators where eager mode rounds to eight bits


class Block(nn.Module):
    """The layers of a Llama block that matter here: three share an input, then two; the first and the last are half."""

    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 16)
        self.norm, self.mlp_norm = nn.RMSNorm(32), nn.RMSNorm(32)
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(32, 64, bias=False) for _ in range(2))
        self.down = nn.Linear(64, 32, bias=False)
        self.is_checkpointed = is_checkpointed

    def middle(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.out(self.query(y) * torch.sigmoid(self.key(y)) + self.value(y))
        y = self.mlp_norm(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = checkpoint(self.middle, x, use_reentrant=False) if self.is_checkpointed else self.middle(x)
        return self.last(x)


def prepared(recipe: Fp8Recipe, is_checkpointed: bool = False) -> tuple[Block, torch.optim.Optimizer]:
    net = Block(is_checkpointed)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    decorated_net, optimizer = decorated(net, half_layers=[net.first, net.last])
    assert decorated_net is net
    return net, optimizer


@pytest.fixture(autouse=True)
def leave_no_trace() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the inputs and gradients that were converted."""
    shapes: list[tuple[int, ...]] = []

    def count(x: Tensor, *args: Any, **options: Any) -> Any:
        shapes.append(tuple(x.shape))
        return _operands.make_operand(x, *args, **options)

    def count_turned(values: Tensor, *args: Any) -> Any:
        shapes.append(tuple(values.shape))
        return _operands.turn_operand(values, *args)

    monkeypatch.setattr(_parts, "make_operand", count)
    monkeypatch.setattr(_parts, "turn_operand", count_turned)
    return shapes


def steps_of(
    recipe: Fp8Recipe, backend: str, count: int = 3, is_checkpointed: bool = False
) -> tuple[Block, list[float]]:
    net, optimizer = prepared(recipe, is_checkpointed)
    policy = Policy.create("O3", "bfloat16", fp8=recipe)
    step = static.compile_step(net, mse_loss, optimizer, policy=policy, backend=backend)
    return net, [step(*batch()).item() for _ in range(count)]


RECIPES = [RECIPE, replace(RECIPE, scaling="delayed"), replace(RECIPE, granularity="row")]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=["current", "delayed", "row"])
def test_compiled_layers_share_conversions_and_give_the_numbers_of_eager_mode(
    recipe: Fp8Recipe, conversions: list[tuple[int, ...]]
) -> None:
    skip_without_compiler()
    net, expected = steps_of(recipe, "aot_eager")
    conversions.clear()
    other, found = steps_of(recipe, "inductor")
    # Four inputs (of three layers, of `out`, of two, of `down`) and seven gradients, in each of three steps. The first
    # scales of delayed scaling come from a pass as written, where each of seven layers converts its own input.
    # By row the seven weights are converted too, once for both passes.
    first, weights = (7 + 7 if recipe.scaling == "delayed" else 0), (7 if recipe.granularity == "row" else 0)
    assert len(conversions) == 3 * (4 + 7 + weights) + first
    assert found == pytest.approx(expected, rel=RTOL_BF16)
    for ours, theirs in zip(other.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=RTOL_BF16, atol=2.0**-8)


@pytest.mark.slow
def test_the_amax_of_a_compiled_layer_has_no_kernel_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is part of Inductor's graph: `make_operand` gets it."""
    skip_without_compiler()

    def refuse(x: Tensor) -> Tensor:
        raise AssertionError("the amax was computed outside of the compiled graph")

    monkeypatch.setattr(_operands, "_amaxes", refuse)
    _, losses = steps_of(RECIPE, "inductor", count=2)
    assert losses[1] < losses[0]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_checkpointed_layer_learns_its_delayed_scale_once_per_step(backend: str) -> None:
    if backend == "inductor":
        skip_without_compiler()
    recipe = replace(RECIPE, scaling="delayed")
    plain, expected = steps_of(recipe, backend)
    net, found = steps_of(recipe, backend, is_checkpointed=True)
    assert found == pytest.approx(expected, rel=RTOL_BF16 if backend == "inductor" else 0)
    kept, of_plain = copies_of(net.down.weight), copies_of(plain.down.weight)
    assert kept is not None
    assert of_plain is not None
    for role in ("input", "gradient"):
        entries = kept.histories[role].amaxes
        assert int((entries > 0).sum()) == 3
        torch.testing.assert_close(entries, of_plain.histories[role].amaxes, rtol=RTOL_BF16, atol=0.0)


def test_torch_compile_without_graph_mode_shares_conversions_too(conversions: list[tuple[int, ...]]) -> None:
    skip_without_compiler()
    net, _ = prepared(RECIPE)
    x, target = batch()
    with region():
        expected = mse_loss(net(x), target)
    conversions.clear()
    compiled = torch.compile(net)
    with region():
        loss = mse_loss(compiled(x), target)
    assert len(conversions) == 4
    loss.backward()
    assert len(conversions) == 4 + 7
    assert loss.item() == pytest.approx(expected.item(), rel=RTOL_BF16)


@pytest.mark.slow
def test_layers_that_share_an_input_learn_one_scale_and_save_it_once() -> None:
    skip_without_compiler()
    net, _ = steps_of(replace(RECIPE, scaling="delayed"), "inductor")
    saved = fp8_scales(net)
    assert {name for name, learnt in saved.items() if "input" in learnt} == {
        "query.weight",
        "out.weight",
        "gate.weight",
        "down.weight",
    }
    assert sum("gradient" in learnt for learnt in saved.values()) == 7
    other, _ = prepared(replace(RECIPE, scaling="delayed"))
    load_fp8_scales(other, saved)
    assert fp8_scales(other).keys() == saved.keys()


@pytest.mark.slow
def test_a_weight_that_is_trained_later_gets_its_scale_then() -> None:
    skip_without_compiler()
    recipe = replace(RECIPE, scaling="delayed")
    net, optimizer = prepared(recipe)
    net.down.weight.requires_grad_(False)
    step = static.compile_step(
        net, mse_loss, optimizer, policy=Policy.create("O3", "bfloat16", fp8=recipe), backend="inductor"
    )
    before = net.down.weight.detach().clone()
    step(*batch())
    net.down.weight.requires_grad_()
    for _ in range(2):
        loss = step(*batch())
    assert loss.isfinite()
    assert not torch.equal(net.down.weight, before)


class WithProduct(nn.Module):
    """A layer, and a product by a matrix that is computed, which has no master and so no history."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 16)
        self.layer, self.matrix = nn.Linear(32, 32, bias=False), nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(self.first(x)) @ (self.matrix * 2))


@pytest.mark.slow
def test_delayed_scaling_of_a_computed_matrix_stays_current_in_compiled_code() -> None:
    skip_without_compiler()
    recipe = replace(RECIPE, scaling="delayed")
    losses = []
    for backend in ("eager", "inductor"):
        net = WithProduct()
        decorated(net, half_layers=[net.first, net.last])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        policy = Policy.create("O3", "bfloat16", fp8=recipe)
        step = static.compile_step(net, mse_loss, optimizer, policy=policy, backend=backend)
        losses.append([step(*batch()).item() for _ in range(2)])
    assert losses[1] == pytest.approx(losses[0], rel=RTOL_BF16)
