"""GradScaler around real steps: order of calls, accumulation, several optimizers, the floor, outcomes."""

import math

import pytest
import torch
from scaled import CLOSE, assert_same, half_model, set_grads, values
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop

from mezzo.amp import GradScaler, LossScaleFloorError
from mezzo.optim import attach, master_of

# Gradients are made by hand here, without a loss.
pytestmark = pytest.mark.filterwarnings("ignore:.*before any scale")

# scale()


@pytest.mark.filterwarnings("ignore:scale.. got a")  # a half loss is warned about: see test_scaler_mistakes.py
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_scaled_loss_is_float32_at_least_and_keeps_its_shape(shape, dtype, expected) -> None:
    loss = torch.full(shape, 3.0, dtype=dtype, requires_grad=True)
    scaled = GradScaler().scale(loss)
    assert (scaled.dtype, scaled.shape) == (expected, shape)
    assert (scaled == 3 * 2.0**15).all()  # half would have overflowed
    scaled.sum().backward()
    assert (loss.grad.float() == 2.0**15).all()


def test_lists_and_tuples_of_losses_are_scaled() -> None:
    scaler = GradScaler(init_loss_scaling=2.0)
    one, (two, three) = scaler.scale([torch.tensor(1.0), (torch.tensor(2.0), torch.tensor(3.0))])
    assert (one.item(), two.item(), three.item()) == (2.0, 4.0, 6.0)
    for wrong in (1.0, "loss", {"loss": torch.ones(())}):
        with pytest.raises(TypeError, match=f"got {type(wrong).__name__}"):
            scaler.scale(wrong)


def test_losses_of_a_generator_are_scaled_one_by_one() -> None:
    scaled = GradScaler(init_loss_scaling=2.0).scale(torch.tensor(float(i)) for i in range(3))
    assert [loss.item() for loss in scaled] == [0.0, 2.0, 4.0]


# step()


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("make", [SGD, AdamW, RMSprop])
def test_scaled_step_equals_the_plain_step_with_true_gradients(make, attached: bool) -> None:
    ours, plain = half_model(), half_model()
    optimizer, reference = make(ours.parameters(), lr=0.01), make(plain.parameters(), lr=0.01)
    attach(reference)
    if attached:
        attach(optimizer)
    scaler = GradScaler(init_loss_scaling=256.0)
    for i in range(4):
        set_grads(ours.parameters(), 256.0, seed=i)
        set_grads(plain.parameters(), 1.0, seed=i)
        before = [p.grad.clone() for p in ours.parameters()]
        scaler.step(optimizer)
        scaler.update()
        reference.step()
        assert_same(before, [p.grad for p in ours.parameters()])
    assert_same(values(ours.parameters()), values(plain.parameters()))


