"""`optimizer.step` is ours and still behaves as a torch optimizer's step to everything around it."""

import copy
import types

import pytest
import torch
from stepping import Pair
from torch import nn
from torch.optim import LBFGS, SGD, Adam, RMSprop
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from mezzo.amp import GradScaler
from mezzo.optim import StepRequest, attach, attach_master, describe_parameter, engine_of, master_of, remember_names


def half_parameter(value: float = 1.0) -> nn.Parameter:
    param = nn.Parameter(torch.full((2,), value).half())
    attach_master(param, torch.full((2,), value))
    return param


def test_attach_keeps_object_and_class_and_is_idempotent() -> None:
    optimizer = SGD([half_parameter()], lr=0.1)
    engine = attach(optimizer)
    step = optimizer.step
    assert attach(optimizer) is engine is engine_of(optimizer)
    assert isinstance(step, types.MethodType)
    assert optimizer.step == step
    assert type(optimizer) is SGD


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=1.0), lambda p: RMSprop(p, lr=1.0)])
@pytest.mark.parametrize("before", [True, False])
def test_lr_scheduler_built_before_or_after_steps_without_a_warning(before: bool, make) -> None:
    param = half_parameter()
    optimizer = make([param])
    if before:
        scheduler = StepLR(optimizer, 1, gamma=0.5)
    attach(optimizer)
    if not before:
        scheduler = StepLR(optimizer, 1, gamma=0.5)
    for _ in range(2):
        param.grad = torch.full((2,), 1e-4).half()
        optimizer.step()
        scheduler.step()  # warnings are errors
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert master_of(param).tolist() != param.tolist()  # ours ran: half cannot hold the small update


