"""Listeners of module calls: what they are shown, and that nothing is left behind."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mezzo.record import ModuleListener, listening_to_modules


class Notes(ModuleListener):
    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def enter_module(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.events.append(("enter", path))

    def leave_module(self, path: str, module: nn.Module, output: Any) -> None:
        self.events.append(("leave", path))

    def accumulate_grad(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.events.append(("grad", name))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_calls_and_gradients_come_in_order_and_a_recomputed_call_only_once() -> None:
    model, notes = Checkpointed(), Notes()
    with listening_to_modules(model, notes):
        model(torch.ones(2, 4)).sum().backward()
    calls = [("enter", ""), ("enter", "inner"), ("leave", "inner"), ("leave", "")]
    assert notes.events == [*calls, ("grad", "inner.weight")]
    model(torch.ones(2, 4)).sum().backward()
    assert len(notes.events) == 5
    assert hooks_of(model) == 0


def test_a_call_that_raises_has_no_result_and_leaves_no_hook() -> None:
    model, notes = nn.Sequential(nn.Linear(4, 4)), Notes()
    with pytest.raises(RuntimeError, match="shapes"), listening_to_modules(model, notes):
        model(torch.ones(2, 3))
    assert notes.events == [("enter", ""), ("enter", "0")]
    assert hooks_of(model) == 0
