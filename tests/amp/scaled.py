"""A half model, gradients for it, and comparisons, for the tests of the scaler."""

import math

import torch
from torch import nn

from mezzo.optim import attach_master, master_of

CLOSE = {"rtol": 1e-5, "atol": 1e-7}  # one rounding more or less in float32


def half_model(seed: int = 1) -> nn.Sequential:
    """A small network with half weights, float32 masters, and a normalisation that stays float32."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    for layer in (model[0], model[2]):
        for param in layer.parameters():
            value = param.detach().clone()
            param.data = value.half()
            attach_master(param, value)
    return model


def set_grads(params, scale: float, seed: int, bad_at: int | None = None) -> None:
    generator = torch.Generator().manual_seed(seed)
    for i, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator).to(param.dtype) * scale
        param.grad = grad.fill_(math.inf) if i == bad_at else grad


def values(params) -> list[torch.Tensor]:
    return [t.detach().clone() for p in params for t in (p, master_of(p)) if t is not None]


def assert_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def wide(param: nn.Parameter) -> torch.Tensor:
    return param.detach() if master_of(param) is None else master_of(param)
