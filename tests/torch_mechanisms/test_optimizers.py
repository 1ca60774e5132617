"""Optimizers and LR schedulers use the attributes whose names mezzo knows."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

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


class Noting(SGD):
    """Returns the arguments of its steps."""

    def step(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return args, kwargs


def by_torch(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    return optimizer.step(*args, **kwargs)


def by_mezzo(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    return optimizers.call_between_step_hooks(optimizer, lambda _request, *both: both, None, args, kwargs)


def record_of_step(step: Callable[..., Any], replaced: Any) -> tuple[Any, list[Any], set[str]]:
    """Take a step with all kinds of hooks; return its result, what the hooks saw, and the profiler's names."""
    optimizer, seen = Noting(params(), lr=0.1), []

    def hook(name: str, result: Any = None) -> Callable[..., Any]:
        return lambda _optimizer, args, kwargs: (seen.append((name, args[1:], dict(kwargs))), result)[1]

    handles = [
        register_optimizer_step_pre_hook(hook("global pre")),
        register_optimizer_step_post_hook(hook("global post")),
    ]
    optimizer.register_step_pre_hook(hook("pre", replaced and ((optimizer, *replaced[0]), replaced[1])))
    optimizer.register_step_pre_hook(hook("second pre"))
    optimizer.register_step_post_hook(hook("post"))
    try:
        with torch.profiler.profile() as profile:
            result = step(optimizer, 1, closure=2)
    finally:
        for handle in handles:
            handle.remove()
    return result, seen, {event.name for event in profile.events() if "step" in event.name}


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11 and 2.12
@pytest.mark.parametrize("replaced", [None, ((3, 4), {"other": 5})])
def test_mezzo_calls_step_hooks_and_the_profiler_as_torch_does(replaced: Any) -> None:
    ours, torchs = record_of_step(by_mezzo, replaced), record_of_step(by_torch, replaced)
    assert ours == torchs
    assert [name for name, *_ in ours[1]] == ["global pre", "pre", "second pre", "post", "global post"]
    assert ours[2] == {"Optimizer.step#Noting.step"}


@pytest.mark.parametrize("step", [by_torch, by_mezzo])
def test_a_pre_hook_that_returns_neither_none_nor_arguments_is_refused(step: Callable[..., Any]) -> None:
    optimizer = Noting(params(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: ["not arguments"])
    with pytest.raises(RuntimeError, match="not arguments"):
        step(optimizer)


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
