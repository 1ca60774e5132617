"""Small networks and steps at level O3, emulated."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from mezzo.amp import Fp8Recipe, GradScaler, auto_cast, decorate
from mezzo.amp.debugging import OperatorStats

RECIPE = Fp8Recipe(emulate=True, min_width=0, min_size=0)
FP8 = "mezzo::fp8_linear"


def layers(seed: int = 0) -> nn.Sequential:
    """Return five linear layers with Xavier weights, so that what goes through them stays near 1."""
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential()
    for inputs, outputs in ((32, 32), (32, 48), (48, 64), (64, 32), (32, 16)):
        layer = nn.Linear(inputs, outputs)
        nn.init.xavier_uniform_(layer.weight, generator=generator)
        nn.init.zeros_(layer.bias)
        net.extend((layer, nn.ReLU()))
    return net[:-1]


def batch(rows: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 32, generator=generator), torch.randn(rows, 16, generator=generator)


def decorated(
    net: nn.Module | None = None, dtype: str = "bfloat16", level: str = "O3", **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a network and its SGD with momentum, decorated."""
    net = layers() if net is None else net
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    of_o3 = {"fp8": RECIPE} if level == "O3" else {}
    decorate(net, optimizer, level=level, dtype=dtype, **of_o3, **options)
    return net, optimizer


def region(dtype: str = "bfloat16", recipe: Fp8Recipe = RECIPE) -> auto_cast:
    return auto_cast(level="O3", dtype=dtype, fp8=recipe)


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    dtype: str = "bfloat16",
    scaler: GradScaler | None = None,
    level: str = "O3",
) -> list[float]:
    """Train on one batch; return the losses."""
    x, target = batch()
    scaler = scaler or GradScaler(enable=False)
    losses = []
    for _ in range(steps):
        with region(dtype) if level == "O3" else auto_cast(level=level, dtype=dtype):
            loss = mse_loss(net(x), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def calls(stats: OperatorStats, op: str = FP8) -> int:
    """Return how often an operator was called, whatever its dtypes."""
    return sum(stats.totals().get(op, ()))


def weights(net: nn.Module) -> list[Tensor]:
    """Return the parameters as they are, copied."""
    return [param.detach().clone() for param in net.parameters()]


def are_equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
