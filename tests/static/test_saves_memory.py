"""`saves_memory=True`: the backward pass computes cheap results again; the numbers stay, fewer bytes are kept."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, silu

import mezzo
from graph_backends import remove_compiler, skip_without_compiler
from mezzo.static import CompiledStep, compile_step

TOKENS, WIDTH, HIDDEN = 24, 16, 80


class Gated(nn.Module):
    """The MLP of a Llama block: its product of gate and up is the input of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Peak(nn.Module):
    """A maximum that is compared in the backward pass: it must be the one of the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return silu(self.layers(x)).amax(dim=-1, keepdim=True).expand(-1, WIDTH)


@pytest.fixture(autouse=True)
def leave_no_trace() -> Iterator[None]:
    skip_without_compiler()
    yield
    torch._dynamo.reset()


def make_step(net: nn.Module, **options: object) -> CompiledStep:
    precision = mezzo.Precision("O2", "bfloat16")
    precision.prepare(net, optimizer := torch.optim.SGD(net.parameters(), lr=0.5))
    return precision.compile(net, mse_loss, optimizer, backend="inductor", **options)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(TOKENS, WIDTH, generator=generator), torch.randn(TOKENS, WIDTH, generator=generator)


def kept_shapes(step: CompiledStep) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors that a step keeps for its backward pass."""
    kept: list[tuple[int, ...]] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    step(*batch())
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        step(*batch())
    return kept


def test_the_product_of_gate_and_up_is_not_kept() -> None:
    wide = (TOKENS, HIDDEN)
    assert kept_shapes(make_step(Gated())).count(wide) == 3, "gate, up and their product"
    assert kept_shapes(make_step(Gated(), saves_memory=True)).count(wide) == 2


@pytest.mark.parametrize("network", [Gated, Peak])
def test_the_numbers_are_the_same_bit_for_bit(network: type[nn.Module]) -> None:
    curves = []
    for saves_memory in (False, True):
        step = make_step(network(), saves_memory=saves_memory)
        curves.append([step(*batch()).item() for _ in range(6)])
    assert curves[0] == curves[1]
    assert curves[0][-1] < curves[0][0]


def test_auto_takes_the_compiled_form_and_other_forms_are_refused() -> None:
    net = Gated()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = compile_step(net, mse_loss, optimizer, saves_memory=True)
    step(*batch())
    assert step.report().chosen == "compiled"
    with pytest.raises(ValueError, match="as_written"):
        compile_step(net, mse_loss, optimizer, backend="as_written", saves_memory=True)


@pytest.mark.filterwarnings("ignore:no C\\+\\+ compiler")
def test_without_a_compiler_it_warns_that_nothing_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    remove_compiler(monkeypatch, "g++ was not found")
    with pytest.warns(UserWarning, match=r"saves_memory=True has no effect.*compiler"):
        compile_step(net := Gated(), mse_loss, torch.optim.SGD(net.parameters(), lr=0.1), saves_memory=True)
