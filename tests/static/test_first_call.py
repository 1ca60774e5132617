"""Models that set something up at their first call, in a way that cannot be captured."""

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import mezzo
from mezzo.static import CaptureError, CompiledStep


class SetsUp(nn.Module):
    """As in transformers: the first call installs hooks under a lock. Buffers and random numbers show extra calls."""

    lock = threading.Lock()

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))
        self.is_ready, self.calls = False, 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ready:
            with self.lock:
                self.is_ready = True
        return self.layers(x)


class Branches(SetsUp):
    """Each call depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.sum() > 0 else -y


def prepared(net: SetsUp, **options: object) -> tuple[SetsUp, CompiledStep]:
    precision = mezzo.Precision("O2", "bfloat16")
    net, optimizer = precision.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    return net, precision.compile(net, mse_loss, optimizer, **options)


def train(step: CompiledStep, calls: int = 4) -> list[float]:
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(16, 4, generator=generator), torch.randn(16, 2, generator=generator)
    return [step(x, y).item() for _ in range(calls)]


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=["plain", "accumulated"])
def test_the_first_call_happens_once_as_written_and_changes_no_number(options: dict[str, int]) -> None:
    net, step = prepared(SetsUp(), backend="aot_eager", **options)
    other, ready = prepared(SetsUp(), backend="aot_eager", **options)
    other.is_ready = True
    assert train(step) == train(ready)
    assert net.is_ready
    for name, value in net.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


@pytest.mark.slow
def test_the_default_backend_trains_such_a_model() -> None:
    net, step = prepared(SetsUp())
    losses = train(step, 20)
    assert losses[-1] < losses[0]
    assert net.layers[1].num_batches_tracked == 20


def test_what_cannot_be_captured_later_either_is_an_error_and_nothing_has_changed() -> None:
    net, step = prepared(Branches(), backend="aot_eager")
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(CaptureError, match=r"y\.sum\(\) > 0"):
        train(step)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name
