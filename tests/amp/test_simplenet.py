"""The guide's nine-layer network: mixed precision with masters learns what float32 learns; without masters it does not."""

import functools

import pytest
import torch
from torch import nn

from mezzo.amp import GradScaler, auto_cast, decorate

WIDTH, BATCH, STEPS, LEARNING_RATE = 256, 64, 20, 1e-3
#: Bounds to hold. The loss is a mean of 16,384 squares; fp16 rounding of activations (2^-11) averages out in it.
RELATIVE_LOSS = {"float16": 1e-4, "bfloat16": 2e-3}
FALL = 0.03


def simple_net(device: str) -> nn.Module:
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(9)])
    for layer in net:
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
    return net.to(device)


@functools.cache
def losses(
    level: str, half: str, device: str, decorated: bool = True, master_weight: bool | None = None
) -> tuple[float, float]:
    """Return the loss before the first and after the last of twenty steps of SGD on one batch."""
    torch.manual_seed(100)
    net = simple_net(device)
    data, label = (torch.rand(BATCH, WIDTH).to(device) for _ in range(2))
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    if level != "O0" and decorated:
        net, optimizer = decorate(net, optimizer, level=level, dtype=half, master_weight=master_weight)
    scaler = GradScaler(enable=level != "O0" and half == "float16", init_loss_scaling=1024)
    seen = []
    for _ in range(STEPS + 1):
        with auto_cast(level=level, dtype=half, custom_white_list=["elementwise_add"]):
            loss = nn.functional.mse_loss(net(data), label)
        seen.append(loss.item())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return seen[0], seen[-1]


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MODES = [("OD", False), ("O1", False), ("O1", True), ("O2", True)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize(("level", "decorated"), MODES)
def test_loss_and_its_fall_are_those_of_float32(level: str, decorated: bool, half: str, device: str) -> None:
    start, end = losses("O0", half, device)
    mixed_start, mixed_end = losses(level, half, device, decorated)
    assert 0.4 < start < 0.8  # all nine layers matter: torch's default initialisation would start near 1/3
    assert mixed_end == pytest.approx(end, rel=RELATIVE_LOSS[half])
    assert mixed_start - mixed_end == pytest.approx(start - end, rel=FALL)
    assert start - end > 0.05


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_without_masters_the_loss_does_not_fall_enough(half: str, device: str) -> None:
    start, end = losses("O0", half, device)
    mixed_start, mixed_end = losses("O2", half, device, True, False)
    assert (mixed_start - mixed_end) < (1 - FALL) * (start - end)
