"""Compact masters in the Triton tier, on a GPU; and where `test_triton_interpreted.py` runs this file, in the interpreter."""

import numpy as np
import pytest
import torch
from formulas import Weight, ulps_between
from torch import nn
from triton_steps import DEVICE, INTERPRETED, RULES, exact, make_optimizer, parameters, scale_of, set_grads

from mezzo.optim import StepRequest, attach, attach_master, engine_of, master_of, stored_master
from mezzo.optim._compact import join, split

pytestmark = [pytest.mark.usefixtures("in_triton"), *([] if INTERPRETED else [pytest.mark.gpu])]

HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", RULES)
def test_updates_are_those_of_the_formula_split_after_each_step(name: str, half: torch.dtype) -> None:
    rule = RULES[name]
    params = parameters(half, compact=True)
    attach(optimizer := make_optimizer(rule, params))
    weights = [Weight(exact(p).copy()) for p in params]
    for step in range(4):
        set_grads(params, step)
        grads = [p.grad.cpu().float().numpy() * np.float32(1 / 1024) for p in params]
        engine_of(optimizer).step(StepRequest(scale=scale_of()))
        for param, weight, grad in zip(params, weights, grads, strict=True):
            weight.step(grad, rule)
            if stored_master(param) is not None:
                weight.value = join(*split(torch.from_numpy(weight.value), half)).numpy()
    assert engine_of(optimizer).last_plan is not None
    for param, weight in zip(params, weights, strict=True):
        if rule.kind == "SGD":
            np.testing.assert_array_equal(exact(param), weight.value)
        else:
            # As without compact masters; what is below 2**-16 in float16 has no finer step than 2**-39.
            close = np.abs(exact(param) - weight.value) <= 2.0**-39
            assert ulps_between(np.where(close, weight.value, exact(param)), weight.value) <= 2
        if stored_master(param) is not None:
            assert torch.equal(param.detach(), split(master_of(param), half)[0])


@pytest.mark.parametrize("half", HALVES)
def test_numbers_of_every_kind_are_split_as_torch_splits_them(half: torch.dtype) -> None:
    bits = np.concatenate([
        np.arange(0, 2**32, 2**22 - 3 if INTERPRETED else 2**13 - 3, dtype=np.uint64),
        ((np.arange(2**16, dtype=np.uint64) << 16) + 0x8000)[:: 256 if INTERPRETED else 1],
    ])  # fmt: skip
    value = torch.from_numpy(bits.astype(np.uint32).view(np.float32).copy()).to(DEVICE)
    param = nn.Parameter(torch.zeros_like(value, dtype=half))
    attach_master(param, torch.zeros_like(value), compact=True)
    attach(optimizer := torch.optim.SGD([param], lr=1.0))
    param.grad_dtype = None
    param.grad = -value  # 0 - 1 * -x
    with np.errstate(invalid="ignore"):
        optimizer.step()
    wanted, rest = split(0.0 - -value, half)
    torch.testing.assert_close(param.detach(), wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(stored_master(param), rest)
    before = master_of(param).clone()
    param.grad = torch.zeros_like(value)
    optimizer.step()  # read and written again
    torch.testing.assert_close(master_of(param), before, rtol=0, atol=0, equal_nan=True)


def test_an_overflow_changes_no_bit() -> None:
    params = parameters(compact=True)
    attach(optimizer := make_optimizer(RULES["adamw"], params))
    before = [(p.detach().clone(), None if stored_master(p) is None else stored_master(p).clone()) for p in params]
    set_grads(params, 1)
    params[3].grad[-1] = float("nan")
    engine_of(optimizer).step(request := StepRequest(scale=scale_of()))
    assert request.verdict.found_inf.item() == 1
    for param, (half, rest) in zip(params, before, strict=True):
        assert torch.equal(param.detach(), half)
        assert rest is None or torch.equal(stored_master(param), rest)


def test_full_and_compact_masters_in_one_optimizer() -> None:
    params = [*parameters(), *parameters(seed=1, compact=True)]
    rule = RULES["sgd all"]
    attach(optimizer := make_optimizer(rule, params))
    weights = [Weight(exact(p).copy()) for p in params]
    set_grads(params, 0, 1.0)
    optimizer.step()
    for param, weight in zip(params, weights, strict=True):
        weight.step(param.grad.cpu().float().numpy(), rule)
        if stored_master(param) is not None and stored_master(param).dtype is torch.int16:
            weight.value = join(*split(torch.from_numpy(weight.value), torch.float16)).numpy()
        np.testing.assert_array_equal(exact(param), weight.value)
