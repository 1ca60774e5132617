"""The backward of a custom Function goes through the wrapped method."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.function import BackwardCFunction

from mezzo._torch import patches
from mezzo._torch.autograd_functions import wrap_function_backwards


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark = "of the forward"
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no gradient")


def test_an_error_of_a_backward_passes_the_wrapper_with_its_context() -> None:
    seen: list[Any] = []

    def around(apply: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any) -> Any:
            try:
                return apply(self, *args)
            except RuntimeError:
                seen.append(self.mark)
                raise

        return run

    before = BackwardCFunction.apply
    wrap_function_backwards(around)
    try:
        with pytest.raises(RuntimeError, match="no gradient"):
            Failing.apply(torch.ones(1, requires_grad=True)).backward()
    finally:
        BackwardCFunction.apply = before
        patches._wrapped.discard((id(BackwardCFunction), "apply", around))
    assert seen == ["of the forward"], "autograd no longer calls BackwardCFunction.apply"
