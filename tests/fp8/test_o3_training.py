"""Training at level O3: checkpoints, accumulation, overflow, several processes, recomputation, copies, frozen weights."""

import copy
import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from o3_nets import FP8, RECIPE, are_equal, batch, calls, decorated, layers, region, train, weights
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from free_port import free_port
from mezzo.amp import Fp8Recipe, GradScaler, auto_cast, decorate, float32_copy, keep_in_half
from mezzo.amp.debugging import collect_operator_stats
from mezzo.fp8 import E4M3, round_to, scale_for

E4M3_STEP, E4M3_NORMAL = 2.0**-9, 2.0**-6  # the smallest e4m3 number, and the smallest with all bits of its mantissa


def gradients(net: nn.Module, compute: Callable[[], Tensor], dtype: str = "bfloat16") -> list[Tensor]:
    """Return the gradients of a loss that is computed at O3, none for what has none."""
    net.zero_grad()
    with region(dtype):
        loss = compute()
    loss.backward()
    return [param.grad.clone() for param in net.parameters() if param.grad is not None]


# ---------------------------------------------------------------------------------------------- learning


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_o3_learns_as_o2_and_float32_do(dtype: str) -> None:
    net = layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x, target = batch()
    exact = []
    for _ in range(20):
        loss = mse_loss(net(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        exact.append(loss.item())
    found = {level: train(*decorated(dtype=dtype, level=level), 20, dtype, level=level) for level in ("O2", "O3")}
    fall = exact[0] - exact[-1]
    # Operands of each product are off by up to a sixteenth at random: a tenth of the fall is the goal for O3.
    assert found["O3"][0] - found["O3"][-1] == pytest.approx(fall, rel=0.1)
    assert found["O2"][0] - found["O2"][-1] == pytest.approx(fall, rel=0.02)  # half numbers: 8 bits or more
    assert found["O3"] != found["O2"]


def test_rows_that_are_no_multiple_of_16_are_trained_in_half_beside_fp8_steps() -> None:
    net, optimizer = decorated(half_layers=())
    for rows, in_fp8 in ((32, 5), (20, 0), (48, 5), (0, 0)):
        x, target = batch(rows)
        with collect_operator_stats(print_table=False) as stats, region():
            loss = (net(x) - target).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert calls(stats) == in_fp8
    assert all(param.isfinite().all() for param in net.parameters())


def test_leading_dimensions_count_as_rows() -> None:
    net, _ = decorated(half_layers=())
    x, target = batch()
    flat = gradients(net, lambda: mse_loss(net(x), target))
    deep = gradients(net, lambda: mse_loss(net(x.view(2, 16, 32)), target.view(2, 16, 16)))
    assert are_equal(flat, deep)


# ---------------------------------------------------------------------------------------------- checkpoints


def test_the_state_of_an_o3_model_is_that_of_o2() -> None:
    (o3, _), (o2, _) = decorated(), decorated(level="O2")
    state, other = o3.state_dict(), o2.state_dict()
    assert list(state) == list(other) == list(layers().state_dict())
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert are_equal(list(state.values()), list(other.values()))
    train(o3, decorated(o3)[1], 2)
    o2.load_state_dict(o3.state_dict())
    plain = layers()
    plain.load_state_dict(o3.state_dict())
    assert are_equal(list(o2.state_dict().values()), list(plain.state_dict().values()))
    assert are_equal(list(float32_copy(o3).state_dict().values()), list(plain.state_dict().values()))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_resumed_run_repeats_the_unbroken_one_bit_for_bit(kind: Any, dtype: str) -> None:
    """Copies of weights are made from the weights here; see the next test for those that an update on a GPU writes."""

    def begin() -> tuple[nn.Module, Any, GradScaler]:
        net = layers()
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = kind(net.parameters(), lr=0.01, **options)
        decorate(net, optimizer, level="O3", dtype=dtype, fp8=RECIPE)
        return net, optimizer, GradScaler(enable=dtype == "float16")

    net, optimizer, scaler = begin()
    train(net, optimizer, 3, dtype, scaler)
    file = io.BytesIO()
    torch.save([part.state_dict() for part in (net, optimizer, scaler)], file)
    expected = train(net, optimizer, 3, dtype, scaler)
    file.seek(0)
    other, its, its_scaler = begin()
    train(other, its, 1, dtype, its_scaler)  # copies of other weights are there already
    for part, state in zip((other, its, its_scaler), torch.load(file), strict=True):
        part.load_state_dict(state)
    assert train(other, its, 3, dtype, its_scaler) == expected
    assert are_equal(weights(other), weights(net))


def test_an_older_scale_changes_only_the_smallest_numbers_of_a_weight() -> None:
    """An update scales copies by the amax before it, a resumed run by the present one: a power of two apart at most."""
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 0, 256)
    amax = weight.abs().max()
    new, old = scale_for(amax, E4M3, 2.0), scale_for(amax * 1.9, E4M3, 2.0)
    assert new == 2 * old
    first, second = (round_to(weight, scale, E4M3).double() / scale.double() for scale in (new, old))
    difference = (first - second).abs()
    assert difference.max() <= E4M3_STEP / 2 * (1 / new + 1 / old)  # half a step of each
    assert not difference[weight.abs() >= E4M3_NORMAL / old].any()
    assert difference.any()


# ---------------------------------------------------------------------------------------------- accumulation, overflow


def test_gradients_accumulate_over_micro_batches() -> None:
    net, _ = decorated()
    x, target = batch()
    parts = [
        gradients(net, lambda part=part: mse_loss(net(x[part]), target[part])) for part in (slice(16), slice(16, 32))
    ]
    net.zero_grad()
    for part in (slice(16), slice(16, 32)):
        with region():
            loss = mse_loss(net(x[part]), target[part])
        loss.backward()
    assert are_equal([param.grad for param in net.parameters()], [a + b for a, b in zip(*parts, strict=True)])


def test_master_grad_accumulates_fp8_gradients_in_float32() -> None:
    net, _ = decorated(master_grad=True)
    x, target = batch()
    once = gradients(net, lambda: mse_loss(net(x), target))
    assert {grad.dtype for grad in once} == {torch.float32}
    twice = gradients(net, lambda: mse_loss(net(x), target) + mse_loss(net(x), target))
    assert are_equal(twice, [2 * grad for grad in once])


def test_a_step_is_skipped_and_the_scale_halved_when_a_gradient_overflows() -> None:
    net, optimizer = decorated(dtype="float16")
    train(net, optimizer, 1, "float16", GradScaler())
    before, copied = weights(net), copy.deepcopy(optimizer.state_dict())
    scaler = GradScaler(init_loss_scaling=2.0**40, decr_every_n_nan_or_inf=1)
    train(net, optimizer, 1, "float16", scaler)
    assert (scaler.get_scale(), scaler.skipped_steps) == (2.0**39, 1)
    assert are_equal(weights(net), before)
    momenta = [[state["momentum_buffer"] for state in of["state"].values()] for of in (copied, optimizer.state_dict())]
    assert are_equal(*momenta)
    good = GradScaler()
    train(net, optimizer, 1, "float16", good)
    assert good.skipped_steps == 0
    assert not are_equal(weights(net), before)


RECIPES = [
    RECIPE,
    Fp8Recipe(emulate=True, min_width=0, min_size=0, gradient="e4m3"),
    Fp8Recipe(emulate=True, min_width=0, min_size=0, granularity="row"),
    Fp8Recipe(emulate=True, min_width=0, min_size=0, scaling="delayed"),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=["e5m2", "e4m3", "row", "delayed"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_in_a_gradient_reaches_all_gradients_before_it(recipe: Fp8Recipe, value: float) -> None:
    layer = nn.Linear(32, 48).to(torch.float16)
    x = torch.randn(16, 32, dtype=torch.float16, requires_grad=True)
    for planted in (None, value):
        layer.zero_grad()
        x.grad = None
        with region("float16", recipe), collect_operator_stats(print_table=False) as stats:
            result = layer(x)
        assert calls(stats) == 1
        grad = torch.ones_like(result)
        if planted is not None:
            grad[3, 5] = planted
        result.backward(grad)
        assert layer.weight.grad is not None
        assert layer.bias.grad is not None
        assert x.grad is not None
        is_good = planted is None
        # One number of the gradient meets one row of the weight's gradient, and the row of the input's.
        assert bool(layer.weight.grad[5].isfinite().all()) == is_good
        assert bool(x.grad[3].isfinite().all()) == is_good
        assert bool(layer.bias.grad[5].isfinite()) == is_good


@pytest.mark.parametrize("recipe", RECIPES, ids=["e5m2", "e4m3", "row", "delayed"])
@pytest.mark.parametrize("where", ["input", "weight", "bias"])
def test_an_overflow_in_the_forward_is_not_cut_off(recipe: Fp8Recipe, where: str) -> None:
    layer = nn.Linear(32, 48).to(torch.float16)
    x = torch.randn(16, 32, dtype=torch.float16)
    tensor = {"input": x, "weight": layer.weight, "bias": layer.bias}[where]
    with region("float16", recipe):
        assert layer(x).isfinite().all()
        with torch.no_grad():
            tensor.view(-1)[5] = math.inf
        assert not layer(x).isfinite().all()


# ---------------------------------------------------------------------------------------------- processes


def rank_main(rank: int, port: int) -> None:
    """What each process checks; an assertion that fails here fails the spawn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        x, target = batch()
        own = slice(16 * rank, 16 * rank + 16)
        net, optimizer = decorated()
        # What a process would have alone, for either half of the batch: the mean of both is what both must get.
        alone = [gradients(net, lambda p=p: mse_loss(net(x[p]), target[p])) for p in (slice(16), slice(16, 32))]
        wrapped = nn.parallel.DistributedDataParallel(net)
        optimizer.zero_grad()
        with collect_operator_stats(print_table=False) as stats, region():
            loss = mse_loss(wrapped(x[own]), target[own])
        loss.backward()
        assert calls(stats) == 3
        for param, first, second in zip(net.parameters(), *alone, strict=True):
            assert param.grad is not None
            mean = (first.float() + second.float()) / 2
            torch.testing.assert_close(param.grad.float(), mean, rtol=2**-7, atol=2**-14)  # bfloat16 sums and halves
        optimizer.step()
        for param in net.parameters():
            both = [torch.empty_like(param) for _ in range(2)]
            dist.all_gather(both, param.detach())
            assert torch.equal(*both)
        # One process overflows: both skip.
        net, optimizer = decorated(dtype="float16")
        wrapped = nn.parallel.DistributedDataParallel(net)
        scaler = GradScaler(init_loss_scaling=1024.0, decr_every_n_nan_or_inf=1)
        before = weights(net)
        with region("float16"):
            loss = mse_loss(wrapped(x[own]), target[own])
        scaler.scale(loss * (math.inf if rank == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.get_scale(), scaler.skipped_steps) == (512.0, 1)
        assert are_equal(weights(net), before)
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")
@pytest.mark.slow
def test_two_processes_share_fp8_gradients_and_skip_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[2] / 'src'}:{Path(__file__).parent}")
    mp.spawn(rank_main, args=(free_port(),), nprocs=2)


# ---------------------------------------------------------------------------------------------- recomputation, copies


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_activations_give_the_same_gradients(use_reentrant: bool) -> None:
    net, _ = decorated(half_layers="2")
    x, target = batch()
    x.requires_grad_()
    expected = gradients(net, lambda: mse_loss(net(x), target))
    with collect_operator_stats(print_table=False) as stats:
        found = gradients(net, lambda: mse_loss(checkpoint(net, x, use_reentrant=use_reentrant), target))
    assert are_equal(found, expected)
    assert calls(stats) == 2 * 4  # once more in the backward, and what stays in half does so there too
    assert calls(stats, f"{FP8}_backward") == 4


def pickled(net: nn.Module) -> nn.Module:
    other: nn.Module = pickle.loads(pickle.dumps(net))  # noqa: S301  our own bytes
    return other


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
def test_a_copy_of_a_model_has_its_numbers_and_goes_its_own_way(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    net, optimizer = decorated()
    train(net, optimizer, 1)
    x = batch()[0]
    other = duplicate(net)
    with region(), collect_operator_stats(print_table=False) as stats:
        before = net(x)
        assert torch.equal(other(x), before)
    assert calls(stats) == 6  # layers of the copy stay in half too
    train(net, optimizer, 1)
    with region():
        assert torch.equal(other(x), before)
        assert not torch.equal(net(x), before)


def test_evaluation_gives_the_numbers_of_training_and_keeps_nothing() -> None:
    net, optimizer = decorated()
    x = batch()[0]
    with torch.inference_mode(), region():
        first = net.eval()(x)  # before any training: what it makes must not be in training's way
    net.train()
    with region():
        expected = net(x)
        with torch.no_grad():
            found = net.eval()(x)
    assert torch.equal(found, expected)
    assert torch.equal(first, expected)
    assert found.grad_fn is None
    train(net.train(), optimizer, 2)
    with region(), torch.inference_mode():
        assert not torch.equal(net(x), expected)  # of the weights as they are now


def test_an_edit_of_a_weight_is_followed() -> None:
    net, _ = decorated(half_layers=())
    x = batch()[0]
    with region(), torch.no_grad():
        net(x)
        for param in net.parameters():
            param.mul_(0.5)
        found = net(x)
        fresh = copy.deepcopy(net)(x)
    assert torch.equal(found, fresh)


# ---------------------------------------------------------------------------------------------- who needs a gradient


@pytest.mark.parametrize("what", ["weight", "bias", "both"])
def test_frozen_parameters_get_no_gradient_and_change_no_other(what: str) -> None:
    net, _ = decorated(half_layers=())
    x, target = batch()
    gradients(net, lambda: mse_loss(net(x), target))
    expected = {name: param.grad for name, param in net.named_parameters()}
    frozen = {"weight": ["4.weight"], "bias": ["4.bias"], "both": ["4.weight", "4.bias"]}[what]
    other, _ = decorated(half_layers=())
    for name in frozen:
        other.get_parameter(name).requires_grad_(False)
    gradients(other, lambda: mse_loss(other(x), target))
    for name, param in other.named_parameters():
        if name in frozen:
            assert param.grad is None
        else:
            assert torch.equal(param.grad, expected[name])


def test_a_model_with_frozen_layers_trains() -> None:
    net = layers()
    for part in (net[2], net[4]):
        part.requires_grad_(False)
    net, optimizer = decorated(net)
    frozen = weights(net[2])
    losses = train(net, optimizer, 5)
    assert losses[-1] < losses[0]
    assert are_equal(weights(net[2]), frozen)


def test_an_input_gets_a_gradient_if_it_wants_one_and_weights_the_same_either_way() -> None:
    net, _ = decorated(half_layers=())
    x, target = batch()
    without = gradients(net, lambda: mse_loss(net(x), target))
    asking = x.clone().requires_grad_()
    assert are_equal(gradients(net, lambda: mse_loss(net(asking), target)), without)
    exact = x.double().requires_grad_()
    mse_loss(float32_copy(net).double()(exact), target.double()).backward()
    assert asking.grad is not None
    assert exact.grad is not None
    # Five layers, each operand of each product off by up to a sixteenth (e4m3) or an eighth (e5m2), at random.
    error = (asking.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert error < math.sqrt(5) * (1 / 16 + 1 / 8)


class Tied(nn.Module):
    """Two layers with one weight, between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b, self.last = (nn.Linear(32, 32) for _ in range(4))
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.b(self.a(self.first(x)).relu()))


def test_a_shared_weight_gets_the_gradients_of_both_its_uses() -> None:
    torch.manual_seed(0)
    net, apart = Tied(), Tied()
    apart.load_state_dict(net.state_dict())
    apart.b.weight = nn.Parameter(apart.a.weight.detach().clone())
    decorated(net)
    decorated(apart)
    assert net.a.weight is net.b.weight
    x = batch()[0]
    gradients(net, lambda: net(x).square().mean())
    gradients(apart, lambda: apart(x).square().mean())
    assert net.a.weight.grad is not None
    both = apart.a.weight.grad + apart.b.weight.grad  # type: ignore[operator]
    assert torch.equal(net.a.weight.grad, both)


def test_layers_that_stay_in_half_keep_their_parts_in_half_and_no_others() -> None:
    net, _ = decorated(nn.Sequential(layers(), layers(1)[2:4], nn.Linear(48, 32)), half_layers=())
    handle = keep_in_half(net, "0")
    x = batch()[0]

    def in_fp8() -> int:
        with collect_operator_stats(print_table=False) as stats, region():
            hidden = net[0][:1](x)
            net[2](net[1](net[0][0](hidden)))
            net[0](x)
        return calls(stats)

    assert in_fp8() == 4  # called past their parent, its parts are FP8; through it they are not
    handle.remove()
    assert in_fp8() == 9


@pytest.mark.filterwarnings("ignore:decorate.level='O3'.*but auto_cast:UserWarning")
def test_outside_a_region_and_at_other_levels_nothing_is_fp8() -> None:
    net, _ = decorated(half_layers=())
    x = batch()[0]
    for context in (auto_cast(level="O2", dtype="bfloat16"), auto_cast(level="O1", dtype="bfloat16")):
        with collect_operator_stats(print_table=False) as stats, context:
            net(x)
        assert calls(stats) == 0
    with collect_operator_stats(print_table=False) as stats:
        net(x.bfloat16())
    assert calls(stats) == 0