def test_scheduler_still_warns_if_it_steps_first() -> None:
    optimizer = SGD([half_parameter()], lr=1.0)
    attach(optimizer)
    scheduler = StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before `optimizer.step\(\)"):
        scheduler.step()


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=1.0), lambda p: RMSprop(p, lr=1.0)])
@pytest.mark.parametrize("attached", [True, False])
def test_local_and_global_step_hooks_run_once_around_the_update_and_after_the_check(
    attached: bool, make, monkeypatch
) -> None:
    param = half_parameter() if attached else nn.Parameter(torch.ones(2))
    optimizer, scaler = make([param]), GradScaler()
    engine = attach(optimizer) if attached else engine_of(optimizer)
    calls: list[str] = []
    check = engine._check
    monkeypatch.setattr(engine, "_check", lambda *args: (calls.append("check"), check(*args))[1])
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("global post")),
    ]
    try:
        scaler.scale(param.float().sum()).backward()
        scaler.step(optimizer)
    finally:
        for handle in handles:
            handle.remove()
    assert calls == ["check", "global pre", "pre", "post", "global post"]  # as torch's own scaler does


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.01), lambda p: RMSprop(p, lr=0.01)])
def test_closure_is_evaluated_and_its_loss_returned(make) -> None:
    param = half_parameter()
    optimizer = make([param])
    attach(optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (param.float() ** 2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert optimizer.step(closure).item() < 2.0


def test_lbfgs_reaches_the_minimum_through_half_parameters() -> None:
    param = half_parameter(3.0)
    optimizer = LBFGS([param], lr=1.0, max_iter=10, line_search_fn="strong_wolfe")
    attach(optimizer)
    target = torch.tensor([0.5, -0.25])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = ((param.float() - target) ** 2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.testing.assert_close(param.detach().float(), target, rtol=0, atol=2e-3)
    assert optimizer.param_groups[0]["params"][0] is param


def test_lbfgs_without_closure_is_refused_with_advice() -> None:
    optimizer = LBFGS([half_parameter()])
    attach(optimizer)
    with pytest.raises(RuntimeError, match=r"LBFGS .*without a scaler"):
        GradScaler().step(optimizer)


def test_exception_in_the_optimizers_own_step_leaves_its_parameters_in_place() -> None:
    class Broken(SGD):
        def step(self, closure=None):
            assert self.param_groups[0]["params"][0].dtype == torch.float32
            raise KeyError("broken")

    param = half_parameter()
    optimizer = Broken([param], lr=1.0, momentum=0.9)
    optimizer.state[param]["momentum_buffer"] = torch.ones(2)
    attach(optimizer)
    param.grad = grad = torch.ones(2).half()
    with pytest.raises(KeyError, match="broken"):
        optimizer.step()
    assert optimizer.param_groups[0]["params"][0] is param
    assert list(optimizer.state) == [param] or next(iter(optimizer.state)) is param
    assert param.grad is grad
    assert master_of(param).grad is None
    assert not master_of(param).requires_grad


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("how", ["step", "scaled step", "closure", "closure raises"])
def test_masters_and_half_weights_agree_after_a_step_that_raised_half_way(how: str, compact: bool) -> None:
    class BreaksAtTheSecond(SGD):
        def step(self, closure=None):
            if closure is not None:
                closure()
            with torch.no_grad():
                for number, param in enumerate(self.param_groups[0]["params"]):
                    if number == 1:
                        if how == "closure raises":
                            closure()
                        raise KeyError("broken")
                    param.sub_(param.grad, alpha=self.param_groups[0]["lr"])

    params = [nn.Parameter(torch.ones(2).half()) for _ in range(2)]
    for param in params:
        attach_master(param, torch.ones(2), compact=compact)
        param.grad = torch.ones(2).half()
    optimizer = BreaksAtTheSecond(params, lr=0.3)
    attach(optimizer)
    evaluations: list[int] = []

    def closure() -> None:
        evaluations.append(1)
        if how == "closure raises" and len(evaluations) > 1:
            raise KeyError("broken")

    steps = {
        "step": optimizer.step,
        "scaled step": lambda: engine_of(optimizer).step(StepRequest(scale=torch.tensor(1.0))),
    }
    with pytest.raises(KeyError, match="broken"):
        steps.get(how, lambda: optimizer.step(closure))()
    for param, value in zip(params, (0.7, 1.0), strict=True):  # as far as it went, as a stock optimizer
        torch.testing.assert_close(master_of(param), torch.full((2,), value))
        assert torch.equal(param.detach(), master_of(param).half())
    assert optimizer.param_groups[0]["params"][0] is params[0]


def test_a_step_that_somebody_put_on_the_instance_is_still_called() -> None:
    param = half_parameter()
    optimizer = SGD([param], lr=1e-4)
    calls: list[torch.dtype] = []
    own = optimizer.step

    def counted(*args):
        calls.append(optimizer.param_groups[0]["params"][0].dtype)
        return own(*args)

    optimizer.step = counted
    attach(optimizer)
    param.grad = torch.ones(2).half()
    optimizer.step()
    assert calls == [torch.float32]
    torch.testing.assert_close(master_of(param), torch.full((2,), 1 - 1e-4))


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=2.0**-12), lambda p: RMSprop(p, lr=2.0**-12, alpha=0.0)])
def test_a_wrapper_from_after_attach_is_called_around_scaled_clipped_steps_and_not_in_skipped_ones(make) -> None:
    param = half_parameter()
    optimizer, scaler = make([param]), GradScaler(init_loss_scaling=8.0)
    attach(optimizer)
    own, hooks, calls = optimizer.step, [], []
    optimizer.register_step_pre_hook(lambda _optimizer, args, kwargs: hooks.append((len(args), kwargs)))

    def counted(closure=None):  # takes what torch's steps take, and nothing else
        calls.append(closure)
        return own(closure)

    optimizer.step = counted
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(param.float().sum() * factor).backward()
        scaler.clip_grad_norm_(optimizer, 2.0**0.5 / 2)
        scaler.step(optimizer)
        scaler.update()
    assert calls == [None, None]
    assert hooks == [(2, {}), (2, {})]
    size = 0.5 if isinstance(optimizer, SGD) else 1.0  # RMSprop without a memory follows the sign
    torch.testing.assert_close(master_of(param), torch.full((2,), 1 - 2 * size * 2.0**-12))
    param.grad = torch.full((2,), 1.0).half()
    optimizer.step()  # without the scaler: neither scale nor clipping is left over
    torch.testing.assert_close(master_of(param), torch.full((2,), 1 - (2 * size + 1) * 2.0**-12))


def test_a_pre_hook_may_replace_the_arguments_of_a_scaled_step() -> None:
    class Noting(SGD):
        def step(self, closure=None, *, note="none"):
            return note

    param = half_parameter()
    optimizer = Noting([param], lr=1.0)
    optimizer.register_step_pre_hook(lambda _optimizer, args, _kwargs: (args, {"note": "by the hook"}))
    scaler = GradScaler()
    scaler.scale(param.float().sum()).backward()
    assert scaler.step(optimizer) == "by the hook"


class Asked(TorchFunctionMode):
    """Notes the names of the torch-level calls that it is asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_zero_grad_drops_gradients_without_asking_a_function_mode() -> None:
    params = [half_parameter(), half_parameter()]
    optimizer = SGD(params, lr=0.1)
    attach(optimizer)
    params[0].grad = torch.ones(2).half()
    with Asked() as asked:
        optimizer.zero_grad()
    assert asked.names == []
    assert [param.grad for param in params] == [None, None]
    assert "zero_grad" not in copy.deepcopy(optimizer).__dict__


@pytest.mark.parametrize("call", [lambda o: o.zero_grad(False), lambda o: o.zero_grad(set_to_none=False)])
def test_zero_grad_to_zeros_is_seen_by_a_function_mode(call) -> None:
    param = half_parameter()
    optimizer = SGD([param], lr=0.1)
    attach(optimizer)
    param.grad = grad = torch.ones(2).half()
    with Asked() as asked:
        call(optimizer)
    assert param.grad is grad
    assert grad.tolist() == [0, 0]
    assert "zero_" in asked.names


def test_a_zero_grad_of_the_users_own_is_kept() -> None:
    class Keeping(SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            calls.append("class")

    calls: list[str] = []
    optimizers = [Keeping([half_parameter()], lr=0.1), SGD([half_parameter()], lr=0.1)]
    optimizers[1].zero_grad = lambda set_to_none=True: calls.append("instance")
    for optimizer in optimizers:
        attach(optimizer)
        optimizer.zero_grad()
    assert calls == ["class", "instance"]


def test_half_state_from_before_is_widened() -> None:
    param = nn.Parameter(torch.ones(2).half())
    optimizer = SGD([param], lr=1.0, momentum=0.9)
    param.grad = torch.ones(2).half()
    optimizer.step()
    attach_master(param, torch.ones(2))
    attach(optimizer)
    assert optimizer.state[param]["momentum_buffer"].dtype == torch.float32


def test_deepcopied_optimizer_is_a_plain_one() -> None:
    pair = Pair(lambda p: Adam(p, lr=0.1))
    other = copy.deepcopy(pair.optimizer)
    assert "_mezzo_engine" not in other.__dict__
    assert "step" not in other.__dict__


def test_parameters_are_described_by_torchs_names_then_remembered_ones_then_place() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    plain = SGD([{"params": model[0].parameters()}, {"params": model[1].parameters()}], lr=1.0)
    assert describe_parameter(plain, 2) == "parameter #0 of group 1, shape (1, 3)"
    named = SGD(model.named_parameters(), lr=1.0)
    assert describe_parameter(named, 2) == "'1.weight'"
    remember_names(nn.ModuleDict({"net": model}))
    assert describe_parameter(plain, 3) == "'net.1.bias'"
    assert describe_parameter(plain, 9) == "an unknown parameter"
