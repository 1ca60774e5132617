"""Optimizers and LR schedulers use the attributes whose names mezzo knows."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from mezzo._torch import optimizers, patches


def params() -> list[nn.Parameter]:
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    return [param]


def test_a_scheduler_wraps_a_step_and_looks_for_its_call() -> None:
    optimizer = SGD(params(), lr=0.1)
    assert not optimizers.is_wrapped_by_scheduler(optimizer.step)
    scheduler = StepLR(optimizer, 1)
    assert optimizers.is_wrapped_by_scheduler(optimizer.step), "LR schedulers mark the steps that they wrap otherwise"
    setattr(optimizer, optimizers.STEP_WAS_CALLED, True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # 'lr_scheduler.step() before optimizer.step()'
        scheduler.step()


def test_a_marked_step_is_not_wrapped_again() -> None:
    optimizer = SGD(params(), lr=0.1)

    def step(*args: Any) -> None: ...

    optimizers.mark_as_wrapped(step)
    optimizer.step = step
    StepLR(optimizer, 1)
    assert optimizer.step is step


def test_fused_optimizers_say_that_they_skip_by_themselves() -> None:
    assert getattr(AdamW(params(), fused=True), optimizers.SUPPORTS_SCALING) is True
    assert not getattr(AdamW(params()), optimizers.SUPPORTS_SCALING, False)


def test_every_optimizer_has_hooks_of_its_state_dict() -> None:
    assert optimizers.STATE_DICT_HOOKS in SGD(params(), lr=0.1).__dict__


def test_loading_asks_the_wrapped_function_with_the_parameter_first() -> None:
    seen: list[Any] = []

    def around(load: Callable[..., Any]) -> Callable[..., Any]:
        def run(param: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(param)
            return load(param.double(), value, *args, **kwargs)

        return run

    optimizer = SGD(params(), lr=0.1, momentum=0.9)
    optimizer.step()
    name = "_process_value_according_to_param_policy"
    before = Optimizer.__dict__[name]
    optimizers.wrap_loading_of_state(around)
    try:
        optimizer.load_state_dict(optimizer.state_dict())
    finally:
        setattr(Optimizer, name, before)
        patches._wrapped.discard((id(Optimizer), name, around))
    (param,) = optimizer.param_groups[0]["params"]
    assert seen == [param], "loading no longer goes through the function that mezzo wraps"
    assert optimizer.state[param]["momentum_buffer"].dtype is torch.float64
