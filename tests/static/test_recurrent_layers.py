"""Recurrent layers in a captured step on a CPU, which Dynamo refuses by default."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD

from mezzo.precision import Precision

STEPS = 4
RTOL = 2e-3  # losses below two; a captured layer rounds to bfloat16 after each time step, as eager code does, or later


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = kind(8, 8, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.first(x))[0].mean((1, 2))


def losses(kind: type[nn.RNNBase], backend: str) -> list[float]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net, x, y = Recurrent(kind), torch.randn(4, 5, 8), torch.randn(4)
    precision = Precision("O2", "bfloat16")
    net, optimizer = precision.prepare(net, SGD(net.parameters(), lr=0.5))
    step = precision.compile(net, mse_loss, optimizer, backend=backend)
    return [step(x, y).item() for _ in range(STEPS)]


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_a_captured_recurrent_layer_trains_as_in_eager_mode(kind: type[nn.RNNBase]) -> None:
    eager = losses(kind, "eager")
    assert eager[-1] < 0.97 * eager[0]
    assert losses(kind, "aot_eager") == pytest.approx(eager, rel=RTOL)
