"""`backend="auto"`: the faster form of a step is kept, a failing compiler is reported, nothing else changes."""

import time

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import mezzo
from mezzo.static import CaptureError, CompilerError, StepReport, _compile, _graph, compile_step
from mezzo.static._choice import decide, fastest_round


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
    def compile_graph(module, inputs, options, **others):
        def run(*args):
            time.sleep(0.01)
            return module(*args)

        return run

    monkeypatch.setattr(_graph, "compile_graph", compile_graph)


@pytest.fixture
def broken_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_graph(module, inputs, options, **others):
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


@pytest.mark.parametrize("chosen", ["as written", "compiled"])
def test_the_backend_of_the_report_repeats_the_choice(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_graph(module, inputs, options, **others):
        return lambda *args: [value * 1.5 for value in module(*args)]  # so that the forms differ

    monkeypatch.setattr(_graph, "compile_graph", compile_graph)
    monkeypatch.setattr(_compile, "decide", lambda report: choose(report, chosen))
    net, step = make_step("auto")
    losses = train(step)
    assert step.report().chosen == chosen
    monkeypatch.setattr(_compile, "decide", None)  # nothing is measured from now on
    other, again = make_step(step.report().backend)
    assert train(again) == losses
    assert again.report().chosen == chosen
    for name, value in net.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_interrupted_rounds_do_not_count() -> None:
    pauses = iter([0.05, 0.05, 0.0, 0.05, 0.05])
    assert fastest_round(lambda: time.sleep(next(pauses)), lambda: None) < 0.04


def choose(report: StepReport, form: str) -> None:
    """Decide as if this form were twice as fast as the other one."""
    report.seconds = {name: 1.0 if name == form else 2.0 for name in report.seconds}
    decide(report)


@pytest.mark.parametrize(
    ("compiled", "chosen", "reason"),
    [
        (0.97, "compiled", "1.03 times as fast as the step as written"),
        (0.985, "as written", "compiled code is less than 2 % faster (backend='inductor' would use it all the same)"),
        (900.0, "as written", "compiled code takes 900.00 times as long"),
    ],
)
def test_the_reason_agrees_with_the_times(compiled: float, chosen: str, reason: str) -> None:
    report = StepReport(seconds={"as written": 1.0, "compiled": compiled})
    decide(report)
    assert (report.chosen, report.reason) == (chosen, reason)


@pytest.mark.usefixtures("broken_compiler")
def test_a_step_as_written_does_not_need_a_compiler_and_trains_as_without_capture() -> None:
    net, step = make_step("as_written")
    other, eager = make_step("eager")
    assert train(step) == train(eager)
    assert step.report().chosen == "as written"
    assert not step.graphs
    with pytest.raises(RuntimeError, match="another backend than 'eager' and 'as_written'"):
        step.operators()
    for name, value in net.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


@pytest.mark.gpu
def test_a_step_as_written_is_captured_on_a_gpu_and_trains_as_without_capture() -> None:
    seen = []
    for backend in ("as_written", "eager"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).cuda()
        precision = mezzo.Precision("O2", "bfloat16")
        precision.prepare(net, optimizer := torch.optim.AdamW(net.parameters(), lr=0.01))
        step = precision.compile(net, mse_loss, optimizer, backend=backend)
        seen.append([step(*(tensor.cuda() for tensor in batch())).item() for _ in range(4)])
        assert step.is_captured is (backend == "as_written")
    assert seen[0] == pytest.approx(seen[1], rel=1e-2)  # one unit of bfloat16: kernels of a graph may differ


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
            # 40 passes over memory as written, one pass if fused. Each uses x once: Inductor inlines every use of it,
            # so that two uses would make 2^40 operators.
            for _ in range(40):
                x = (x * self.scale).relu()
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
    assert step.report().backend == "as_written"
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


@pytest.mark.gpu
def test_a_step_that_cannot_be_captured_as_written_runs_compiled() -> None:
    class Waiting(Net):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_compiling():
                torch.cuda.synchronize()  # a capture forbids it
            return super().forward(x)

    net = Waiting().cuda()
    _, step = make_step("auto", net)
    x, y = (tensor.cuda() for tensor in batch())
    losses = [step(x, y).item() for _ in range(20)]
    assert step.report().chosen == "compiled"
    assert losses[-1] < losses[0]
