"""Reductions whose gradient compares for equality: compiled code must compare what eager code compares."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mezzo

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda x: x.amax(dim=1, keepdim=True),
    "amin": lambda x: x.amin(dim=1, keepdim=True),
    "max of all": lambda x: x.max(),
    "infinite norm": lambda x: torch.linalg.vector_norm(x, ord=float("inf"), dim=1, keepdim=True),
}


class Gate(nn.Module):
    """Features that are cheap to compute again, with a gate made from their largest value."""

    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Conv2d(16, 4, 1)
        self.reduce = reduce

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(self.norm(self.first(x)))
        return self.last(x * torch.sigmoid(self.reduce(x) + x.mean(dim=1, keepdim=True)))


def losses(name: str, dtype: str, backend: str) -> tuple[list[float], int]:
    torch.manual_seed(0)
    net = Gate(REDUCTIONS[name])
    precision = mezzo.Precision("O2", dtype)
    net, optimizer = precision.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    step = precision.compile(net, nn.functional.mse_loss, optimizer, backend=backend)
    x, y = torch.randn(4, 3, 32, 32), torch.randn(4, 4, 32, 32)
    found = [step(x, y).item() for _ in range(6)]
    return found, precision.scaler.skipped_steps if precision.scaler else 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", list(REDUCTIONS))
def test_compiled_steps_follow_eager_ones(name: str, dtype: str) -> None:
    """Before the values were stored, every bfloat16 loss after the first was NaN, and every float16 step was skipped."""
    compiled, skipped = losses(name, dtype, "inductor")
    eager, skipped_by_eager = losses(name, dtype, "eager")
    # activations are rounded at other places: 2^-8 of values near 1, averaged over 16,384 pixels
    assert compiled == pytest.approx(eager, rel=2e-3)
    assert skipped == skipped_by_eager == 0


OF_A_PRODUCT: dict[str, Callable[[Tensor], Tensor]] = {
    "float32 copy": lambda x: x.float().amax(1),
    "all of a float32 copy": lambda x: x.float().max(),
    "float32 sum": lambda x: (x.float() + 1).amax(1),
    "some columns": lambda x: x[:, :32].amax(1),
    "absolute values": lambda x: torch.linalg.vector_norm(x, float("inf"), dim=1),
}


class Largest(nn.Module):
    """The largest of bfloat16 numbers that are cheap to compute again."""

    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64).bfloat16())
        self.reduce = reduce

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(torch.sigmoid(x * self.weight) * x + self.weight).float()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(OF_A_PRODUCT))
def test_gradients_of_a_largest_value_are_those_of_eager_code(name: str) -> None:
    changes = []
    for backend in ("inductor", "eager"):
        torch.manual_seed(0)
        net, x = Largest(OF_A_PRODUCT[name]), torch.randn(128, 64).bfloat16()
        before = net.weight.detach().clone()
        optimizer = torch.optim.SGD(net.parameters(), lr=64.0)
        mezzo.static.compile_step(net, lambda out, _: out.mean(), optimizer, backend=backend)(x, x)
        changes.append((net.weight.detach() - before).float())
    compiled, eager = changes
    assert eager.norm() > 0
    # the gradient is rounded to 2^-9 of sums of up to 128 terms at other places; a wrong comparison gives 0 or NaN
    assert (compiled - eager).norm() < 0.1 * eager.norm()
