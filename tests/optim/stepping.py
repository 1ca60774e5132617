"""Helpers of the step tests: a half model with masters beside a float32 model with a stock optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mezzo.optim import attach, attach_master

Make = Callable[[list[Any]], Optimizer]


class Pair:
    """Two half parameters with masters and one float32 parameter; the same three in float32 for the stock optimizer."""

    def __init__(self, make: Make, dtype: torch.dtype = torch.float16, channels_last: bool = False) -> None:
        values = [torch.randn(4, 3), torch.randn(2, 3, 2, 2), torch.randn(5)]
        if channels_last:
            values[1] = values[1].to(memory_format=torch.channels_last)
        # The reference starts from its own copies, in the same layout.
        self.stock_params = [nn.Parameter(v.clone()) for v in values]
        self.params = [nn.Parameter(v.to(dtype)) for v in values[:2]] + [nn.Parameter(values[2].clone())]
        self.masters = [attach_master(p, v.clone()) for p, v in zip(self.params[:2], values, strict=False)]
        self.stock = make(self.stock_params)
        self.optimizer = make(self.params)
        self.engine = attach(self.optimizer)

    @property
    def targets(self) -> list[torch.Tensor]:
        return [*self.masters, self.params[2]]

    def set_grads(self, scale: float = 1.0) -> None:
        """Give both the same numbers: what half holds is exactly what the stock side gets."""
        for param, stock in zip(self.params, self.stock_params, strict=True):
            grad = torch.randn_like(stock).to(param.dtype)
            param.grad = grad * scale
            stock.grad = grad.float()

    def assert_equal(self, **tolerance: float) -> None:
        for target, stock in zip(self.targets, self.stock_params, strict=True):
            torch.testing.assert_close(target.detach(), stock.detach(), **tolerance)
        for param, master in zip(self.params, self.masters, strict=False):
            assert torch.equal(param.detach(), master.to(param.dtype))


def snapshot(optimizer: Optimizer, params: list[Any]) -> list[torch.Tensor]:
    """All parameters and state tensors, copied."""
    state = [t for p in params for t in optimizer.state.get(p, {}).values() if isinstance(t, torch.Tensor)]
    return [t.detach().clone() for t in [*params, *state]]


def assert_same_bits(before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new)
