"""bfloat16 optimizer state in the Triton tier, on a GPU; `test_triton_interpreted.py` runs this file in the interpreter."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from triton_steps import DEVICE, INTERPRETED, RULES, make_optimizer, parameters, scale_of, set_grads

from mezzo.optim import StepRequest, attach, engine_of, master_of, step_tier
from mezzo.optim._rounding import store_rounded

pytestmark = [pytest.mark.usefixtures("in_triton"), *([] if INTERPRETED else [pytest.mark.gpu])]

MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq")


def moments(optimizer: Optimizer) -> list[Tensor]:
    return [state[key] for state in optimizer.state.values() for key in MOMENTS if key in state]


def numbers(value: Tensor) -> Tensor:
    """Return bfloat16 numbers in order: neighbours differ by 1."""
    bits = value.view(torch.int16).to(torch.int32)
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("name", ["sgd momentum", "sgd all", "adam", "adamw"])
def test_state_is_rounded_as_by_torch(name: str, compact: bool) -> None:
    """One step from zero state: both tiers compute the same moments, and draw the same numbers for them."""
    runs = []
    for tier in ("triton", "fused"):
        params = parameters(compact=compact)
        attach(optimizer := make_optimizer(RULES[name], params), state_dtype=torch.bfloat16)
        set_grads(params, 0)
        with step_tier(tier):
            engine_of(optimizer).step(StepRequest(scale=scale_of()))
            assert (engine_of(optimizer).last_plan is not None) == (tier == "triton")
        runs.append(optimizer)
    found, wanted = (torch.cat(list(map(torch.flatten, moments(optimizer)))) for optimizer in runs)
    assert found.dtype is torch.bfloat16
    # torch's kernels may fuse a product and a sum, so a moment may differ in its last bit of 24, which changes the rounding
    # of one number in 2^15 or so. Other random numbers would change about half of them.
    assert (found != wanted).double().mean().item() < 1e-3
    assert (numbers(found) - numbers(wanted)).abs().max().item() <= 1


@pytest.mark.parametrize("name", ["sgd momentum", "adamw"])
def test_steps_count_on_the_device_and_draw_new_numbers(name: str) -> None:
    param = nn.Parameter(torch.zeros(2048, device=DEVICE))
    attach(optimizer := make_optimizer(RULES[name], [param]), state_dtype=torch.bfloat16)
    seen = []
    for step in range(1, 4):
        for value in moments(optimizer):
            value.zero_()
        param.grad = torch.full_like(param, 1.003)
        optimizer.step()
        assert optimizer.state[param]["step"].item() == step
        seen.append(moments(optimizer)[0].clone())
        assert 0 < (seen[-1] == seen[-1].max()).sum().item() < 2048, "both neighbours occur"
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


@pytest.mark.parametrize("name", ["sgd momentum", "adamw"])
def test_an_overflow_changes_no_bit(name: str) -> None:
    params = parameters()
    attach(optimizer := make_optimizer(RULES[name], params), state_dtype=torch.bfloat16)
    set_grads(params, 0)
    engine_of(optimizer).step(StepRequest(scale=scale_of()))
    before = [value.clone() for state in optimizer.state.values() for value in state.values()]
    set_grads(params, 1)
    params[2].grad[-1] = torch.inf
    engine_of(optimizer).step(StepRequest(scale=scale_of()))
    after = [value for state in optimizer.state.values() for value in state.values()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_float32_and_bfloat16_state_start_with_the_same_update() -> None:
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        params = parameters()
        attach(optimizer := make_optimizer(RULES["adamw"], params), state_dtype=dtype)
        set_grads(params, 0)
        engine_of(optimizer).step(StepRequest(scale=scale_of()))
        results.append([param.detach() if master_of(param) is None else master_of(param) for param in params])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("first", [0, 1, 6])
def test_shards_are_rounded_by_triton_as_by_torch(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mezzo.optim._rounding._first_element", lambda param: first)
    values = torch.randn(1001).to(DEVICE)
    values[7], values[8] = torch.nan, torch.inf
    step = torch.tensor(5.0, device=DEVICE)
    results: list[list[Tensor]] = []
    for tier in ("triton", "fused"):
        stored = [torch.zeros(1001, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
        with step_tier(tier):
            store_rounded(stored, [values, values * 3], values, step, 4)
        results.append([each.view(torch.int16) for each in stored])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_momentum_of_a_new_group_counts_its_own_steps() -> None:
    params = [nn.Parameter(torch.zeros(40, device=DEVICE)) for _ in range(2)]
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    attach(optimizer := SGD([params[0]], **options), state_dtype=torch.bfloat16)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    optimizer.add_param_group({"params": [params[1]]})
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()
    assert [optimizer.state[param]["step"].item() for param in params] == [2, 1]
