"""Mistakes with a loss scale that end in a wrong result: one warning each, once, at the user's line, no false alarm."""

import gc
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from mezzo.amp import GradScaler, auto_cast, decorate


def model_and_optimizer(make=lambda p: SGD(p, lr=0.01)) -> tuple[nn.Module, Optimizer]:
    model = nn.Linear(3, 2)
    return model, make(model.parameters())


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(4, 3)).square().mean()


def train_one(scaler: GradScaler, model: nn.Module, optimizer: Optimizer) -> None:
    scaler.scale(loss_of(model)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@contextmanager
def one_warning(match: str) -> Iterator[None]:
    """Expect exactly one warning, and that it points to this file."""
    with pytest.warns(UserWarning, match=match) as caught:
        yield
    assert [w.filename for w in caught] == [__file__]


# torch's clipping on scaled gradients

CLIPS = {
    "clip_grad_norm_": lambda p: clip_grad_norm_(p, 1.0),
    "clip_grad_value_": lambda p: clip_grad_value_(p, 1.0),
    "clip_grad_norm_ slow": lambda p: clip_grad_norm_(p, 1.0, foreach=False),
    "torch.nn.utils.clip_grad_norm_": lambda p: torch.nn.utils.clip_grad_norm_(list(p), 1.0),
}


@pytest.mark.parametrize("is_first_step", [True, False])
@pytest.mark.parametrize("name", CLIPS)
def test_torchs_clipping_of_scaled_gradients_warns_once_and_names_unscale(name: str, is_first_step: bool) -> None:
    model, optimizer = model_and_optimizer()
    scaler = GradScaler()
    if not is_first_step:
        train_one(scaler, model, optimizer)
    scaler.scale(loss_of(model)).backward()
    with one_warning(
        r"carry the loss scale.*call scaler.unscale_\(optimizer\) before it.*Precision, its step\(optimizer, max_norm"
    ):
        CLIPS[name](model.parameters())
    CLIPS[name](model.parameters())  # once
    scaler.step(optimizer)


@pytest.mark.parametrize("name", CLIPS)
def test_clipping_of_true_gradients_is_silent(name: str) -> None:
    clip = CLIPS[name]
    model, optimizer = model_and_optimizer()
    other, plain = model_and_optimizer()
    scaler = GradScaler()
    for _ in range(3):
        scaler.scale(loss_of(model)).backward()
        loss_of(other).backward()
        clip(other.parameters())  # another network, never scaled
        plain.step()
        scaler.unscale_(optimizer)
        clip(model.parameters())
        scaler.scale(loss_of(other)).backward()  # pending again, but not for these
        clip(model.parameters())
        scaler.step(optimizer)
        scaler.update()
        loss_of(model).backward()
        clip(model.parameters())
        for some in (optimizer, plain):
            some.zero_grad()
    scaler.scale(loss_of(model)).backward()
    get_total_norm([p.grad for p in model.parameters()])  # only looks


def test_a_compiled_function_that_clips_is_one_graph() -> None:
    model, _ = model_and_optimizer()
    scaler = GradScaler()
    scaler.scale(loss_of(model)).backward()
    params = list(model.parameters())
    torch.compile(lambda: clip_grad_norm_(params, 1.0), backend="eager", fullgraph=True)()
    torch._dynamo.reset()


# A plain step with scaled gradients


@pytest.mark.parametrize("is_decorated", [True, False])
@pytest.mark.parametrize("is_first_step", [True, False])
def test_a_plain_step_with_scaled_gradients_warns_once(is_first_step: bool, is_decorated: bool) -> None:
    model, optimizer = model_and_optimizer()
    if is_decorated:
        decorate(model, optimizer, level="O2")

    def scaled_backward() -> None:
        with auto_cast(level="O2"):
            loss = model(torch.ones(4, 3)).float().square().mean()
        scaler.scale(loss).backward()

    scaler = GradScaler(init_loss_scaling=8.0)
    if not is_first_step:
        scaled_backward()
        scaler.minimize(optimizer)
    scaled_backward()
    with one_warning(
        r"carry the loss scale and moves .* call scaler.step\(optimizer\) .*or precision.step\(optimizer\)"
    ):
        optimizer.step()
    scaled_backward()
    optimizer.step()


def test_plain_steps_beside_a_scaler_are_silent() -> None:
    """A GAN whose discriminator is not scaled; unscaling, by call and by hand; a phase without the scaler; evaluation."""
    generator, scaled = model_and_optimizer()
    discriminator, plain = model_and_optimizer(AdamW)
    scaler = GradScaler()
    for _ in range(3):
        scaler.scale(loss_of(generator)).backward()
        loss_of(discriminator).backward()
        plain.step()  # while the scaled gradients of the other wait
        scaler.step(scaled)
        scaler.update()
        plain.step()
        scaled.zero_grad()
    with torch.no_grad():
        scaler.scale(loss_of(generator))  # evaluation
    loss_of(generator).backward()
    scaled.step()
    scaler.scale(loss_of(generator)).backward()
    scaler.unscale_(scaled)
    scaled.step()
    other = GradScaler()
    other.scale(loss_of(generator)).backward()
    for param in generator.parameters():
        param.grad.div_(other.get_scale())
    scaled.step()


def gan() -> tuple[nn.Module, nn.Module, Optimizer, Optimizer]:
    generator, discriminator = nn.Linear(3, 3), nn.Linear(3, 2)
    return generator, discriminator, SGD(generator.parameters(), lr=0.1), SGD(discriminator.parameters(), lr=0.1)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gan_whose_discriminator_is_zeroed_and_trained_without_a_scale_is_silent(set_to_none: bool) -> None:
    generator, discriminator, scaled, plain = gan()
    scaler, x = GradScaler(), torch.ones(4, 3)
    for _ in range(3):
        scaled.zero_grad()
        scaler.scale(discriminator(generator(x)).mean()).backward()
        plain.zero_grad(set_to_none)
        discriminator(x).mean().backward()
        clip_grad_norm_(discriminator.parameters(), 1.0)
        plain.step()
        scaler.step(scaled)
        scaler.update()


@pytest.mark.parametrize("is_first_step", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_plain_backward_after_zero_grad_is_silent(set_to_none: bool, is_first_step: bool) -> None:
    model, optimizer = model_and_optimizer()
    scaler = GradScaler()
    if not is_first_step:
        train_one(scaler, model, optimizer)
    scaler.scale(loss_of(model)).backward()
    optimizer.zero_grad(set_to_none)
    loss_of(model).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


UNSCALED_BY_HAND = {
    "in place": lambda p, scale: p.grad.div_(scale),
    "new tensor": lambda p, scale: setattr(p, "grad", p.grad / scale),
}


@pytest.mark.parametrize("name", UNSCALED_BY_HAND)
@pytest.mark.parametrize("read", [GradScaler.get_scale, lambda scaler: scaler.state_dict()["scale"]])
def test_unscaling_by_hand_with_a_scale_read_before_is_silent(read, name: str) -> None:
    model, optimizer = model_and_optimizer()
    scaler = GradScaler()
    for _ in range(3):
        scale = read(scaler)
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        for param in model.parameters():
            UNSCALED_BY_HAND[name](param, scale)
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def test_gradients_from_autograd_grad_that_are_unscaled_by_hand_are_silent() -> None:
    model, optimizer = model_and_optimizer()
    scaler, params = GradScaler(), list(model.parameters())
    for _ in range(3):
        scale = scaler.get_scale()
        loss_of(model).backward()  # true gradients, which the scaled pass leaves alone
        grads = torch.autograd.grad(scaler.scale(loss_of(model)), params)
        clip_grad_norm_(params, 1.0)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad / scale
        optimizer.step()


def test_reading_the_scale_does_not_hide_a_mistake() -> None:
    model, optimizer = model_and_optimizer()
    scaler = GradScaler()
    scaler.scale(loss_of(model)).backward()
    scaler.get_scale()  # for the log
    with one_warning("clip_grad_norm_ is called with gradients that carry the loss scale"):
        clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)


@pytest.mark.parametrize("is_first_step", [True, False])
@pytest.mark.parametrize("is_updated", [True, False])
def test_the_step_of_one_optimizer_does_not_hide_the_plain_step_of_another(
    is_updated: bool, is_first_step: bool
) -> None:
    first, second, stepped, forgotten = gan()
    scaler = GradScaler()
    if not is_first_step:
        for model, optimizer in ((first, stepped), (second, forgotten)):
            train_one(scaler, model, optimizer)
    scaler.scale(second(first(torch.ones(4, 3))).sum()).backward()
    scaler.step(stepped)
    if is_updated:
        scaler.update()
    with one_warning("optimizer.step.. is called with gradients that carry the loss scale"):
        forgotten.step()


def test_the_parameters_may_come_in_another_order_than_the_optimizers() -> None:
    model = nn.Linear(3, 2)
    optimizer, scaler = SGD([model.bias, model.weight], lr=0.1), GradScaler()
    train_one(scaler, model, optimizer)
    scaler.scale(loss_of(model)).backward()
    with one_warning("clip_grad_norm_"):
        clip_grad_norm_(model.parameters(), 1.0)


def test_accumulated_scaled_gradients_are_still_known() -> None:
    model, optimizer = model_and_optimizer()
    scaler = GradScaler(init_loss_scaling=8.0)
    train_one(scaler, model, optimizer)
    for _ in range(3):
        scaler.scale(loss_of(model)).backward()
    with one_warning("clip_grad_norm_"):
        clip_grad_norm_(model.parameters(), 1.0)


def test_a_backward_pass_that_fails_leaves_the_watch_working() -> None:
    model, optimizer = model_and_optimizer()
    scaler = GradScaler()
    train_one(scaler, model, optimizer)
    out = loss_of(model)
    out.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scaler.scale(out).backward()
    scaler.scale(loss_of(model)).backward()
    with one_warning("clip_grad_norm_"):
        clip_grad_norm_(model.parameters(), 1.0)


def test_a_scaled_loss_keeps_neither_graph_nor_weights_alive() -> None:
    model, optimizer = model_and_optimizer()
    scaler = GradScaler()
    loss = loss_of(model)
    scaler.scale(loss).backward()
    gone = [weakref.ref(param) for param in model.parameters()]
    del model, optimizer, loss
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_hooks_of_the_user_on_a_scaled_loss_run_beside_the_watch() -> None:
    model, _ = model_and_optimizer()
    scaler, seen = GradScaler(), []
    scaled = scaler.scale(loss_of(model))
    scaled.register_hook(seen.append)
    scaled.backward()
    assert len(seen) == 1
    with one_warning("clip_grad_norm_"):
        clip_grad_norm_(model.parameters(), 1.0)


def test_gradients_that_are_inference_tensors_are_looked_at_without_their_version() -> None:
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer, scaler = SGD([weight, other], lr=0.1), GradScaler()
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    with torch.inference_mode():
        weight.grad = torch.ones(2)
    scaler.scale(other.sum()).backward()
    optimizer.step()


def test_a_scaled_loss_inside_torch_func_has_its_gradient() -> None:
    scaler = GradScaler(init_loss_scaling=4.0)
    grad = torch.func.vmap(torch.func.grad(lambda w: scaler.scale((w * w).sum())))
    assert grad(torch.ones(2, 2)).tolist() == [[8.0, 8.0]] * 2


def test_compiled_code_does_not_look_at_steps() -> None:
    """Dynamo traces the hooks of a step: neither graph breaks nor guards come from ours."""
    model, optimizer = model_and_optimizer()
    scaler = GradScaler()
    scaler.scale(loss_of(model)).backward()

    def look(x: Tensor) -> Tensor:
        for hook in _global_optimizer_pre_hooks.values():
            hook(optimizer, (), {})
        return x + 1

    compiled = torch.compile(look, backend="eager", fullgraph=True)
    assert compiled(torch.ones(1)).item() == 2.0
    torch._dynamo.reset()


def test_fixed_scaling_without_update_then_a_plain_step_is_silent() -> None:
    model, optimizer = model_and_optimizer()
    scaler = GradScaler(use_dynamic_loss_scaling=False, init_loss_scaling=8.0)
    scaler.scale(loss_of(model)).backward()
    scaler.step(optimizer)
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


def test_a_scaler_that_is_gone_is_forgotten() -> None:
    model, optimizer = model_and_optimizer()
    GradScaler().scale(loss_of(model)).backward()
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


def test_accumulation_with_scaled_losses_is_silent() -> None:
    model, optimizer = model_and_optimizer()
    scaler = GradScaler(init_loss_scaling=8.0)
    for _ in range(2):
        for _ in range(3):
            scaler.scale(loss_of(model) / 3).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()


# A step without gradients


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_step_without_any_gradient_warns_once_and_does_not_count(dynamic: bool) -> None:
    model, optimizer = model_and_optimizer()
    scaler = GradScaler(incr_every_n_steps=1, use_dynamic_loss_scaling=dynamic)
    outcomes: list[bool] = []
    scaler.register_outcome_hook(outcomes.append)
    before = scaler.state_dict()
    with one_warning(r"no gradient in this SGD: nothing was updated.*call scale\(loss\).backward\(\) before step"):
        scaler.step(optimizer)
    scaler.update()
    scaler.minimize(optimizer)
    assert (scaler.state_dict(), outcomes) == (before, [])
    train_one(scaler, model, optimizer)
    assert outcomes == [True]
    assert scaler.get_scale() == 2.0 ** (16 if dynamic else 15)
    with pytest.raises(RuntimeError, match="without a step"):
        scaler.update()


def test_one_optimizer_without_gradients_does_not_hide_the_other() -> None:
    (model, optimizer), (_, idle) = model_and_optimizer(), model_and_optimizer()
    scaler = GradScaler(incr_every_n_steps=1)
    scaler.scale(loss_of(model)).backward()
    with one_warning("no gradient in this SGD"):
        for some in (optimizer, idle):
            scaler.step(some)
    scaler.update()
    assert scaler.get_scale() == 2.0**16


# A half loss


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_loss_computed_in_half_warns_once_and_is_scaled(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.ones(2, dtype=dtype))
    scaler = GradScaler()
    with one_warning(rf"scale\(\) got a {str(dtype)[6:]} loss: it was computed in half.*inside auto_cast"):
        scaled = scaler.scale(weight.sum())
    assert scaled.item() == 2.0**16
    scaler.scale(weight.sum())


def test_float32_losses_half_maps_and_evaluation_do_not_warn() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler = GradScaler()
    scaler.scale(weight.float().sum())
    scaler.scale(weight * 2)  # no loss: the caller has gradients of its own for it
    with torch.no_grad():
        scaler.scale(weight.sum())
    with warnings.catch_warnings(), auto_cast(level="O2"):
        warnings.simplefilter("error")
        scaler.scale(nn.functional.cross_entropy(weight[None], torch.tensor([0])))


@pytest.mark.parametrize("call", ["step", "unscale_", "clip"])
def test_a_step_without_any_scaled_loss_warns_once_and_names_scale(call: str) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), GradScaler()
    calls = {
        "step": lambda: None,
        "unscale_": lambda: scaler.unscale_(optimizer),
        "clip": lambda: scaler.clip_grad_norm_(optimizer, 1.0),
    }

    def step() -> None:
        weight.sum().backward()
        calls[call]()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    with pytest.warns(UserWarning, match=r"before any scale.*scaler\.scale\(loss\)\.backward") as caught:
        step()
    step()  # without a second warning, which would be an error
    assert [warning.filename for warning in caught] == [__file__]


def test_after_a_hundred_losses_nobody_looks_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mezzo.amp._scaler_watch._LOOKS", 3)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), GradScaler()
    for _ in range(3):
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    loss = scaler.scale(weight.sum())
    assert loss._backward_hooks is None
    loss.backward()
    optimizer.step()  # wrong, but not looked at
