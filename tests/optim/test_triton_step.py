"""The numbers of the Triton tier, on a GPU; and in Triton's interpreter, where `test_triton_interpreted.py` runs this file."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from formulas import Rule, Weight, ulps_between
from torch import nn
from torch.optim import SGD, AdamW
from triton_steps import (
    DEVICE,
    HALVES,
    INTERPRETED,
    RULES,
    exact,
    make_optimizer,
    parameter,
    parameters,
    run_steps,
    scale_of,
    set_grads,
)

from mezzo.amp import GradScaler, auto_cast, decorate
from mezzo.optim import (
    StepRequest,
    attach,
    attach_master,
    engine_of,
    master_of,
    step_tier,
)
from no_waiting import no_waiting

pytestmark = [pytest.mark.usefixtures("in_triton"), *([] if INTERPRETED else [pytest.mark.gpu])]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", RULES)
def test_updates_are_those_of_the_formula_operation_by_operation(name: str, half: torch.dtype) -> None:
    rule = RULES[name]
    params = parameters(half)
    optimizer = make_optimizer(rule, params)
    attach(optimizer)
    weights = [Weight(exact(p).copy()) for p in params]
    for step in range(4):
        set_grads(params, step)
        grads = [p.grad.cpu().float().numpy() * np.float32(1 / 1024) for p in params]
        engine_of(optimizer).step(StepRequest(scale=scale_of()))
        for weight, grad in zip(weights, grads, strict=True):
            weight.step(grad, rule)
    for param, weight in zip(params, weights, strict=True):
        if rule.kind == "SGD":
            np.testing.assert_array_equal(exact(param), weight.value)
        else:
            # A power and two divisions in float64 and back may each round the other way; nothing else differs.
            assert ulps_between(exact(param), weight.value) <= 2
        master = master_of(param)
        assert master is None or torch.equal(param.detach(), master.to(half))
    states = [optimizer.state[p] for p in params]
    if rule.kind != "SGD":
        assert all(state["step"].item() == 4 for state in states)
        for state, weight in zip(states, weights, strict=True):
            np.testing.assert_array_equal(state["exp_avg_sq"].cpu().numpy(), weight.second)


@pytest.mark.parametrize("half", HALVES)
def test_norm_is_that_of_float64_and_clipping_is_part_of_the_update(half: torch.dtype) -> None:
    params = parameters(half)
    before = [exact(p).copy() for p in params]
    optimizer = SGD(params, lr=0.5)
    attach(optimizer)
    set_grads(params, 1)
    engine = engine_of(optimizer)
    verdict = engine.check(scale_of(), max_norm=1.0)
    true = [p.grad.cpu().double() / 1024 for p in params]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in true])).item()
    assert verdict.total_norm.item() == pytest.approx(norm, rel=1e-6)
    assert verdict.clip_coef.item() == pytest.approx(1 / (norm + 1e-6), rel=1e-6)
    engine.step(StepRequest(scale=scale_of(), verdict=verdict, clip_coef=verdict.clip_coef))
    factor = np.float32(1 / 1024) * np.float32(verdict.clip_coef.item())
    for param, old in zip(params, before, strict=True):
        np.testing.assert_array_equal(exact(param), old - param.grad.cpu().float().numpy() * factor * np.float32(0.5))


def test_a_norm_below_the_limit_is_not_stretched() -> None:
    params = parameters()
    attach(optimizer := SGD(params, lr=0.5))
    set_grads(params, 1, scale=1.0)
    assert engine_of(optimizer).check(None, max_norm=1e9).clip_coef.item() == 1.0


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("name", ["sgd momentum", "adamw"])
def test_an_overflow_changes_nothing_and_names_the_first_bad_parameter(name: str, bad: float) -> None:
    params = parameters()
    optimizer = make_optimizer(RULES[name], params)
    attach(optimizer)
    set_grads(params, 0)
    engine_of(optimizer).step(StepRequest(scale=scale_of()))
    before = copy.deepcopy([(exact(p), p.detach().clone(), dict(optimizer.state[p])) for p in params])
    set_grads(params, 1)
    for index in (3, 5):
        params[index].grad[-1] = bad
    request = StepRequest(scale=scale_of())
    engine_of(optimizer).step(request)
    assert request.verdict.found_inf.item() == 1
    assert request.verdict.first_bad.item() == 3
    for param, (value, half, state) in zip(params, before, strict=True):
        np.testing.assert_array_equal(exact(param), value)
        assert torch.equal(param.detach(), half)
        assert all(torch.equal(optimizer.state[param][key], old) for key, old in state.items())
    set_grads(params, 2)
    engine_of(optimizer).step(request := StepRequest(scale=scale_of()))
    assert request.verdict.found_inf.item() == 0
    assert request.verdict.first_bad.item() == -1
    assert not np.array_equal(exact(params[3]), before[3][0])


def test_a_scale_that_pushes_finite_gradients_over_the_top_is_found() -> None:
    param = parameter(torch.ones(4))
    attach(optimizer := SGD([param], lr=1.0))
    param.grad = torch.full((4,), 60000.0, device=DEVICE).half()
    assert engine_of(optimizer).check(scale_of(2.0**-120)).found_inf.item() == 1
    assert engine_of(optimizer).check(scale_of(2.0**-100)).found_inf.item() == 0


def test_each_group_has_its_own_numbers_and_they_may_change() -> None:
    params = parameters()
    optimizer = SGD(
        [{"params": params[:3], "lr": 0.5}, {"params": params[3:], "lr": 0.25, "weight_decay": 0.1}], lr=1.0
    )
    attach(optimizer)
    rules = [Rule("SGD", 0.5)] * 3 + [Rule("SGD", 0.25, weight_decay=0.1)] * (len(params) - 3)
    weights = [Weight(exact(p).copy()) for p in params]
    for step in range(3):
        set_grads(params, step, 1.0)
        if step == 2:
            for group in optimizer.param_groups:
                group["lr"] *= 0.1
            rules = [Rule("SGD", 0.5 * 0.1)] * 3 + [Rule("SGD", 0.25 * 0.1, weight_decay=0.1)] * (len(params) - 3)
        optimizer.step()
        for param, weight, rule in zip(params, weights, rules, strict=True):
            weight.step(param.grad.cpu().float().numpy(), rule)
            np.testing.assert_array_equal(exact(param), weight.value)


def test_a_learning_rate_on_the_device_is_read_there() -> None:
    params = parameters()
    rate = torch.tensor(0.5, device=DEVICE)
    attach(optimizer := SGD(params, lr=rate, foreach=False))
    weights = [Weight(exact(p).copy()) for p in params]
    for step, lr in enumerate((0.5, 0.125)):
        rate.fill_(lr)
        set_grads(params, step, 1.0)
        optimizer.step()
        for param, weight in zip(params, weights, strict=True):
            weight.step(param.grad.cpu().float().numpy(), Rule("SGD", lr))
            np.testing.assert_array_equal(exact(param), weight.value)


def test_gradients_are_neither_rewritten_nor_kept() -> None:
    params = parameters()
    attach(optimizer := AdamW(params, lr=0.1))
    set_grads(params, 0)
    before = [p.grad.clone() for p in params]
    engine_of(optimizer).step(StepRequest(scale=scale_of()))
    assert all(torch.equal(p.grad, old) for p, old in zip(params, before, strict=True))


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_views_at_odd_addresses_are_updated(offset: int) -> None:
    torch.manual_seed(0)
    store = torch.randn(5000).to(DEVICE).half()
    param = nn.Parameter(store[offset : offset + 4099])
    attach_master(param, param.detach().float())
    weight = Weight(exact(param).copy())
    attach(optimizer := SGD([param], lr=0.5))
    grads = torch.randn(2, 5000).to(DEVICE).half()
    outside = torch.cat([store[:offset], store[offset + 4099 :]]).clone()
    for step, shift in enumerate((0, 1)):  # an aligned gradient first, then one that is not
        param.grad = grads[step, shift : shift + 4099]
        optimizer.step()
        weight.step(param.grad.cpu().float().numpy(), Rule("SGD", 0.5))
        np.testing.assert_array_equal(exact(param), weight.value)
    assert torch.equal(torch.cat([store[:offset], store[offset + 4099 :]]), outside)


def test_channels_last_weights_and_gradients_of_another_layout() -> None:
    torch.manual_seed(0)
    values = torch.randn(8, 4, 3, 3)
    param = nn.Parameter(values.to(DEVICE).half().to(memory_format=torch.channels_last))
    attach_master(param, values.to(DEVICE))
    weight = Weight(exact(param).copy())
    attach(optimizer := SGD([param], lr=0.5))
    for contiguous in (False, True):
        grad = torch.randn(8, 4, 3, 3).to(DEVICE).half()
        param.grad = grad if contiguous else grad.to(memory_format=torch.channels_last)
        optimizer.step()
        weight.step(grad.cpu().float().numpy(), Rule("SGD", 0.5))
        np.testing.assert_array_equal(exact(param), weight.value)
        assert param.is_contiguous(memory_format=torch.channels_last)


def test_empty_parameters_and_no_gradients_at_all() -> None:
    params = [parameter(torch.randn(0)), parameter(torch.randn(3))]
    attach(optimizer := SGD(params, lr=0.5))
    optimizer.step()
    params[0].grad = torch.zeros(0, device=DEVICE).half()
    params[1].grad = torch.ones(3, device=DEVICE).half()
    before = exact(params[1]).copy()
    optimizer.step()
    np.testing.assert_array_equal(exact(params[1]), before - np.float32(0.5))


@pytest.mark.parametrize(("optimizer_kind", "kinds", "launches"), [(SGD, 1, 2), (AdamW, 1, 2), (AdamW, 2, 4)])
def test_a_step_is_two_launches_for_each_dtype_however_many_tensors(
    optimizer_kind: Any, kinds: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mezzo.optim import _triton_launch

    count = 10 if INTERPRETED else 100
    params = [parameter(torch.randn(64)) for _ in range(count)]
    params += [parameter(torch.randn(64), None) for _ in range(count * (kinds - 1))]
    attach(optimizer := optimizer_kind(params, lr=0.1))
    counted: list[str] = []
    launch = _triton_launch.launch
    monkeypatch.setattr(
        _triton_launch,
        "launch",
        lambda kernel, *args, **more: (counted.append(str(kernel)), launch(kernel, *args, **more)),
    )
    scaler = GradScaler()
    for step in range(2):
        set_grads(params, step)
        counted.clear()
        scaler.scale(torch.ones((), device=DEVICE))
        scaler.step(optimizer)
        assert len(counted) == launches
        scaler.update()
        assert len(counted) == launches + 1


def test_autograd_notices_that_a_weight_changed_after_the_forward() -> None:
    param = parameter(torch.randn(4))
    attach(optimizer := SGD([param], lr=0.1))
    x = torch.ones(4, device=DEVICE).half().requires_grad_()
    loss = (param * x).sum()
    param.grad = torch.ones(4, device=DEVICE).half()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_state_goes_to_the_stock_optimizer_and_back(kind: Any) -> None:
    more = {"momentum": 0.9} if kind is SGD else {}
    params = parameters()
    attach(optimizer := kind(params, lr=0.01, **more))
    run_steps(optimizer, params, range(3))
    stock_params = [nn.Parameter(torch.tensor(exact(p)).to(DEVICE)) for p in params]
    stock = kind(stock_params, lr=0.01, **more)
    stock.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    set_grads(params, 3, 1.0)
    for param, stock_param in zip(params, stock_params, strict=True):
        stock_param.grad = param.grad.float()
    stock.step()
    back_params = [
        parameter(p.detach().clone(), None if master_of(old) is None else torch.float16)
        for p, old in zip(stock_params, params, strict=True)
    ]
    attach(back := kind(back_params, lr=0.01, **more))
    back.load_state_dict(copy.deepcopy(stock.state_dict()))
    run_steps(optimizer, params, range(3, 5))
    run_steps(back, back_params, range(4, 5))
    for param, back_param in zip(params, back_params, strict=True):
        # One step of five is torch's, whose kernel leaves out some roundings.
        np.testing.assert_allclose(exact(param), exact(back_param), rtol=2e-6, atol=2e-7)


def test_the_scale_follows_the_state_machine_of_the_other_tier() -> None:
    """10 000 random patterns of overflow; the other tier is held to the documents by a test of its own."""
    rng = np.random.default_rng(0)
    steps = 60 if INTERPRETED else 10_000
    runs: dict[str, list[tuple[float, ...]]] = {}
    pattern = rng.random(steps) < 0.3
    for tier in ("triton", "fused"):
        with step_tier(tier):
            scaler = GradScaler(
                incr_every_n_steps=3, init_loss_scaling=8.0, max_skips_at_floor=None, min_loss_scaling=0.5
            )
            param = parameter(torch.ones(2))
            attach(optimizer := SGD([param], lr=0.0))
            scaler.scale(torch.ones((), device=DEVICE))
            good, bad = torch.ones(2, device=DEVICE).half(), torch.full((2,), float("inf"), device=DEVICE).half()
            seen = []
            for is_bad in pattern:
                param.grad = bad if is_bad else good
                scaler.step(optimizer)
                scaler.update()
                seen.append(scaler._state.scale.clone())
            runs[tier] = torch.stack(seen).tolist()
            assert scaler.state_dict()["skipped_steps"] == pattern.sum()
            scaler.flush()
            assert scaler.skipped_steps == pattern.sum()
    assert runs["triton"] == runs["fused"]


@pytest.mark.skipif(INTERPRETED, reason="a CPU has nothing to wait for")
@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_ten_steps_never_wait_for_the_device(kind: Any, level: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 8)).to(DEVICE)
    optimizer = kind(model.parameters(), lr=1e-3)
    decorate(model, optimizer, level=level)
    scaler = GradScaler()
    x, y = torch.randn(32, 64, device=DEVICE), torch.randn(32, 8, device=DEVICE)
    before = [exact(p).copy() for p in model.parameters()]

    def step() -> None:
        with auto_cast(level=level):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    step()  # kernels are built and loaded
    with no_waiting():
        for number in range(10):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 / (number + 1)
            step()
    assert all(not np.array_equal(exact(p), old) for p, old in zip(model.parameters(), before, strict=True))


def test_optimizers_that_are_not_written_here_take_the_generic_way() -> None:
    param = parameter(torch.ones(3))
    attach(optimizer := torch.optim.RMSprop([param], lr=0.1))
    param.grad = torch.ones(3, device=DEVICE).half()
    optimizer.step()
    assert engine_of(optimizer).last_plan is None
    assert (exact(param) < 1).all()
