"""Where the forward pass is float32, so is the backward pass of compiled code: the policy decides in forward passes only."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mezzo
from mezzo.amp import Policy, auto_cast

COMPILERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch.compile": lambda net: torch.compile(net, backend="aot_eager"),
    "to_static": lambda net: mezzo.static.to_static(net, backend="aot_eager"),
}


class Float32(nn.Module):
    """Two products in float32, as in attention: the gradient between them is not a half number."""

    def __init__(self, region: Callable[[], object]) -> None:
        super().__init__()
        self.layer, self.region = nn.Linear(64, 64, bias=False), region

    def forward(self, x: Tensor) -> Tensor:
        with self.region():
            weight = self.layer.weight.float()
            return (x.float() @ weight @ weight).to(x.dtype)


MIDDLES: dict[str, Callable[[], nn.Module]] = {
    "excluded": lambda: nn.Linear(64, 64),
    "black list": lambda: nn.Linear(64, 64),
    "torch.autocast off": lambda: Float32(lambda: torch.autocast("cpu", enabled=False)),
    "auto_cast off": lambda: Float32(lambda: auto_cast(enable=False)),
}


def gradients(middle: str, compiler: str | None) -> tuple[list[Tensor], nn.Module]:
    torch.compiler.reset()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), MIDDLES[middle](), nn.LayerNorm(64), nn.Linear(64, 8))
    black = ["linear"] if middle == "black list" else None
    # On a CPU without half units products are float32 inside, which would hide a half product
    policy = Policy.create("O2", torch.float16, custom_black_list=black, cpu_compute="native")
    precision = mezzo.Precision(policy=policy, excluded_layers=["2"] if middle == "excluded" else None)
    precision.prepare(net)
    run = net if compiler is None else COMPILERS[compiler](net)
    with precision.autocast():
        loss = run(torch.randn(16, 32)).float().square().mean()
    precision.backward(loss)
    return [param.grad for param in net.parameters()], net


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("middle", MIDDLES)
def test_compiled_gradients_are_those_of_eager_code(middle: str, compiler: str) -> None:
    expected, _ = gradients(middle, None)
    found, _ = gradients(middle, compiler)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_the_table_of_a_graph_shows_float32_products_in_the_backward() -> None:
    _, net = gradients("excluded", "to_static")
    totals = mezzo.static.static_forward(net).operators().totals()
    assert totals["mm"] == (3, 0, 2, 0)  # half, and the two of the excluded layer
