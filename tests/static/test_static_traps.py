"""What a fresh pair of eyes found: state that leaks, numbers that would be wrong without a word."""

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

from mezzo import static
from mezzo.amp import GradScaler, Policy, auto_cast
from mezzo.static import CaptureError, Executor, InputSpec, Program, ProgramError, compile_step, data, program_guard
from mezzo.static import _region as region
from mezzo.static.amp import fp16_guard


@pytest.fixture(autouse=True)
def clean() -> Any:
    torch._dynamo.reset()
    yield
    static.disable_static()
    assert region.thread_state.depth == 0
    assert not region.thread_state.open


def new_program() -> Program:
    program = Program()
    program.backend = "aot_eager"
    return program


EXE = Executor("cpu")


def test_a_program_that_ran_before_minimize_trains_afterwards() -> None:
    net = nn.Linear(2, 1)
    with program_guard(new_program()) as _:
        x = data("x", [None, 2])
        loss = net(x).mean()
        program = loss._program
        feed = {"x": np.ones((2, 2))}
        (before,) = EXE.run(program, feed, [loss])
        static.minimize(SGD(net.parameters(), lr=0.1), loss)
    EXE.run(program, feed, [loss])
    assert EXE.run(program, feed, [loss])[0] < before


def test_a_call_written_after_a_run_is_run() -> None:
    with program_guard(new_program()):
        y = data("x", [1]) * 1
        assert EXE.run(y._program, {"x": [1.0]}, [y])[0] == 1
        y.add_(1)
    assert EXE.run(y._program, {"x": [1.0]}, [y])[0] == 2


WRITES = {
    "method": lambda h: h.relu_(),
    "function": functional.relu_,
    "module": nn.ReLU(inplace=True),
    "module on a view": lambda h: nn.ReLU(inplace=True)(h.view(-1, 8)),
    "switch by name": lambda h: functional.relu(h, inplace=True),
    "switch by place": lambda h: functional.relu(h, True),
    "view": lambda h: h.view(-1).relu_(),
    "part of a view": lambda h: h.t()[:].clamp_(0),
}


@pytest.mark.parametrize("kind", WRITES)
def test_what_is_written_in_place_is_saved(kind: str, tmp_path: Path) -> None:
    first, second = nn.Linear(4, 8), nn.Linear(8, 2)
    with program_guard(new_program()):
        x, label = data("x", [None, 4]), data("label", [None, 2])
        h = first(x)
        WRITES[kind](h)
        y = second(h)
        functional.mse_loss(y, label)
    program, value = y._program, torch.randn(3, 4)
    expected = second(torch.relu(first(value))).detach()
    assert torch.allclose(program.inference_module([y])(value)[0], expected, atol=1e-6)
    program.save(tmp_path / "net.pt2", [y])
    loaded = Program.load(tmp_path / "net.pt2")
    loaded.backend = "aot_eager"
    assert [v.name for v in loaded.inputs] == ["x"]
    np.testing.assert_allclose(EXE.run(loaded, {"x": value}, [y.name])[0], expected.numpy(), atol=1e-6)


def test_a_capture_that_fails_in_a_guard_leaves_none_open() -> None:
    @static.to_static(backend="aot_eager")
    def noisy(x: Tensor) -> Tensor:
        with fp16_guard():
            print(x)
        return x

    with pytest.raises(CaptureError, match="print"):
        noisy(torch.ones(2))
    assert not region.is_inside_guard()


def test_a_captured_function_inside_a_guard_leaves_the_guard_open() -> None:
    @static.to_static(backend="aot_eager")
    def double(x: Tensor) -> Tensor:
        return x * 2

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 4)
            self.dtypes: list[torch.dtype] = []

        def forward(self, x: Tensor) -> Tensor:
            with fp16_guard():
                x = double(x)
                y = self.linear(x)
                self.dtypes.append(y.dtype)
            return y

    net = Net()
    policy = Policy.create("O2", "bfloat16")
    step = compile_step(
        net, functional.mse_loss, SGD(net.parameters(), lr=0.1), policy=policy, use_fp16_guard=True, backend="eager"
    )
    step(torch.ones(2, 3), torch.ones(2, 4))
    assert net.dtypes == [torch.bfloat16]


