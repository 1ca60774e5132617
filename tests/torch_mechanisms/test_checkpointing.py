"""Both forms of activation checkpointing run the bound function when they compute a second time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor

from mezzo._torch.checkpointing import bind_checkpointed_functions

calls: list[str] = []


def bind(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        calls.append(getattr(function, "__name__", ""))
        return function(*args, **kwargs)

    return run if getattr(function, "__name__", "") == "checkpointed" else function


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_second_forward_is_bound(use_reentrant: bool) -> None:
    bind_checkpointed_functions(bind)  # stays: other functions come back as they are
    bind_checkpointed_functions(bind)

    def checkpointed(x: Tensor) -> Tensor:
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    out = torch_checkpoint.checkpoint(checkpointed, x, use_reentrant=use_reentrant)
    calls.clear()
    out.sum().backward()
    assert calls == ["checkpointed"], "torch.utils.checkpoint takes another way: the policy does not go along"
    assert torch.equal(x.grad, torch.ones(2).cos())