def test_undecorated_float32_model_trains_as_with_torchs_own_scaler() -> None:
    def run(scaler) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Linear(4, 2)
        optimizer = Adam(model.parameters(), lr=0.01)
        for _ in range(5):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert type(optimizer).step is Adam.step
        return [p.detach() for p in model.parameters()]

    stock = run(torch.amp.GradScaler("cpu", init_scale=2.0**15))
    for ours, theirs in zip(run(GradScaler()), stock, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("make", [SGD, AdamW, RMSprop])
def test_step_is_skipped_and_scale_halved_when_a_gradient_overflows(make) -> None:
    model = half_model()
    optimizer = make(model.parameters(), lr=0.1)
    scaler = GradScaler(decr_every_n_nan_or_inf=1)
    before = values(model.parameters())
    set_grads(model.parameters(), 1.0, seed=0, bad_at=2)
    scaler.minimize(optimizer)
    assert_same(before, values(model.parameters()))
    assert scaler.get_scale() == 2.0**14
    assert scaler.skipped_steps == 1
    set_grads(model.parameters(), 1.0, seed=0)
    optimizer.step()  # nothing sticks to the optimizer: a plain step is taken
    assert not torch.equal(before[0], model[0].weight.detach())
    assert not hasattr(optimizer, "found_inf")


def test_model_decorated_alone_gets_its_optimizer_attached_at_the_first_step() -> None:
    model = half_model()
    optimizer = SGD(model.parameters(), lr=1e-5)
    before = master_of(model[0].weight).clone()
    set_grads(model.parameters(), 1.0, seed=0)
    GradScaler(init_loss_scaling=1.0).step(optimizer)
    assert not torch.equal(before, master_of(model[0].weight))
    assert "step" in optimizer.__dict__


def test_step_returns_what_the_optimizer_returns_and_takes_no_closure() -> None:
    class Talking(SGD):
        def step(self, closure=None):
            super().step(closure)
            return "done"

    weight = nn.Parameter(torch.zeros(1))
    optimizer = Talking([weight], lr=1.0)
    weight.grad = torch.ones(1)
    assert GradScaler().step(optimizer) == "done"
    result, params_grads = GradScaler().minimize(optimizer)  # a pair, as Paddle's
    assert result == "done"
    assert [(p is weight, g is weight.grad) for p, g in params_grads] == [(True, True)]
    assert GradScaler().step(optimizer, None) == GradScaler().step(optimizer, closure=None) == "done"
    with pytest.raises(RuntimeError, match="closure"):
        GradScaler().step(optimizer, lambda: None)
    with pytest.raises(TypeError, match="got Linear"):
        GradScaler().step(nn.Linear(1, 1))


# Accumulation (the guide's 3.1)


def test_accumulated_micro_batches_equal_one_large_batch() -> None:
    def run(micro_batches: int) -> list[torch.Tensor]:
        model = half_model().float()
        optimizer = SGD(model.parameters(), lr=0.1)
        scaler = GradScaler(init_loss_scaling=64.0)
        data = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
        for _ in range(3):
            for part in data.chunk(micro_batches):
                scaler.scale(model(part).square().sum() / 16).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return values(model.parameters())

    for one, four in zip(run(1), run(4), strict=True):
        torch.testing.assert_close(one, four, rtol=1e-4, atol=1e-6)


# Order of calls


def ready(dynamic: bool = True) -> tuple[GradScaler, SGD]:
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    return GradScaler(use_dynamic_loss_scaling=dynamic), SGD([weight], lr=1.0)


def test_wrong_orders_are_errors_that_say_what_to_do() -> None:
    scaler, optimizer = ready()
    with pytest.raises(RuntimeError, match=r"call step"):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\).*already"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\).*call update\(\)"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_\(\).*after step\(\)"):
        scaler.clip_grad_norm_(optimizer, 1.0)
    for call in (scaler.step, scaler.minimize):
        with pytest.raises(RuntimeError, match=r"step\(\).*call update\(\)"):
            call(optimizer)
    scaler.update()
    with pytest.raises(RuntimeError, match="without a step"):
        scaler.update()
    scaler.step(optimizer)


def test_fixed_scaling_may_step_again_at_once_and_keeps_its_scale() -> None:
    scaler, optimizer = ready(dynamic=False)
    weight = optimizer.param_groups[0]["params"][0]
    weight.grad.fill_(2.0**15)
    scaler.step(optimizer)
    scaler.step(optimizer)
    assert weight.item() == -2.0
    assert len(scaler._stepped) == 1  # does not grow where update() is never called
    weight.grad.fill_(math.nan)
    for _ in range(5):
        scaler.minimize(optimizer)
    assert (weight.item(), scaler.get_scale(), scaler.skipped_steps) == (-2.0, 2.0**15, 5)


def test_disabled_scaler_does_nothing() -> None:
    scaler, (_, optimizer) = GradScaler(enable=False), ready()
    weight = optimizer.param_groups[0]["params"][0]
    loss = torch.tensor(2.0).half()
    assert scaler.scale(loss) is loss
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaler.update()
    assert scaler.minimize(optimizer, loss) == (None, [(weight, weight.grad)])
    assert weight.item() == -2.0
    assert scaler.state_dict() == {}
    assert (scaler.is_enable(), scaler.get_scale()) == (False, 1.0)


# Several optimizers