def test_sizes_are_known_only_if_no_batch_changes_them() -> None:
    with program_guard(new_program()):
        image = data("image", [None, 1, None, None])
        h = nn.Conv2d(1, 1, 3, stride=2)(image)
        assert h.shape == (-1, 1, -1, -1)
        row = data("row", [1, 3])
        assert torch.cat([data("x", [None, 3]), row]).shape == (-1, 3)
        assert nn.Embedding(4, 2018)(data("word", [2], "int64")).shape == (2, 2018)
        for compute in (lambda: h.shape[2] * 2, lambda: 1 / h.size(2), lambda: -h.shape[0], lambda: h.shape[0] // 2):
            with pytest.raises(
                ProgramError, match="a size that depends on the batch is not known while the program is wri"
            ):
                compute()
        assert EXE.run(
            h._program, {"image": np.ones((2, 1, 7, 9)), "row": [[0] * 3], "x": [[0] * 3], "word": [0, 1]}, [h]
        )[0].shape == (2, 1, 3, 4)


def test_a_variable_of_another_program_is_refused() -> None:
    results = []
    for _ in range(2):
        with program_guard(new_program()):
            results.append(data("x", [1]) + 1)
    with pytest.raises(ProgramError, match="'add_0' is a variable of another program"):
        EXE.run(results[0]._program, {"x": [1.0]}, [results[1]])


def test_functions_that_ask_whether_they_train_do_not_in_a_test(tmp_path: Path) -> None:
    with program_guard(new_program()):
        x = data("x", [8])
        y = functional.dropout(x, 0.5) + functional.dropout(x, 0.5, True)
    feed = {"x": np.ones(8)}
    assert set(np.unique(EXE.run(y._program, feed, [y])[0])) > {2.0}
    assert (EXE.run(y._program.clone(for_test=True), feed, [y])[0] == 2).all()
    y._program.save(tmp_path / "net.pt2", [y])
    loaded = Program.load(tmp_path / "net.pt2")
    loaded.backend = "aot_eager"
    assert (EXE.run(loaded, feed, [y.name])[0] == 2).all()


def test_declared_inputs_of_a_method_and_by_name_are_checked_and_cast() -> None:
    class Net(nn.Module):
        @static.to_static(backend="aot_eager", input_spec=[InputSpec([None, 3], name="x")])
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    net = Net()
    assert net(torch.ones(2, 3, dtype=torch.float64)).dtype is torch.float32
    for call in (lambda: net(torch.ones(2, 5, 3)), lambda: net(x=torch.ones(2, 5, 3))):
        with pytest.raises(ProgramError, match=r"x has shape \[2, 5, 3\]; it was declared as \[-1, 3\]"):
            call()


def test_the_table_is_that_of_the_graph_whatever_happens_later() -> None:
    net = nn.Linear(3, 4)
    step = compile_step(net, functional.mse_loss, SGD(net.parameters(), lr=0.1), backend="aot_eager")
    step(torch.ones(2, 3), torch.ones(2, 4))
    net.double()
    with auto_cast(level="O2", dtype="bfloat16"):
        assert step.operators().totals()["addmm"] == (0, 0, 1, 0)


def test_a_loss_in_half_is_scaled_and_returned_in_float32() -> None:
    net = nn.Linear(3, 4)
    policy = Policy.create("O2")
    step = compile_step(
        net,
        lambda output, target: (output - target).abs().max(),
        SGD(net.parameters(), lr=0.1),
        policy=policy,
        scaler=GradScaler(init_loss_scaling=2.0**15),
        backend="aot_eager",
    )
    loss = step(torch.ones(2, 3), torch.full((2, 4), 100.0))  # times the scale no number of float16
    assert loss.dtype is torch.float32
    assert step._last.training.scaler.skipped_steps == 0


def test_writing_a_program_leaves_a_module_as_it_was() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))
            self.cache: Tensor | None = None
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            if self.cache is None:
                self.cache = torch.arange(3.0)
            self.calls += 1
            return x + self.mean + self.cache

    module = Remembers()
    with program_guard(new_program()):
        module(data("x", [None, 3]))
    assert type(module.mean) is Tensor
    assert (module.mean == 0).all()
    assert module.cache is None
    assert module.calls == 0
    assert module(torch.ones(2, 3)).shape == (2, 3)


