"""`backend="auto"`: the faster form of a step is kept, a failing compiler is reported, nothing else changes."""

import time

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import mezzo
from mezzo.static import CaptureError, CompilerError, _graph, compile_step

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of Inductor's own imports


class Net(nn.Module):
    """With batch norm and dropout: buffers and random numbers that measuring must not change."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def make_step(backend: str, model: nn.Module | None = None):
    torch.manual_seed(0)
    net = model or Net()
    precision = mezzo.Precision("O2", "bfloat16")
    net, optimizer = precision.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    return net, precision.compile(net, mse_loss, optimizer, backend=backend)


def batch(rows: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 2, generator=generator)


def train(step) -> list[float]:
    torch.manual_seed(5)
    return [step(*batch()).item() for _ in range(4)]


@pytest.fixture
def slow_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_graph(module, inputs, options):
        def run(*args):
            time.sleep(0.01)
            return module(*args)

        return run

    monkeypatch.setattr(_graph, "compile_graph", compile_graph)


@pytest.fixture
def broken_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_graph(module, inputs, options):
        raise RuntimeError("no such instruction: frobnicate")

    monkeypatch.setattr(_graph, "compile_graph", compile_graph)


@pytest.mark.usefixtures("slow_compiled_code")
def test_the_step_as_written_is_kept_if_compiled_code_is_slower_and_trains_as_it_alone_does() -> None:
    net, step = make_step("auto")
    other, eager = make_step("eager")
    losses = [train(each) for each in (step, eager)]
    assert step.report().chosen == "as written"
    assert step.report().seconds["compiled"] > step.report().seconds["as written"] > 0
    assert losses[0] == losses[1]
    for name, value in net.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


@pytest.mark.usefixtures("slow_compiled_code")
def test_the_first_batch_decides_for_later_shapes() -> None:
    _, step = make_step("auto")
    step(*batch())
    graphs = len(step.graphs)
    step(*batch(12))
    assert step.num_shapes == 2
    assert len(step.graphs) == graphs, "a later shape was compiled, though the step as written was chosen"


@pytest.mark.usefixtures("slow_compiled_code")
def test_a_model_that_writes_into_its_batch_finds_it_as_the_user_gave_it() -> None:
    class Doubles(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2))

    net = Doubles(4, 2)
    step = compile_step(net, mse_loss, torch.optim.SGD(net.parameters(), lr=0.1))
    x, y = torch.ones(3, 4), torch.zeros(3, 2)
    step(x, y)
    assert (x == 2).all(), "measuring ran the model on the user's batch"


@pytest.mark.usefixtures("slow_compiled_code")
def test_a_batch_that_collects_gradients_gets_those_of_one_step() -> None:
    found = []
    for backend in ("auto", "eager"):
        torch.manual_seed(0)
        net = nn.Linear(4, 2)
        step = compile_step(net, mse_loss, torch.optim.SGD(net.parameters(), lr=0.1), backend=backend)
        x, y = batch()
        step(x.requires_grad_(), y)
        found.append(x.grad)
    assert found[0] is not None
    assert torch.equal(*found)


@pytest.mark.usefixtures("slow_compiled_code")
def test_a_buffer_whose_elements_are_one_in_memory_stays() -> None:
    net = Net()
    net.register_buffer("ones", torch.ones(1).expand(4))
    _, step = make_step("auto", net)
    assert len(train(step)) == 4


@pytest.mark.usefixtures("slow_compiled_code")
def test_buffers_of_a_loss_are_those_of_the_steps() -> None:
    class Counts(nn.MSELoss):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(output, target)

    net, loss_fn = nn.Linear(4, 2), Counts()
    step = compile_step(net, loss_fn, torch.optim.SGD(net.parameters(), lr=0.1))
    train(step)
    assert loss_fn.calls == 4, "measuring changed a buffer of the loss"


@pytest.mark.slow
def test_compiled_code_is_kept_if_it_is_faster() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1 << 18))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(40):  # 40 passes over memory as written, one pass if fused
                x = (x * self.scale).sin() + x
            return x

    net = Chain()
    step = compile_step(net, mse_loss, torch.optim.SGD(net.parameters(), lr=0.1))
    x = torch.randn(4, 1 << 18)
    step(x, x)
    assert step.report().chosen == "compiled"
    assert "times as fast" in str(step.report())


@pytest.mark.usefixtures("broken_compiler")
def test_a_compiler_that_fails_is_one_warning_and_the_step_trains_as_written() -> None:
    _, step = make_step("auto")
    with pytest.warns(UserWarning, match="frobnicate.*as written"):
        first = step(*batch()).item()
    assert [step(*batch()).item() for _ in range(20)][-1] < first
    assert step.report().chosen == "as written"
    assert "frobnicate" in step.report().reason


@pytest.mark.usefixtures("broken_compiler")
def test_a_compiler_that_fails_is_an_error_if_it_was_asked_for() -> None:
    _, step = make_step("inductor")
    with pytest.raises(CompilerError, match="frobnicate"):
        step(*batch())


def test_a_network_that_is_no_single_graph_is_an_error_with_its_line() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if x.sum().item() > 0 else self.layer(-x)

    _, step = make_step("auto", Reads())
    with pytest.raises(CaptureError, match=r"x\.sum\(\)\.item\(\)"):
        step(*batch())


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="auto"):
        make_step("autp")


def test_a_report_before_the_first_batch_says_so() -> None:
    _, step = make_step("auto")
    assert "not called yet" in str(step.report())
    _, step = make_step("aot_eager")
    assert "aot_eager" in str(step.report())


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_a_report_of_a_named_backend_tells_no_time_that_it_did_not_take(backend: str) -> None:
    _, step = make_step(backend)
    step(*batch())
    assert step.report().device == "cpu"
    assert "first batch" not in str(step.report()), "on a CPU such a step compiles while it runs"
