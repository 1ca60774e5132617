"""torchao's own FP8 layers under mezzo: O2 keeps masters for them, O3 refuses them."""

import pytest
import torch
from torch import nn

import mezzo
from mezzo import optim

pytest.importorskip("torchao")

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]  # torchao warns about each torch


def make_net() -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    return convert_to_float8_training(net, config=Float8LinearConfig(emulate=True))


def test_o3_refuses_layers_of_torchao():
    fp8 = {"emulate": True, "min_width": 0, "min_size": 0}
    with pytest.raises(ValueError, match=r"'2' is a torchao.float8.float8_linear.Float8Linear.* use O2 with it"):
        mezzo.Precision("O3", "bfloat16", fp8=fp8).prepare(make_net())


def test_o2_trains_layers_of_torchao_with_masters():
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    precision = mezzo.Precision("O2", "bfloat16")
    precision.prepare(net, optimizer)
    inputs, losses = torch.randn(16, 32), []
    for _ in range(10):
        with precision.autocast():
            loss = (net(inputs) - 1.0).square().mean()
        precision.backward(loss)
        precision.step(optimizer)
        optimizer.zero_grad()
        losses.append(loss.item())
    weight = net[0].weight
    assert (weight.dtype, optim.master_of(weight).dtype) == (torch.bfloat16, torch.float32)
    assert losses[-1] < 0.5 * losses[0]