def test_lazy_modules_and_foreign_results_are_explained() -> None:
    class Result:
        pass

    class Wraps(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Result()

    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return [x] * (1 if x.shape[0] == 1009 else 2)

    with program_guard(new_program()):
        x = data("x", [None, 3])
        with pytest.raises(ProgramError, match=r"LazyLinear has parameters without a shape \(a lazy module\)"):
            nn.LazyLinear(3)(x)
        with pytest.raises(ProgramError, match="wraps returns a Result: calls of a program return tensors in tuples"):
            Wraps()(x)
        with pytest.raises(ProgramError, match="counts"):
            Counts()(x)


def test_captured_graphs_keep_no_batch_alive() -> None:
    net = nn.Linear(3, 4)
    step = compile_step(net, functional.mse_loss, SGD(net.parameters(), lr=0.1), backend="aot_eager", max_shapes=1)
    batches = []
    for size in (2, 3, 4):
        x = torch.ones(size, 3)
        batches.append(weakref.ref(x))
        step(x, torch.ones(size, 4))
        del x
    gc.collect()
    assert [batch() for batch in batches] == [None] * 3


def test_gradients_from_before_do_not_count() -> None:
    net = nn.Linear(3, 4)
    net.weight.grad = torch.full_like(net.weight, 1e6)
    step = compile_step(net, functional.mse_loss, SGD(net.parameters(), lr=0.1), backend="aot_eager")
    step(torch.ones(2, 3), torch.ones(2, 4))
    assert net.weight.abs().max() < 10


def test_gradients_of_a_step_that_failed_do_not_count() -> None:
    nets = [nn.Linear(3, 4) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    for net, fails in zip(nets, (True, False), strict=True):
        optimizer = SGD(net.parameters(), lr=0.1)
        step = compile_step(net, functional.mse_loss, optimizer, backend="aot_eager")
        if fails:
            hook = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                step(torch.ones(2, 3), torch.ones(2, 4))
            hook.remove()
        step(torch.ones(2, 3), torch.ones(2, 4))
    assert torch.equal(nets[0].weight, nets[1].weight)


def test_a_forward_that_never_stays_the_same_is_explained() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(3, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.linear(x) * self.calls

    net = Counts()
    step = compile_step(net, functional.mse_loss, SGD(net.parameters(), lr=0.1), backend="aot_eager")

    def go_on() -> None:
        for _ in range(20):
            step(torch.ones(2, 3), torch.ones(2, 4))

    with pytest.raises(CaptureError, match="captured again and again: something that the forward reads changes"):
        go_on()


def test_the_words_of_what_was_raised_are_told() -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("my own words")

    with pytest.raises(CaptureError, match="my own words"):
        static.to_static(Raises(), backend="aot_eager")(torch.ones(2))
    with pytest.raises(CaptureError, match="must have same reduction dim"):
        static.to_static(nn.Linear(3, 4), backend="aot_eager")(torch.ones(2, 5))
    with pytest.raises((CaptureError, ValueError), match="more than 1 value per channel"):
        static.to_static(nn.BatchNorm1d(3), backend="aot_eager")(torch.ones(1, 3))


@pytest.mark.parametrize(
    ("loss_fn", "error", "message"),
    [
        (lambda o, t: (o.mean(), 0.5), TypeError, "the loss function returned a float: it must return tensors"),
        (lambda o, t: o - t, ValueError, r"the loss has shape \[2, 4\]: it must be one number; call .mean\(\) on it"),
        (lambda o, t: (), ValueError, "the loss function returned an empty tuple: it must return tensors"),
        (lambda o, t: o.detach().mean(), ValueError, "the loss has no gradient"),
    ],
)
def test_what_a_loss_function_must_return_is_said(loss_fn: Any, error: type[Exception], message: str) -> None:
    net = nn.Linear(3, 4)
    step = compile_step(net, loss_fn, SGD(net.parameters(), lr=0.1), backend="aot_eager")
    with pytest.raises(error, match=message):
        step(torch.ones(2, 3), torch.ones(2, 4))


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_a_frozen_weight_that_is_trained_again_moves(backend: str) -> None:
    """Compiled code of torch 2.11 does not notice it."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4))
    net[0].requires_grad_(False)
    before = net[0].weight.detach().clone()
    step = compile_step(net, functional.mse_loss, SGD(net.parameters(), lr=0.1), backend=backend)
    batch = torch.ones(2, 3), torch.ones(2, 4)
    step(*batch)
    assert torch.equal(net[0].weight, before)
    net[0].requires_grad_(True)
    step(*batch)
    assert not torch.equal(net[0].weight, before)


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_a_step_that_can_train_nothing_says_why(backend: str) -> None:
    net = nn.Linear(3, 4)
    step = compile_step(net, functional.mse_loss, SGD(net.parameters(), lr=0.1), backend=backend)
    batch = torch.ones(2, 3), torch.ones(2, 4)
    with torch.no_grad(), pytest.raises(ValueError, match=r"the loss has no gradient.*torch.no_grad"):
        step(*batch)
    net.requires_grad_(False)
    with pytest.raises(ValueError, match=r"the loss has no gradient.*set requires_grad"):
        step(*batch)
    net.requires_grad_(True)
    before = net.weight.detach().clone()
    step(*batch)
    assert not torch.equal(net.weight, before)


def test_what_is_no_optimizer_is_said_at_once() -> None:
    with pytest.raises(TypeError, match=r"optimizer: NoneType is not a torch.optim.Optimizer"):
        compile_step(nn.Linear(3, 4), functional.mse_loss, None)
    with pytest.raises(TypeError, match=r"optimizer: NoneType is not a torch.optim.Optimizer"):
        static.capture_step(nn.Linear(3, 4), functional.mse_loss, None, (torch.ones(1, 3), torch.ones(1, 4)))


def test_an_optimizer_that_needs_a_closure_is_refused_at_once() -> None:
    net = nn.Linear(3, 4)
    with pytest.raises(ValueError, match="LBFGS needs a closure"):
        compile_step(net, functional.mse_loss, torch.optim.LBFGS(net.parameters()))


def test_a_guard_option_without_a_policy_does_nothing() -> None:
    net = nn.Linear(3, 4)
    for backend in ("aot_eager", "eager"):
        step = compile_step(
            net, functional.mse_loss, SGD(net.parameters(), lr=0.1), use_fp16_guard=True, backend=backend
        )
        assert step(torch.ones(2, 3), torch.ones(2, 4)).shape == ()


def test_what_a_captured_step_has_of_its_modules_is_seen_to_change() -> None:
    """On the CPU nothing is captured; what a CUDA graph compares before it is replayed is the same there."""
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout())
    step = compile_step(net, functional.mse_loss, SGD(net.parameters(), lr=0.1), backend="eager")
    step(torch.ones(2, 3), torch.ones(2, 4))
    holds = step._last.training.module_watch()
    assert holds()
    net[2].eval()
    assert not holds()
    net[2].train()
    net[0].weight.requires_grad_(False)
    assert not holds()
    net[0].weight.requires_grad_(True)
    assert holds()
    kept = net[1].running_mean
    net[1].running_mean = torch.zeros(4)
    assert not holds()
    net[1].running_mean = kept
    assert holds()
    kept.data = torch.zeros(4)
    assert not holds()


def test_a_captured_step_sees_that_parts_of_its_modules_were_replaced() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU()))
    step = compile_step(net, functional.mse_loss, SGD(net.parameters(), lr=0.1), backend="eager")
    step(torch.ones(2, 3), torch.ones(2, 4))
    holds = step._last.training.module_watch()
    kept = net[1][0]
    net[1][0] = nn.Tanh()
    assert not holds()
    net[1][0] = kept
    assert holds()
    net[1].append(nn.ReLU())
    assert not holds()


def test_a_forward_reads_only_what_is_fetched_needs() -> None:
    net = nn.Linear(3, 4)
    with program_guard(new_program()):
        x, label = data("x", [None, 3]), data("label", [None, 4])
        y = net(x)
        loss = functional.mse_loss(y, label)
        program = loss._program
    value = torch.ones(2, 3)
    assert torch.equal(torch.from_numpy(EXE.run(program, {"x": value}, [y])[0]), net(value).detach())
    EXE.run(program, {"x": value, "label": torch.ones(2, 4)}, [y])  # what is not needed may be fed
    with pytest.raises(ProgramError, match="feed has no 'label': the program reads x, label"):
        EXE.run(program, {"x": value}, [loss])


@pytest.mark.parametrize("write", [lambda x: nn.Linear(4, 2)(x), torch.relu, lambda x: x * 2, lambda x: x.mean()])
def test_a_region_around_the_writing_of_a_program_warns_once_at_the_users_line(write: Any) -> None:
    program = new_program()
    with program_guard(program):
        x = data("x", [None, 4])
        with auto_cast(dtype="bfloat16"):
            with pytest.warns(
                UserWarning, match=r"auto_cast around calls of a program has no effect.*amp\.decorate"
            ) as caught:
                y = write(x)
            write(x)  # once is enough: a second warning would be an error
    assert caught[0].filename == __file__
    assert y.dtype is torch.float32
    assert Executor("cpu").run(program, {"x": np.ones((2, 4))}, [y], return_numpy=False)[0].dtype is torch.float32


def test_a_region_around_the_run_of_a_program_is_followed() -> None:
    with program_guard(new_program()):
        y = nn.Linear(4, 2)(data("x", [None, 4]))
    with auto_cast(dtype="bfloat16"):
        results = Executor("cpu").run(y._program, {"x": np.ones((2, 4))}, [y], return_numpy=False)
    assert results[0].dtype is torch.bfloat16