@pytest.mark.parametrize("bad", [0, 1])
def test_each_optimizer_skips_by_its_own_gradients_and_the_scale_sees_all(bad: int) -> None:
    params = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizers = [SGD([p], lr=1.0) for p in params]
    scaler = GradScaler(init_loss_scaling=4.0, decr_every_n_nan_or_inf=1)
    for i, param in enumerate(params):
        param.grad = torch.tensor([math.inf if i == bad else 4.0])
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [p.item() for p in params] == [0.0 if i == bad else -1.0 for i in range(2)]
    assert scaler.get_scale() == 2.0
    assert scaler.skipped_steps == 1


# The floor


def poison(scaler: GradScaler, optimizer: SGD, steps: int) -> None:
    for _ in range(steps):
        set_grads([p for g in optimizer.param_groups for p in g["params"]], 1.0, seed=0, bad_at=2)
        scaler.minimize(optimizer)


def test_too_many_bad_steps_at_the_floor_stop_training_and_name_the_parameter() -> None:
    model = half_model()
    optimizer = SGD(model.named_parameters(), lr=0.1)
    scaler = GradScaler(init_loss_scaling=2.0, decr_every_n_nan_or_inf=1, max_skips_at_floor=3)
    poison(scaler, optimizer, 3)  # one at scale 2, two at the floor
    with pytest.raises(LossScaleFloorError, match=r"3 steps in a row.*floor \(1\); first in '1\.weight'\. "):
        poison(scaler, optimizer, 1)


def test_names_come_from_the_scaler_or_else_place_and_shape() -> None:
    weight = nn.Parameter(torch.zeros(2, 3))
    optimizer = SGD([weight], lr=0.1)
    scaler = GradScaler(init_loss_scaling=1.0, max_skips_at_floor=1)
    weight.grad = torch.full((2, 3), math.nan)
    with pytest.raises(LossScaleFloorError, match=r"first in parameter #0 of group 0, shape \(2, 3\)"):
        scaler.minimize(optimizer)
    holder = nn.Module()
    holder.stem = weight
    scaler.name_parameters(holder)
    with pytest.raises(LossScaleFloorError, match="first in 'stem'"):
        scaler.minimize(optimizer)


def test_a_good_step_ends_the_row_and_none_means_no_limit() -> None:
    model = half_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = GradScaler(init_loss_scaling=1.0, max_skips_at_floor=3)
    for _ in range(4):
        poison(scaler, optimizer, 2)
        set_grads(model.parameters(), 1.0, seed=0)
        scaler.minimize(optimizer)
    poison(GradScaler(init_loss_scaling=1.0, max_skips_at_floor=None), optimizer, 60)


# Outcomes


def test_outcome_hook_is_called_once_per_update_in_order() -> None:
    scaler, optimizer = ready()
    weight = optimizer.param_groups[0]["params"][0]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    outcomes: list[bool] = []
    handle = scaler.register_outcome_hook(outcomes.append)
    scaler.register_outcome_hook(lambda taken: scheduler.step() if taken else None)
    for bad in (False, True, True, False):
        weight.grad = torch.tensor([math.nan if bad else 0.0])
        scaler.minimize(optimizer)
    assert outcomes == [True, False, False, True]
    assert optimizer.param_groups[0]["lr"] == 0.25
    handle.remove()
    handle.remove()
    scaler.minimize(optimizer)
    scaler.flush()
    assert len(outcomes) == 4
    assert scaler.skipped_steps == 2


def test_minimize_collects_parameters_and_gradients_only_when_they_are_looked_at() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer, scaler = SGD([weight], lr=0.1), GradScaler(init_loss_scaling=2.0)
    scaler.scale(weight.sum()).backward()
    result, pairs = scaler.minimize(optimizer)
    assert result is None
    weight.grad = later = torch.zeros(1)
    assert pairs[0][1] is later  # collecting hundreds takes longer than the rest of a step
    weight.grad = None
    assert (len(pairs), pairs == [(weight, later)], list(pairs) == pairs) == (1, True, True)
