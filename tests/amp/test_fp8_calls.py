"""Level O3: which calls of products are FP8, which stay in half, and that modes of running agree on it."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mezzo.amp import Fp8Recipe, Policy, auto_cast, decorate, exclude_layers, first_and_last, keep_in_half
from mezzo.amp.debugging import collect_operator_stats

RECIPE = Fp8Recipe(emulate=True, min_width=0, min_size=0)
FP8 = "mezzo::fp8_linear"


@contextmanager
def o3(recipe: Fp8Recipe = RECIPE, dtype: str = "bfloat16", **lists: Any) -> Iterator[None]:
    with auto_cast(level="O3", dtype=dtype, fp8=recipe, **lists):
        yield


def products_of(function: Callable[[], Any], recipe: Fp8Recipe = RECIPE, **lists: Any) -> dict[str, tuple[int, ...]]:
    """Return the products that ran, by kernel: calls in fp16, bf16, fp32, other."""
    with collect_operator_stats(print_table=False) as stats, o3(recipe, **lists):
        function()
    names = (FP8, "mm", "addmm", "bmm")
    return {name: counts for name, counts in stats.totals().items() if name in names}


def stack(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w, b: F.linear(x, w, b),
        lambda x, w, b: x @ w.t() + b,
        lambda x, w, b: torch.mm(x, w.t()) + b,
        lambda x, w, b: torch.addmm(b, x, w.t()),
        lambda x, w, b: (x.reshape(2, 16, 48) @ w.t()).reshape(32, 64) + b,
    ],
    ids=["linear", "matmul", "mm", "addmm", "folded"],
)
def test_each_way_to_write_a_product_is_the_same_fp8_product(call: Callable[..., Tensor]) -> None:
    x, w, b = torch.randn(32, 48), nn.Parameter(torch.randn(64, 48)), nn.Parameter(torch.randn(64))
    assert list(products_of(lambda: call(x, w, b))) == [FP8]
    with o3():
        found, plain = call(x, w, b), F.linear(x, w, b)
    # a float32 bias that is added by hand makes the sum float32
    # the bias is added before or after the result is rounded to bfloat16: one unit of the last place
    torch.testing.assert_close(found.to(torch.bfloat16), plain, rtol=2.0**-7, atol=0.1)


@pytest.mark.parametrize(
    ("call", "kernel"),
    [
        (lambda: F.linear(torch.randn(33, 48), torch.randn(64, 48)), "mm"),  # 33 rows
        (lambda: F.linear(torch.randn(32, 50), torch.randn(64, 50)), "mm"),
        (lambda: F.linear(torch.randn(32, 48), torch.randn(10, 48)), "mm"),
        (lambda: torch.randn(4, 32, 48) @ torch.randn(4, 48, 64), "bmm"),  # no weight: a product for each of four
        (lambda: torch.addmm(torch.randn(32, 64), torch.randn(32, 48), torch.randn(48, 64)), "addmm"),
        (lambda: torch.addmm(torch.randn(64), torch.randn(32, 48), torch.randn(48, 64), alpha=2.0), "addmm"),
    ],
)
def test_a_product_that_cannot_be_fp8_is_made_as_at_o2(call: Callable[[], Tensor], kernel: str) -> None:
    assert list(products_of(call)) == [kernel]
    torch.manual_seed(1)
    with o3():
        at_o3 = call()
    torch.manual_seed(1)
    with auto_cast(level="O2", dtype="bfloat16"):
        assert torch.equal(at_o3, call())


def test_products_that_are_not_worth_it_stay_in_half() -> None:
    layer = nn.Linear(1024, 1024)
    x = torch.randn(256, 1024)
    recipe = Fp8Recipe(emulate=True, min_width=512, min_size=256 * 512)
    assert list(products_of(lambda: layer(x), recipe)) == [FP8]
    assert FP8 not in products_of(lambda: layer(x[:240]), recipe)
    assert FP8 not in products_of(lambda: layer(x), replace(recipe, min_width=513))


def test_lists_decide_before_fp8_does() -> None:
    layer, x = nn.Linear(64, 64), torch.randn(32, 64)
    found = products_of(lambda: layer(x), custom_black_list=["linear"])
    assert found == {"addmm": (0, 0, 1, 0)}


def test_tensors_that_are_never_cast_are_left_alone() -> None:
    with o3():
        assert F.linear(torch.randn(32, 64).double(), torch.randn(64, 64).double()).dtype is torch.float64


@pytest.mark.parametrize(("x", "weight"), [((32, 48), (64, 50)), ((32, 48), (64,)), ((), (64, 48))])
def test_a_mistake_in_sizes_is_torchs_error(x: tuple[int, ...], weight: tuple[int, ...]) -> None:
    def message(level: str) -> str:
        options: dict[str, Any] = {"fp8": RECIPE} if level == "O3" else {}
        with pytest.raises(RuntimeError) as caught, auto_cast(level=level, dtype="bfloat16", **options):
            torch.matmul(torch.randn(x), torch.randn(weight))
        return str(caught.value)

    assert message("O3") == message("O2")


def test_a_device_without_fp8_is_told_at_the_first_product() -> None:
    with (
        pytest.raises(RuntimeError, match=r"level O3: a CPU has no FP8 products"),
        o3(Fp8Recipe(min_width=0, min_size=0)),
    ):
        F.linear(torch.randn(32, 64), torch.randn(64, 64))


def test_outside_a_region_and_at_other_levels_nothing_is_fp8() -> None:
    layer, x = nn.Linear(64, 64), torch.randn(32, 64)
    with o3():
        layer(x)  # the kernels are in place from here on
    for level in ("O1", "O2", "OD"):
        with collect_operator_stats(print_table=False) as stats, auto_cast(level=level, dtype="bfloat16"):
            layer(x)
        assert FP8 not in stats.totals()
    with torch.autocast("cpu", dtype=torch.bfloat16), collect_operator_stats(print_table=False) as stats:
        layer(x)
    assert FP8 not in stats.totals()


# Layers that stay in half


def test_the_first_and_the_last_layer_stay_in_half_unless_told_otherwise() -> None:
    x = torch.randn(32, 64)
    for half_layers, count in ((None, 2), ((), 4), ("1", 3), (["0", "1", "2"], 1), (nn.Linear, 0)):
        net = stack(64, 64, 64, 64, 64)
        decorate(net, level="O3", dtype="bfloat16", half_layers=half_layers, fp8=RECIPE)
        found = products_of(lambda net=net: net(x))  # type: ignore[misc]
        assert found.get(FP8, (0, 0, 0, 0))[3] == count, half_layers
        assert found.get("addmm", (0, 0))[1] == 4 - count, half_layers


def test_an_embedding_is_the_first_layer() -> None:
    net = nn.Sequential(nn.Embedding(32, 64), stack(64, 64, 64), nn.LayerNorm(64), nn.Linear(64, 32))
    assert first_and_last(net) == [net[0], net[3]]
    assert first_and_last(nn.Linear(2, 2)) != []
    assert first_and_last(nn.ReLU()) == []
    convolutional = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(64, 64), nn.Linear(64, 16))
    assert first_and_last(convolutional) == [convolutional[0], convolutional[2]]


def test_everything_inside_a_kept_module_stays_in_half_and_the_handle_undoes_it() -> None:
    net = nn.Sequential(stack(64, 64, 64), stack(64, 64, 64))
    x = torch.randn(32, 64)
    handle = keep_in_half(net, "0")
    assert products_of(lambda: net(x))[FP8][3] == 2
    again = keep_in_half(net, "0")  # is kept already
    again.remove()
    assert products_of(lambda: net(x))[FP8][3] == 2
    handle.remove()
    handle.remove()
    assert products_of(lambda: net(x))[FP8][3] == 4
    assert "forward" not in net[0].__dict__


def test_a_kept_layer_computes_what_o2_computes() -> None:
    net = stack(64, 64)
    x = torch.randn(32, 64)
    keep_in_half(net, nn.Linear)
    with o3():
        at_o3 = net(x)
    with auto_cast(level="O2", dtype="bfloat16"):
        assert torch.equal(at_o3, net(x))


def test_an_excluded_layer_is_float32_and_is_not_marked_twice() -> None:
    net = stack(64, 64, 64)
    exclude_layers(net, "0")
    decorate(net, level="O3", dtype="bfloat16", fp8=RECIPE)
    found = products_of(lambda: net(torch.randn(32, 64)))
    assert found == {"addmm": (0, 1, 1, 0)}


def test_a_region_inside_a_kept_layer_does_not_bring_fp8_back() -> None:
    class Inner(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with o3():
                return super().forward(x)

    net = nn.Sequential(Inner(64, 64))
    keep_in_half(net, Inner)
    assert FP8 not in products_of(lambda: net(torch.randn(32, 64)))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_keeps_what_was_decided(use_reentrant: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = stack(64, 64, 64)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = checkpoint(self.inner, x, use_reentrant=use_reentrant)
            return result

    net = nn.Sequential(Block(), Block())
    keep_in_half(net, "0")
    x = torch.randn(32, 64, requires_grad=True)
    with collect_operator_stats(print_table=False) as stats:
        with o3():
            result = net(x)
        result.float().sum().backward()
    assert stats.totals()[FP8][3] == 4  # two layers, forward and again in the backward
    grads = [param.grad.clone() for param in net.parameters() if param.grad is not None]
    net.zero_grad()
    with o3():
        (net[1].inner(net[0].inner(x))).float().sum()
        with torch.autocast("mtia", dtype=torch.bfloat16):
            first = net[0].inner(x)
        net[1].inner(first).float().sum().backward()
    plain = [param.grad for param in net.parameters() if param.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(grads, plain, strict=True))


@pytest.mark.parametrize("half_layers", [(), "0"])
def test_a_compiled_model_gives_the_same_bits(half_layers: Any) -> None:
    net = stack(64, 64, 64)
    decorate(net, level="O3", dtype="bfloat16", half_layers=half_layers, fp8=RECIPE)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    x = torch.randn(32, 64)
    results, grads = [], []
    for model in (net, compiled):
        net.zero_grad()
        with o3():
            result = model(x)
        result.float().square().sum().backward()
        results.append(result.detach())
        grads.append([param.grad for param in net.parameters()])
    assert torch.equal(*results)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    with auto_cast(level="O2", dtype="bfloat16"):
        assert not torch.equal(compiled(x), results[1])  # another policy, another graph


def test_products_under_vmap_are_folded_and_fp8() -> None:
    layer = nn.Linear(64, 64)
    x = torch.randn(4, 32, 64)
    with o3():
        each, whole = torch.func.vmap(layer)(x), layer(x)
    # the float32 bias is added after the result is rounded: one unit of the last place
    torch.testing.assert_close(each.to(torch.bfloat16), whole, rtol=2.0**-7, atol=2.0**-7)


def test_torch_func_computes_gradients_too() -> None:
    layer = nn.Linear(64, 64)

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, params, (x,)).float().square().sum()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    arguments = dict(layer.named_parameters()), torch.randn(4, 32, 64)
    with o3():
        at_o3 = gradients(*arguments)
    with auto_cast(level="O2", dtype="bfloat16"):
        at_o2 = gradients(*arguments)
    for name, right in at_o2.items():  # 3.7 % for the product that the loss squares, and the same for its gradient
        assert (at_o3[name] - right).norm() < 0.1 * right.norm()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "O2", "half_layers": "0"}, "half_layers with level='O2': it belongs to level O3"),
        ({"level": "O1", "fp8": RECIPE}, "fp8 with level='O1': it belongs to level O3"),
        ({"level": "O3", "half_layers": "head"}, "half_layers: no module is named 'head'; the model has 0, 1"),
        ({"level": "O3", "fp8": {"gradient": "e1"}}, "Fp8Recipe: unknown gradient 'e1'; allowed: e5m2, e4m3"),
    ],
)
def test_a_mistake_is_told_before_anything_changes(options: dict[str, Any], message: str) -> None:
    net = stack(64, 64, 64)
    with pytest.raises(ValueError, match=message):
        decorate(net, **options)
    assert all(param.dtype is torch.float32 for param in net.parameters())
    assert all("forward" not in module.__dict__ for module in net.modules())


def test_a_policy_and_a_recipe_are_not_given_together() -> None:
    with pytest.raises(TypeError, match="give a policy, or level, dtype and lists, not both"):
        auto_cast(policy=Policy.create("O3"), fp8=RECIPE)
    with pytest.raises(ValueError, match="fp8 with level='O1'"):
        auto_cast(fp8=RECIPE)
