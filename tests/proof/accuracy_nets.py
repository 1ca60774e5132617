"""Small networks with planted faults, and the runs that are made of them."""

from typing import Any

import torch
from torch import Tensor, nn

from mezzo.proof import AccuracyRun, run_at


class Energy(nn.Module):
    """Squares that are larger than float16 holds."""

    def forward(self, x: Tensor) -> Tensor:
        squares = (300 * x).square()
        return squares / squares.sum(-1, keepdim=True)


class Cancel(nn.Module):
    """The identity, computed as a small difference of large numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1000 - x * 999


class Large(nn.Module):
    """A product of float16's that no float16 holds."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 300 * 300


def network(**middle: nn.Module) -> nn.Module:
    """Return encoder, what is planted, and head."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("encoder", nn.Linear(16, 16))
    for name, module in middle.items():
        model.add_module(name, module)
    model.add_module("head", nn.Linear(16, 4))
    return model


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(32, 16, generator=generator), torch.randint(4, (32,), generator=generator)


def cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, labels)


def run(model: nn.Module, level: str = "O0", loss_fn: Any = cross_entropy, **options: Any) -> AccuracyRun:
    return run_at(model, *batch(), loss_fn, level=level, **options)
