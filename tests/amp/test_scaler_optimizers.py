"""What `GradScaler.step` calls: hooks of skipped steps, arguments, look-alikes of optimizers, torch's contracts."""

import math
import types
import warnings

import pytest
import torch
from scaled import assert_same, half_model, set_grads, values
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import StepLR

from mezzo.amp import GradScaler, auto_cast, decorate
from mezzo.optim import attach, master_of

# Gradients are made by hand here, without a loss.
pytestmark = pytest.mark.filterwarnings("ignore:.*before any scale")

MAKES = {
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: AdamW(p, lr=0.01),
    "amsgrad": lambda p: Adam(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: RMSprop(p, lr=0.01),
}


# Skipped steps


@pytest.mark.parametrize("after_unscale", [True, False])
@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("name", MAKES)
def test_a_skipped_step_calls_neither_hooks_nor_the_optimizers_step(
    name: str, attached: bool, after_unscale: bool
) -> None:
    model = half_model()
    optimizer = MAKES[name](model.parameters())
    if attached:
        attach(optimizer)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    scaler = GradScaler(init_loss_scaling=4.0)
    for bad, expected in ((1, []), (None, ["pre", "post"]), (0, ["pre", "post"])):
        set_grads(model.parameters(), 1.0, seed=0, bad_at=bad)
        before = values(model.parameters())
        if after_unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert calls == expected
        if bad is not None:
            assert_same(before, values(model.parameters()))


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("name", MAKES)
def test_an_lr_scheduler_sees_skipped_steps_as_with_torchs_scaler(name: str, attached: bool) -> None:
    def messages(scaler, is_attached: bool, bad: bool) -> list[str]:
        weight = nn.Parameter(torch.ones(2))
        optimizer = MAKES[name]([weight])
        if is_attached:
            attach(optimizer)
        scheduler = StepLR(optimizer, 1)
        scaler.scale(weight.sum() * (math.inf if bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scheduler.step()
        return [str(w.message).split(".")[0] for w in caught]

    for bad in (True, False):
        stock = messages(torch.amp.GradScaler("cpu"), False, bad)
        assert messages(GradScaler(), attached, bad) == stock
        assert bool(stock) is bad


# Arguments of the step


class Named(SGD):
    """A rule of the user's own whose step takes more than a closure."""

    def step(self, closure=None, factor: float = 1.0, *, note: str = "") -> str:
        assert closure is None
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.add_(param.grad, alpha=-factor)
        return f"{factor} {note} {self.param_groups[0]['params'][0].dtype}"


@pytest.mark.parametrize("attached", [True, False])
def test_arguments_reach_the_optimizers_step_and_its_result_comes_back(attached: bool) -> None:
    model = half_model()
    optimizer = Named(model[0].parameters(), lr=1.0)
    if attached:
        attach(optimizer)
    before = master_of(model[0].weight).clone()
    set_grads(model.parameters(), 8.0, seed=0)
    true = model[0].weight.grad.float() / 8.0
    scaler = GradScaler(init_loss_scaling=8.0)
    assert scaler.step(optimizer, None, 2.0, note="hi") == "2.0 hi torch.float32"  # it works on the masters
    scaler.update()
    assert scaler.minimize(optimizer, None, factor=0.0)[0] == "0.0  torch.float32"
    torch.testing.assert_close(master_of(model[0].weight), before - 2.0 * true)
    if attached:
        assert optimizer.step(note="plain") == "1.0 plain torch.float32"
    assert GradScaler(enable=False).step(optimizer, None, note="off").startswith("1.0 off")


@pytest.mark.parametrize("name", MAKES)
def test_arguments_that_the_optimizer_does_not_take_are_its_own_error(name: str) -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = MAKES[name]([weight])
    weight.grad = torch.ones(1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'factor'"):
        GradScaler().step(optimizer, factor=2.0)
    scaler = GradScaler()
    scaler.step(optimizer, None)  # no closure
    scaler.update()
    scaler.step(optimizer, closure=None)


def test_a_closure_is_refused_by_name_too() -> None:
    weight = nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match="closure"):
        GradScaler().step(SGD([weight], lr=0.1), closure=lambda: None)


# By duck typing


class Larc:
    """As apex's LARC: looks like an optimizer, changes gradients in place, then steps another one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optim = optimizer
        self.steps = 0

    @property
    def param_groups(self) -> list:
        return self.optim.param_groups

    def zero_grad(self) -> None:
        self.optim.zero_grad()

    @torch.no_grad()
    def step(self) -> str:
        self.steps += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(0.1 * param.float().norm() / (param.grad.float().norm() + 1e-8))
        self.optim.step()
        return "larc"


def run_larc(scaler, is_clipped: bool = False) -> tuple[list[Tensor], int]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    larc = Larc(SGD(model.parameters(), lr=0.5, momentum=0.9))
    for i in range(4):
        larc.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean() * (math.inf if i == 1 else 1.0)
        scaler.scale(loss).backward()
        if is_clipped and isinstance(scaler, GradScaler):
            scaler.clip_grad_norm_(larc, 0.1)
        elif is_clipped:
            scaler.unscale_(larc)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        result = scaler.step(larc)
        assert result == (None if i == 1 else "larc")
        scaler.update()
    return [p.detach() for p in model.parameters()], larc.steps


@pytest.mark.parametrize("is_clipped", [True, False])
def test_an_object_that_looks_like_an_optimizer_is_stepped_as_torchs_scaler_does(is_clipped: bool) -> None:
    stock, stock_steps = run_larc(torch.amp.GradScaler("cpu", init_scale=64.0), is_clipped)
    ours, steps = run_larc(GradScaler(init_loss_scaling=64.0, decr_every_n_nan_or_inf=1), is_clipped)
    assert steps == stock_steps == 3
    for a, b in zip(ours, stock, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_a_wrapper_around_a_decorated_optimizer_updates_its_masters() -> None:
    model = nn.Linear(4, 2)
    inner = SGD(model.parameters(), lr=1e-4)
    decorate(model, inner, level="O2")
    larc, scaler = Larc(inner), GradScaler(init_loss_scaling=8.0)
    before = master_of(model.weight).clone()
    set_grads(model.parameters(), 8.0, seed=0)
    scaler.step(larc)
    scaler.update()
    moved = master_of(model.weight) - before
    assert 0 < moved.abs().max() < 1e-4  # the half weight could not show it


def test_unscale_of_a_wrapper_rewrites_the_gradients_once() -> None:
    weight = nn.Parameter(torch.ones(2))
    larc, scaler = Larc(SGD([weight], lr=1.0)), GradScaler(init_loss_scaling=4.0)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(larc)
    assert weight.grad.tolist() == [1.0, 1.0]
    scaler.step(larc)
    with pytest.raises(RuntimeError, match="already called on this optimizer"):
        scaler.step(larc)


class FailsOnce(Larc):
    """A wrapper whose first step fails before it changes anything, as one that writes a log may."""

    def step(self) -> str:
        self.steps += 1
        if self.steps == 1:
            raise OSError("disk full")
        self.optim.step()
        return "done"


@pytest.mark.parametrize("is_clipped", [True, False])
@pytest.mark.parametrize("is_unscaled", [True, False])
def test_a_second_try_after_a_failed_step_of_a_wrapper_unscales_and_clips_once(
    is_unscaled: bool, is_clipped: bool
) -> None:
    weight = nn.Parameter(torch.zeros(1))
    wrapper, scaler = FailsOnce(SGD([weight], lr=1.0)), GradScaler(init_loss_scaling=1024.0)
    scaler.scale(4.0 * weight.sum()).backward()
    if is_unscaled:
        scaler.unscale_(wrapper)
    if is_clipped:
        scaler.clip_grad_norm_(wrapper, 1.0)
    with pytest.raises(OSError, match="disk full"):
        scaler.step(wrapper)
    assert scaler.step(wrapper) == "done"
    scaler.update()
    assert weight.item() == pytest.approx(-1.0 if is_clipped else -4.0, rel=1e-5)


class Delegating:
    """Has nothing of its own, not even on its class."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.inner = optimizer

    def __getattr__(self, name: str):
        return getattr(self.__dict__["inner"], name)


class Accelerated(Optimizer):
    """As accelerate's: of torch's class, whose `__init__` it does not call."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.inner = optimizer

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)
    defaults = property(lambda self: self.inner.defaults)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure=None) -> None:
        self.inner.step(closure)


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.1), lambda p: AdamW(p, lr=0.1, fused=True)])
@pytest.mark.parametrize("wrap", [Delegating, Accelerated])
def test_wrappers_that_delegate_are_stepped_as_torchs_scaler_steps_the_inner_one(wrap, make) -> None:
    def run(scaler, wrap) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = wrap(make(model.parameters()))
        for bad in (False, True, False):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(8, 4)).square().mean() * (math.inf if bad else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        return [p.detach() for p in model.parameters()]

    stock = run(torch.amp.GradScaler("cpu", init_scale=64.0), lambda optimizer: optimizer)
    ours = run(GradScaler(init_loss_scaling=64.0, decr_every_n_nan_or_inf=1), wrap)
    for a, b in zip(ours, stock, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


class Wrapped(Optimizer):
    """As accelerate's wrapper: torch's optimizer is in `optimizer`, and steps wait for the end of accumulation."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.accumulates = False

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None) -> None:
        if not self.accumulates:
            self.optimizer.step(closure)


@pytest.mark.parametrize("enable", [True, False])
@pytest.mark.parametrize("wraps_first", [True, False])
def test_a_decorated_optimizer_steps_on_masters_through_its_wrapper(wraps_first: bool, enable: bool) -> None:
    def run(wrap) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = AdamW(model.parameters(), lr=0.1)
        if wraps_first:
            optimizer = wrap(optimizer)
        decorate(model, optimizer, level="O2", dtype="bfloat16")
        if not wraps_first:
            optimizer = wrap(optimizer)
        scaler = GradScaler(enable=enable, init_loss_scaling=64.0)
        for number in range(3):
            with auto_cast(level="O2", dtype="bfloat16"):
                loss = model(torch.full((8, 4), number + 1.0)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.clip_grad_norm_(optimizer, 0.5)
            scaler.step(optimizer, None)
            scaler.update()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in model.state_dict().items()}

    wrapped, plain = run(Wrapped), run(lambda optimizer: optimizer)
    assert all(torch.equal(wrapped[name], plain[name]) for name in plain)


def test_a_wrapper_that_still_accumulates_takes_no_step_and_leaves_the_scale() -> None:
    weight = nn.Parameter(torch.zeros(1))
    wrapper = Wrapped(SGD([weight], lr=1.0))
    scaler = GradScaler(init_loss_scaling=64.0, incr_every_n_steps=1)
    for wrapper.accumulates in (True, False):
        scaler.scale(2.0 * weight.sum()).backward()
        scaler.step(wrapper)
        scaler.update()
        assert (weight.item(), scaler.get_scale()) == ((0.0, 64.0) if wrapper.accumulates else (-4.0, 128.0))


def test_a_wrapper_skips_a_step_that_overflowed() -> None:
    weight = nn.Parameter(torch.zeros(1))
    wrapper, scaler = Wrapped(SGD([weight], lr=1.0)), GradScaler(init_loss_scaling=64.0, decr_every_n_nan_or_inf=1)
    scaler.scale(math.inf * weight.sum()).backward()
    scaler.step(wrapper)
    scaler.update()
    assert (weight.item(), scaler.skipped_steps, scaler.get_scale()) == (0.0, 1, 32.0)


class Slotted:
    __slots__ = ("__weakref__", "inner")
    param_groups = property(lambda self: self.inner.param_groups)

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...


def test_objects_that_cannot_carry_anything_are_refused_in_one_line() -> None:
    inner = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    slotted = Slotted()
    slotted.inner = inner
    loose = types.SimpleNamespace(param_groups=inner.param_groups, step=inner.step, zero_grad=inner.zero_grad)
    for thing in (slotted, loose):
        with pytest.raises(TypeError, match=type(thing).__name__):
            GradScaler().step(thing)


class TakesModel(SGD):
    def step(self, model=None, closure=None):
        super().step()
        return model


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("enable", [True, False])
def test_a_module_among_the_arguments_arrives_as_it_is(enable: bool, attached: bool, by_name: bool) -> None:
    model = nn.Linear(3, 2)
    optimizer, scaler = TakesModel(model.parameters(), lr=0.1), GradScaler(enable=enable)
    if attached:
        attach(optimizer)
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    got = scaler.step(optimizer, model=model) if by_name else scaler.step(optimizer, model)
    assert got is model


def test_a_callable_that_is_no_closure_is_not_wrapped_without_a_scale() -> None:
    class TakesFunction(SGD):
        def step(self, closure=None, *, on_done=None):
            return on_done

    weight = nn.Parameter(torch.ones(1))
    done = print
    assert GradScaler(enable=False).step(TakesFunction([weight], lr=0.1), on_done=done) is done


def test_an_undecorated_optimizer_inside_a_wrapper_is_named_as_such_at_the_users_line() -> None:
    model = nn.Linear(4, 2)
    larc, scaler = Larc(SGD(model.parameters(), lr=0.1)), GradScaler(init_loss_scaling=8.0)
    decorate(model, level="O2")
    scaler.scale(torch.zeros(()))
    set_grads(model.parameters(), 8.0, seed=0)
    with pytest.warns(UserWarning, match=r"SGD.*mezzo\.amp\.decorate.*before.*LARC wraps it") as caught:
        scaler.step(larc)
    assert [w.filename for w in caught] == [__file__]


# Optimizers that unscale and skip by themselves


class ByAttributes(Adagrad):
    """Reads what torch's scaler sets on an optimizer: the gradients over `grad_scale` are the true ones."""

    def __init__(self, params, **options) -> None:
        super().__init__(params, **options)
        self._step_supports_amp_scaling = True
        self.seen: list[float] = []

    @torch.no_grad()
    def step(self, closure=None) -> None:
        assert isinstance(self.grad_scale, Tensor | float)
        self.seen.append(self.found_inf.item())
        for param in self.param_groups[0]["params"]:
            if not self.found_inf:
                param.sub_(param.grad / self.grad_scale)


class ByScaler(Adagrad):
    """torch's older contract: the step takes the scaler."""

    def __init__(self, params, **options) -> None:
        super().__init__(params, **options)
        self._step_supports_amp_scaling = True
        self.unscales = True

    @torch.no_grad()
    def step(self, closure=None, *, grad_scaler=None) -> str:
        (param,) = self.param_groups[0]["params"]
        assert param.grad.item() == 8.0  # as backward left it
        if self.unscales:
            grad_scaler.unscale_(self)
            param.sub_(param.grad)
        else:
            param.sub_(param.grad / grad_scaler.get_scale())
        return type(grad_scaler).__name__


@pytest.mark.parametrize("extra", [None, 2.0, torch.tensor(2.0)])
@pytest.mark.parametrize("unscaled", [True, False])
def test_grad_scale_and_found_inf_are_set_for_optimizers_that_read_them(unscaled: bool, extra) -> None:
    def run(scaler) -> tuple[float, list]:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = ByAttributes([weight], lr=1.0)
        for grad in (8.0, math.inf, 8.0):
            scaler.scale(weight.sum())  # torch makes its state here
            weight.grad = torch.full((1,), grad)
            if extra is not None:
                optimizer.grad_scale = extra
            if unscaled:
                scaler.unscale_(optimizer)
                optimizer.grad_scale = 1.0 if extra is None else extra  # torch hands on None otherwise
            scaler.step(optimizer)
            scaler.update()
            assert not hasattr(optimizer, "grad_scale")
            assert not hasattr(optimizer, "found_inf")
        return weight.item(), optimizer.seen

    stock = run(torch.amp.GradScaler("cpu", init_scale=8.0))
    ours = run(GradScaler(init_loss_scaling=8.0, decr_every_n_nan_or_inf=1))
    assert ours == stock
    assert ours[1] == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("unscales", [True, False])
def test_a_step_that_takes_the_scaler_gets_it_and_the_gradients_as_they_are(unscales: bool) -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = ByScaler([weight], lr=1.0)
    optimizer.unscales = unscales
    scaler = GradScaler(init_loss_scaling=8.0, incr_every_n_steps=1)
    weight.grad = torch.full((1,), 8.0)
    assert scaler.step(optimizer) == "GradScaler"
    scaler.update()
    assert weight.item() == -1.0
    assert scaler.get_scale() == 16.0


class AsksScaler(Adagrad):
    """torch's older contract, in full: scale and overflow are read on the device."""

    def __init__(self, params, **options) -> None:
        super().__init__(params, **options)
        self._step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure=None, *, grad_scaler=None) -> None:
        (param,) = self.param_groups[0]["params"]
        scale = grad_scaler._get_scale_async()
        found_inf = sum(t.to(scale.device) for t in grad_scaler._check_inf_per_device(self).values())
        param.sub_(torch.where(found_inf > 0, torch.zeros(1), param.grad / scale))


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop:FutureWarning")
def test_a_step_that_takes_the_scaler_may_ask_it_as_it_asks_torchs() -> None:
    def run(scaler) -> tuple[float, float]:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = AsksScaler([weight], lr=1.0)
        for factor in (1.0, math.inf, 2.0):
            optimizer.zero_grad()
            scaler.scale(weight.sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        return weight.item(), scaler.get_scale()

    stock = run(torch.amp.GradScaler("cpu", init_scale=8.0))
    assert run(GradScaler(init_loss_scaling=8.0, decr_every_n_nan_or_inf=1)) == stock
    assert GradScaler()._get_scale_async() is None


def test_a_step_that_takes_the_scaler_works_on_masters() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = ByScaler([weight], lr=1.0)
    holder = nn.Module()
    holder.weight = weight
    decorate(holder, optimizer, level="O2")
    weight.grad = torch.full((1,), 8.0).half()
    GradScaler(init_loss_scaling=8.0).step(optimizer)
    assert (master_of(weight).item(), weight.item()) == (-1.0, -1.0)


def test_a_preset_grad_scale_of_a_fused_optimizer_is_multiplied_as_torch_does() -> None:
    def run(scaler) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = AdamW(model.parameters(), lr=0.1, eps=1e-2, fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            (scaler.scale(model(torch.randn(4, 3)).square().mean()) * 4.0).backward()
            optimizer.grad_scale = torch.tensor(4.0)
            scaler.step(optimizer)
            scaler.update()
        return [p.detach() for p in model.parameters()]

    stock = run(torch.amp.GradScaler("cpu", init_scale=64.0))
    for ours, theirs in zip(run(GradScaler(init_loss_scaling=64.0)), stock, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# Scenarios of torch's own tests


def test_gradients_broken_between_unscale_and_step_are_used_as_they_are() -> None:
    """The check is of `unscale_`; what the user writes after it is the user's."""
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = GradScaler()
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    scaler.unscale_(optimizer)
    for param in model.parameters():
        param.grad.fill_(math.nan)
    scaler.step(optimizer)
    scaler.update()
    assert all(param.isnan().all() for param in model.parameters())
    assert scaler.skipped_steps == 0


def test_a_scale_that_would_overflow_stays_finite() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = Adam([weight], lr=0.0)
    scaler = GradScaler(init_loss_scaling=1e38, incr_ratio=2.0**4, incr_every_n_steps=1)
    weight.grad = torch.zeros(1)
    scaler.minimize(optimizer)
    assert scaler.get_scale() == pytest.approx(1e38)


def test_two_models_two_optimizers_and_two_losses_skip_each_for_itself() -> None:
    """Both losses reach both models; one gradient of the first model is made infinite in the second iteration."""

    def run(scaler) -> tuple[list[Tensor], float]:
        torch.manual_seed(0)
        models = [nn.Linear(3, 2), nn.Linear(3, 2)]
        optimizers = [SGD(m.parameters(), lr=0.1) for m in models]
        for i in range(4):
            x = torch.randn(4, 3)
            one, two = (m(x).square().mean() for m in models)
            scaler.scale(2 * one + 3 * two).backward(retain_graph=True)
            scaler.scale(4 * one - two).backward()
            if i == 1:
                models[0].weight.grad[0, 0] = math.inf
            scaler.unscale_(optimizers[0])
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
        return [p.detach() for m in models for p in m.parameters()], scaler.get_scale()

    stock, stock_scale = run(torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=2))
    settings = {"init_loss_scaling": 128.0, "incr_every_n_steps": 2, "decr_every_n_nan_or_inf": 1}
    ours, scale = run(GradScaler(**settings))
    assert scale == stock_scale
    for a, b in zip(ours, stock, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_a_gradient_penalty_on_unscaled_gradients_equals_torchs() -> None:
    def run(scaler) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            loss = model(torch.randn(4, 3)).square().mean()
            grads = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
            norm = sum((g / scaler.get_scale()).square().sum() for g in grads).sqrt()
            scaler.scale(loss + norm).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    stock = run(torch.amp.GradScaler("cpu", init_scale=64.0))
    for ours, theirs in zip(run(GradScaler(init_loss_scaling=64.0)), stock, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("clip", ["scaler", "torch", "none"])
@pytest.mark.parametrize("make", [SGD, Adam])
def test_complex_parameters_are_scaled_clipped_and_stepped_as_without_a_scale(make, clip: str) -> None:
    """The own scaler of torch refuses complex gradients on the CPU; the reference is plain training."""

    def run(scaler: GradScaler, clip: str, steps: tuple[bool, ...]) -> tuple[list[Tensor], float]:
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(3, dtype=torch.complex64)), nn.Parameter(torch.randn(2))]
        optimizer = make(weights, lr=0.1)
        norm = torch.zeros(())
        for bad in steps:
            loss = weights[0].abs().square().sum() * (math.inf if bad else 1.0) + weights[1].sum()
            scaler.scale(loss).backward()
            if clip == "scaler":
                norm = scaler.clip_grad_norm_(optimizer, 0.5)
            elif clip == "torch":
                scaler.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(weights, 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [w.detach() for w in weights], norm.item()

    plain, norm = run(GradScaler(enable=False), "none" if clip == "none" else "torch", (False, False))
    ours, our_norm = run(GradScaler(init_loss_scaling=64.0), clip, (False, True, False))
    assert our_norm == pytest.approx(norm, rel=1e-6)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


class Lookahead(Optimizer):
    """As timm's: of torch's class, without its `__init__`, around an optimizer under another name."""

    def __init__(self, inner: Optimizer) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self.inner, self.param_groups, self.defaults, self.state = inner, inner.param_groups, {}, {}

    def step(self, closure=None):
        return self.inner.step(closure)


def test_a_wrapper_without_torchs_init_is_refused_before_anything_changes_and_works_around_a_decorated_optimizer():
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.5)
    with pytest.raises(TypeError, match=r"Lookahead did not call .* the optimizer inside of it first"):
        decorate(model, Lookahead(optimizer), level="O2", dtype="bfloat16")
    assert model.weight.dtype is torch.float32
    decorate(model, optimizer, level="O2", dtype="bfloat16")
    before = master_of(model.weight).clone()
    model.weight.grad = torch.full_like(model.weight, 0.25)
    GradScaler(enable=False).step(Lookahead(optimizer))
    assert torch.equal(master_of(model.weight), before - 0.125)
