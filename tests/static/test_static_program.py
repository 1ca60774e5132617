"""Programs: written with variables, fed and fetched by name, saved and loaded."""

import contextlib
import copy
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from mezzo import static
from mezzo.errors import DeployError, RunError
from mezzo.static import Executor, InputSpec, Program, ProgramError, Variable, data, program_guard

ATOL_SAVED = 1e-6  # float32, one layer after another: only the order of sums may differ


@pytest.fixture(autouse=True)
def leave_no_trace() -> Iterator[None]:
    yield
    static.disable_static()
    torch._dynamo.reset()


def new_program() -> Program:
    program = Program()
    program.backend = "aot_eager"
    return program


def run(program: Program, fetch_list: Any, **feed: Any) -> list[Any]:
    return Executor("cpu").run(program, feed, fetch_list)


class Net(nn.Module):
    """Statistics and dropout between two layers: training and evaluation differ."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(4, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.5),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


class TwoResults(nn.Module):
    """Returns its results in a tuple, a list, a dict, or all of them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor, *, shift: float = 1.0) -> Any:
        plus, times = x + shift, x * 2
        return {
            "tuple": (plus, times),
            "list": [plus, times],
            "dict": {"times": times, "plus": plus},
            "nested": {"a": [plus, (times, None)], "b": "text"},
        }[self.kind]


# ---------------------------------------------------------------------------------------------- writing


def test_an_input_has_its_name_shape_and_dtype() -> None:
    with program_guard(new_program()):
        x, y = data("x", [None, 4], "int64"), data("y", [-1, 2, 3], torch.float16)
    assert repr(x) == "Variable('x', shape=[-1, 4], dtype=int64)"
    assert (y.name, y.shape, y.dtype, y.ndim) == ("y", (-1, 2, 3), torch.float16, 3)


def test_an_input_spec_fits_shapes_by_its_sizes_and_leaves_unknown_ones_free() -> None:
    spec = InputSpec([None, 8, -1], "bfloat16", "x")
    assert repr(spec) == "InputSpec(shape=(-1, 8, -1), dtype=bfloat16, name='x')"
    assert spec.fits((1, 8, 5))
    assert not spec.fits((1, 7, 5))
    assert not spec.fits((1, 8))
    assert InputSpec([]).fits(())


def test_results_are_named_after_their_calls_and_counted() -> None:
    program = new_program()
    with program_guard(program):
        x = data("x", [None, 4])
        net = nn.Linear(4, 2)
        names = [v.name for v in (net(x), net(x), torch.relu(x), x.mean(), x + 1, data("add_1", [1]), x + 2)]
    assert names == ["linear_0", "linear_1", "relu_0", "mean_0", "add_0", "add_1", "add_2"]
    assert [v.name for v in program.inputs] == ["x", "add_1"]
    assert program.modules == [net]
    assert list(program.parameters()) == list(net.parameters())
    assert program.variable("mean_0").shape == ()


def test_a_result_knows_its_shape_and_dtype_before_anything_runs() -> None:
    with program_guard(new_program()):
        x = data("x", [None, 3, 8, 8])
        y = nn.Conv2d(3, 5, 3, stride=2)(x)
        assert y.shape == (-1, 5, 3, 3)
        assert y.argmax(1).dtype == torch.int64
        assert F.interpolate(y, size=(7, 7)).shape == (-1, 5, 7, 7)


def test_a_guard_makes_its_program_the_current_one_and_takes_it_back() -> None:
    outer, inner, startup = new_program(), new_program(), Program()
    before = static.default_main_program()
    with program_guard(outer, startup):
        assert static.default_main_program() is outer
        assert static.default_startup_program() is startup
        with contextlib.suppress(KeyError), program_guard(inner):
            assert data("x", [1])._program is inner
            raise KeyError
        assert static.default_main_program() is outer
    assert static.default_main_program() is before
    assert static.default_startup_program() is not startup
    assert outer.inputs == []


def test_each_thread_has_its_own_default_program_and_mode() -> None:
    found: list[Any] = []
    static.enable_static()
    thread = threading.Thread(target=lambda: found.extend((static.default_main_program(), static.in_static_mode())))
    thread.start()
    thread.join()
    assert found[0] is not static.default_main_program()
    assert found[1] is False
    assert static.in_static_mode()
    static.disable_static()
    assert not static.in_static_mode()


# What modules are called by, outside of everything
PLAIN_CALL = nn.Module.__call__


def is_watched() -> bool:
    return nn.Module.__call__ is not PLAIN_CALL


def test_modules_look_for_variables_inside_of_a_guard_only() -> None:
    with program_guard(new_program()):
        assert is_watched()
        x = data("x", [None, 4])
        assert nn.Linear(4, 2)(x).name == "linear_0"
        run(x._program, ["linear_0"], x=np.ones((1, 4)))
        assert is_watched()
    assert not is_watched()
    run(x._program, ["linear_0"], x=np.ones((1, 4)))
    assert not is_watched()
    assert nn.Linear(4, 2)(torch.ones(1, 4)).shape == (1, 2)


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, GeneratorExit])
def test_a_guard_that_raises_leaves_modules_as_they_were(error: type[BaseException]) -> None:
    def write() -> None:
        with program_guard(new_program()):
            with contextlib.suppress(ProgramError), program_guard(new_program()):
                data("x", [1])
                data("x", [1])
            assert is_watched()
            raise error

    with pytest.raises(error):
        write()
    assert not is_watched()
    with program_guard(new_program()), contextlib.suppress(ValueError, RuntimeError, ProgramError):
        nn.Linear(4, 2)(data("x", [None, 5]))
    assert not is_watched()


def test_static_mode_and_inputs_without_a_guard_are_ended_by_disable_static() -> None:
    static.enable_static()
    with program_guard(new_program()):
        x = data("x", [None, 4])
    assert is_watched()
    assert nn.Linear(4, 2)(x).name == "linear_0"
    static.disable_static()
    assert not is_watched()
    y = Program().data("y", [None, 4])
    assert nn.Linear(4, 2)(y).name == "linear_0"
    static.disable_static()
    assert not is_watched()
    with program_guard(new_program()):
        static.disable_static()  # of nothing: the guard goes on
        assert nn.Linear(4, 2)(data("x", [None, 4])).name == "linear_0"
    assert not is_watched()


def test_threads_do_not_end_each_other_s_writing_and_leave_nothing_behind() -> None:
    def write(barrier: threading.Barrier) -> None:
        data("x", [1])  # without a guard, and never ended
        static.enable_static()
        barrier.wait()

    barrier = threading.Barrier(2)
    thread = threading.Thread(target=write, args=(barrier,))
    with program_guard(new_program()):
        thread.start()
        barrier.wait()
        thread.join()
        static.disable_static()
        assert is_watched()
    gc.collect()
    assert not is_watched()


def test_a_module_called_with_a_variable_outside_of_the_guard_is_refused() -> None:
    net = Net()
    with program_guard(new_program()):
        x = data("x", [None, 4])
    with pytest.raises(ProgramError, match=r"called with a variable.*program_guard"):
        net(x)
    assert net.norm.num_batches_tracked.item() == 0
    assert (x * 2).name  # functions know the program by their variables


def test_what_others_put_in_place_of_the_call_of_modules_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(type(self))
        return PLAIN_CALL(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", counted)
    with program_guard(new_program()):
        nn.ReLU()(torch.ones(1))
    assert nn.Module.__call__ is counted
    assert calls == [nn.ReLU]


def test_writing_a_program_counts_no_batch() -> None:
    net = Net()
    with program_guard(new_program()):
        net(data("x", [None, 4]))
    assert net.norm.num_batches_tracked.item() == 0


def test_writing_a_program_leaves_statistics_weights_and_random_numbers_alone() -> None:
    net = Net()
    before = copy.deepcopy(net.state_dict())
    random = torch.get_rng_state()
    with program_guard(new_program()):
        net(data("x", [None, 4]))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items() if value.dim())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda x: x.mean(), lambda a: a.mean()),
        (lambda x: x.mean(dim=1, keepdim=True), lambda a: a.mean(1, keepdims=True)),
        (lambda x: 2 - x, lambda a: 2 - a),
        (lambda x: x - 2, lambda a: a - 2),
        (lambda x: 1 / x, lambda a: 1 / a),
        (lambda x: x**2 + 2**x, lambda a: a**2 + 2**a),
        (lambda x: -x * x, lambda a: -a * a),
        (lambda x: abs(x - 3) // 2 % 2, lambda a: np.abs(a - 3) // 2 % 2),
        (lambda x: x[:, 0], lambda a: a[:, 0]),
        (lambda x: x[..., 1:], lambda a: a[..., 1:]),
        (lambda x: x @ x.transpose(0, 1), lambda a: a @ a.T),
        (lambda x: torch.eye(4) @ x.transpose(0, 1), lambda a: a.T),
        (lambda x: (x > 2) & (x != 5) | ~(x >= 1), lambda a: (a > 2) & (a != 5) | ~(a >= 1)),
        (lambda x: (x == 3) ^ (x < 2), lambda a: (a == 3) ^ (a < 2)),
        (lambda x: torch.where(x <= 3, x, 0.0), lambda a: np.where(a <= 3, a, 0)),
        (lambda x: torch.stack([x, x + 1], dim=1), lambda a: np.stack([a, a + 1], 1)),
        (lambda x: torch.cat((x, x)), lambda a: np.concatenate((a, a))),
        (lambda x: F.pad(input=x, pad=(1, 0)), lambda a: np.pad(a, ((0, 0), (1, 0)))),
        (lambda x: x.reshape(x.shape[0], 1, 4), lambda a: a.reshape(-1, 1, 4)),
        (lambda x: x.max(dim=1).values, lambda a: a.max(1)),
        (lambda x: x.chunk(2, dim=1)[1], lambda a: a[:, 2:]),
        (lambda x: x + torch.arange(4.0), lambda a: a + np.arange(4.0)),
    ],
)
def test_functions_methods_and_operators_give_what_numpy_gives(write: Any, expected: Any) -> None:
    program = new_program()
    program.backend = "eager"  # what is written is the point, not how it is captured
    with program_guard(program):
        y = write(data("x", [None, 4]))
    values = np.arange(1, 9, dtype="float32").reshape(2, 4)
    (result,) = run(program, [y], x=values)
    np.testing.assert_allclose(result, expected(values), rtol=1e-6)


def test_sizes_that_depend_on_the_batch_are_not_built_in() -> None:
    with program_guard(new_program()):
        x = data("x", [None, 4])
    assert x.size() == (-1, 4)
    assert x.size(1) == 4
    with pytest.raises(
        ProgramError, match="a size that depends on the batch is not known while the program is written"
    ):
        x.size(0) + 1
    with pytest.raises(ProgramError, match="numel"):
        x.numel()


def test_a_size_computed_from_an_unknown_one_is_unknown() -> None:
    with program_guard(new_program()):
        x = data("x", [None, 4])
    assert x.flatten().shape == (-1,)
    assert torch.cat([x, x]).shape == (-1, 4)


# ---------------------------------------------------------------------------------------------- running


@pytest.mark.parametrize(
    "value",
    [
        np.array([[1, 2]]),
        np.array([[1, 2]], "float64"),
        [[1, 2]],
        ((1.0, 2.0),),
        torch.tensor([[1, 2]]),
        torch.tensor([[1.0, 2.0]], requires_grad=True),
    ],
)
def test_what_is_fed_is_cast_to_the_declared_dtype(value: Any) -> None:
    with program_guard(new_program()):
        x, half = data("x", [1, 2]), data("half", [None, 2], "float16")
    result, other = run(x._program, [x * 2, half + 1], x=value, half=value)
    np.testing.assert_array_equal(result, np.array([[2, 4]], "float32"), strict=True)
    np.testing.assert_array_equal(other, np.array([[2, 3]], "float16"), strict=True)


@pytest.mark.parametrize("kind", ["read-only array", "list of arrays"])
def test_any_array_is_fed_without_a_word(kind: str) -> None:
    with program_guard(new_program()):
        y = data("x", [None, 2]) + 1
    values = np.ones((3, 2), "float32")
    values.setflags(write=False)
    torch.set_warn_always(True)
    try:
        run(y._program, [y], x=values if kind == "read-only array" else list(values))
    finally:
        torch.set_warn_always(False)


def test_tensors_come_back_when_no_arrays_are_asked_for() -> None:
    with program_guard(new_program()):
        y = data("x", [2]).to(torch.bfloat16) / 3
    (tensor,) = Executor("cpu").run(y._program, {"x": [1.0, 2.0]}, [y], return_numpy=False)
    assert isinstance(tensor, Tensor)
    assert tensor.dtype == torch.bfloat16
    (array,) = Executor("cpu").run(y._program, {"x": [1.0, 2.0]}, [y])
    assert array.dtype == np.float32  # numpy has no bfloat16
    np.testing.assert_array_equal(array, tensor.float().numpy())


def test_a_startup_program_has_nothing_to_do() -> None:
    executor = Executor("cpu")
    assert executor.run(static.default_startup_program()) == []
    empty = new_program()
    assert executor.run(empty) == []
    assert empty.graphs == []


def test_without_a_program_the_current_one_is_run() -> None:
    with program_guard(new_program()):
        y = data("x", [2]) * 3
        np.testing.assert_array_equal(Executor("cpu").run(feed={"x": [1, 2]}, fetch_list=[y])[0], [3, 6])


def test_the_program_cache_is_accepted_and_a_program_is_captured_once_a_fetch_list() -> None:
    program = new_program()
    with program_guard(program):
        x = data("x", [2])
        y, z = x * 3, x - 1
    executor = Executor("cpu")
    for cache in (True, False, True):
        for fetches in ([y], [z, y], ["sub_0", "mul_0"]):
            results = executor.run(program, {"x": [1, 2]}, fetches, use_program_cache=cache)
            assert len(results) == len(fetches)
            np.testing.assert_array_equal(results[-1], [3, 6])
    assert len(program.graphs) == 2
    np.testing.assert_array_equal(results[0], [0, 1])


def test_only_the_latest_fetch_lists_stay_compiled() -> None:
    program = new_program()
    with program_guard(program):
        x = data("x", [1])
        variables = [x + number for number in range(9)]
    for number, variable in enumerate(variables):
        assert run(program, [variable], x=[0.0])[0] == number
    assert len(program._steps) == 8
    assert run(program, [variables[0]], x=[1.0])[0] == 1


@pytest.mark.parametrize("batch_sizes", [(2, 5, 1, 7, 2)])
def test_one_program_takes_batches_of_any_size(batch_sizes: tuple[int, ...]) -> None:
    program = new_program()
    with program_guard(program):
        net = nn.Linear(4, 2)
        y = net(data("x", [None, 4]))
        trained = program.clone()
        static.minimize(SGD(net.parameters(), lr=0.1), trained.variable(y).mean())
    for size in batch_sizes:
        x = torch.randn(size, 4)
        weight, bias = net.weight.detach().clone(), net.bias.detach().clone()
        np.testing.assert_allclose(run(program, [y], x=x)[0], (x @ weight.T + bias).numpy(), atol=1e-6)
        np.testing.assert_allclose(run(trained, [y], x=x)[0], (x @ weight.T + bias).numpy(), atol=1e-6)
        torch.testing.assert_close(net.weight.detach(), weight - 0.1 * x.mean(0) / 2)


@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "nested"])
def test_a_module_returns_variables_in_the_container_it_returns_tensors_in(kind: str) -> None:
    with program_guard(new_program()):
        results = TwoResults(kind)(data("x", [None, 2]), shift=3.0)
    if kind == "nested":
        assert results["b"] == "text"
        assert results["a"][1][1] is None
        plus, times = results["a"][0], results["a"][1][0]
    else:
        assert type(results).__name__ == kind
        plus, times = (results["plus"], results["times"]) if kind == "dict" else results
    assert {v.name for v in (plus, times)} == {"tworesults_0", "tworesults_1"}
    one, two = run(plus._program, [plus, times], x=[[1, 2]])
    np.testing.assert_array_equal(one, [[4, 5]])
    np.testing.assert_array_equal(two, [[2, 4]])


def test_what_is_fetched_is_not_what_was_fed() -> None:
    with program_guard(new_program()):
        x = data("x", [2])
    fed = np.zeros(2, "float32")
    run(x._program, [x, x + 1], x=fed)[0][:] = 5
    assert not fed.any()


@pytest.mark.parametrize("trains", [False, True])
def test_what_is_fed_is_not_changed(trains: bool) -> None:
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 1))
    with program_guard(new_program()):
        loss = net(data("x", [None, 2])).mean()
        if trains:
            static.minimize(SGD(net.parameters(), lr=0.1), loss)
    fed = torch.full((3, 2), -1.0)
    run(loss._program, [loss], x=fed)
    assert (fed == -1).all()


def test_a_forward_asks_for_no_gradients_and_a_new_backend_is_taken_before_the_first_run() -> None:
    program = new_program()
    program.backend = "eager"
    with program_guard(program):
        net = nn.Linear(4, 2)
        y = net(data("x", [None, 4]))
    (result,) = Executor("cpu").run(program, {"x": np.ones((1, 4))}, [y], return_numpy=False)
    assert not result.requires_grad
    assert program.graphs == []


def test_a_new_backend_is_taken_after_a_run_too() -> None:
    program = new_program()
    with program_guard(program):
        y = data("x", [1]) + 1
    run(program, [y], x=[1.0])
    program.backend = "eager"
    run(program, [y], x=[1.0])
    assert program.graphs == []


def test_a_program_without_mixed_precision_trains_like_a_plain_loop_bit_for_bit() -> None:
    torch.manual_seed(0)
    net = Net()
    net.drop.p = 0.0
    twin = copy.deepcopy(net)
    program = new_program()
    with program_guard(program):
        x, y = data("x", [None, 4]), data("y", [None], "int64")
        logits = net(x)
        loss = F.cross_entropy(logits, y)
        static.minimize(SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01), loss)
    # fused: the kernel that programs step with; torch's other ones round once more a step
    optimizer = SGD(twin.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, fused=True)
    for _ in range(5):
        inputs, labels = torch.randn(8, 4), torch.randint(3, (8,))
        results = run(program, [loss, "net_0"], x=inputs, y=labels)
        outputs = twin(inputs)
        twin_loss = F.cross_entropy(outputs, labels)
        optimizer.zero_grad()
        twin_loss.backward()
        optimizer.step()
        assert results[0] == twin_loss.item()
        np.testing.assert_array_equal(results[1], outputs.detach().numpy())
    for name, value in net.state_dict().items():
        if name != "norm.num_batches_tracked":  # test_writing_a_program_counts_no_batch
            assert torch.equal(value, twin.state_dict()[name]), name
    assert all(p.grad is None for p in net.parameters())


def test_gradients_are_clipped_to_the_norm_that_minimize_takes() -> None:
    net = nn.Linear(4, 1)
    twin = copy.deepcopy(net)
    with program_guard(new_program()):
        loss = net(data("x", [None, 4])).mean()
        static.minimize(SGD(net.parameters(), lr=1.0), loss, max_norm=0.25)
    x = torch.full((2, 4), 3.0)
    assert run(loss._program, [], x=x) == []
    twin(x).mean().backward()
    nn.utils.clip_grad_norm_(twin.parameters(), 0.25)
    torch.testing.assert_close(net.weight.detach(), (twin.weight - twin.weight.grad).detach())


def test_a_plain_parameter_is_trained_with_the_modules() -> None:
    weight, shift = nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.zeros(2))
    with program_guard(new_program()):
        x = data("x", [None, 4])
        loss = (x @ weight + shift).mean()
        assert [id(p) for p in x._program.parameters()] == [id(weight), id(shift)]
        static.minimize(SGD([weight, shift], lr=1.0), loss)
    assert run(x._program, [loss], x=np.ones((3, 4)))[0] == 4
    torch.testing.assert_close(weight.detach(), torch.full((4, 2), 0.5))
    torch.testing.assert_close(shift.detach(), torch.full((2,), -0.5))
    assert run(x._program, [loss], x=np.ones((3, 4)))[0] == 1.5


def test_statistics_are_updated_once_a_run() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2, momentum=0.5), nn.Linear(2, 1))
    with program_guard(new_program()):
        loss = net(data("x", [None, 2])).mean()
        static.minimize(SGD(net.parameters(), lr=0.1), loss)
    written = net[0].num_batches_tracked.item()
    for number in range(1, 4):
        run(loss._program, [loss], x=[[4.0, 0.0], [8.0, 0.0]])
        assert net[0].num_batches_tracked.item() == written + number
        assert net[0].running_mean[0].item() == 6 * (1 - 0.5**number)


# ---------------------------------------------------------------------------------------------- copies


def test_a_copy_for_test_runs_in_evaluation_and_leaves_modes_as_they_were() -> None:
    program = new_program()
    net = Net()
    net.first.eval()
    with program_guard(program):
        x, y = data("x", [None, 4]), data("y", [None], "int64")
        logits = net(x)
        loss = F.cross_entropy(logits, y)
        test = program.clone(for_test=True)
        static.minimize(SGD(net.parameters(), lr=0.1), loss)
    feed = {"x": torch.randn(6, 4), "y": torch.zeros(6)}
    run(program, [loss], **feed)
    count, mean = net.norm.num_batches_tracked.item(), net.norm.running_mean.clone()
    first, again = (run(test, [logits], **feed)[0] for _ in range(2))
    assert net.norm.num_batches_tracked.item() == count
    assert torch.equal(net.norm.running_mean, mean)
    assert [net.training, net.first.training, net.drop.training] == [True, False, True]
    np.testing.assert_array_equal(first, again)
    expected = copy.deepcopy(net).eval()(feed["x"]).detach().numpy()
    np.testing.assert_allclose(first, expected, atol=1e-6)
    assert (run(program, [logits], **feed)[0] != expected).any()


def test_a_copy_has_no_optimizer_calls_the_same_modules_and_grows_by_itself() -> None:
    program = new_program()
    with program_guard(program):
        net = nn.Linear(4, 2)
        y = net(data("x", [None, 4]))
        static.minimize(SGD(net.parameters(), lr=0.1), y.mean())
    other = program.clone()
    assert other.training is None
    assert other.modules == [net]
    assert other.backend == "aot_eager"
    extra = other.variable("linear_0") + 1
    assert isinstance(extra, Variable)
    before = net.weight.detach().clone()
    np.testing.assert_allclose(*(a + b for a, b in zip(run(other, [y, extra], x=np.ones((1, 4))), (1, 0), strict=True)))
    assert torch.equal(net.weight, before)
    with pytest.raises(ProgramError, match="unknown variable 'add_0'"):
        program.variable("add_0")


# ---------------------------------------------------------------------------------------------- files


@pytest.fixture
def trained() -> tuple[Program, Net]:
    """A program with a label, trained for a step."""
    program, net = new_program(), Net()
    with program_guard(program):
        x, y = data("x", [None, 4]), data("label", [None], "int64")
        logits = net(x)
        logits.softmax(1)
        loss = F.cross_entropy(logits, y)
        static.minimize(SGD(net.parameters(), lr=0.1), loss)
    run(program, [loss], x=torch.randn(8, 4), label=torch.zeros(8))
    return program, net


def test_a_saved_program_gives_what_the_model_gives_in_evaluation(trained: tuple[Program, Net], tmp_path: Path) -> None:
    program, net = trained
    program.save(tmp_path / "net.pt2", ["softmax_0", program.variable("net_0")])
    assert net.training
    assert Path(__file__).name.encode() not in (tmp_path / "net.pt2").read_bytes()  # nor where it was written
    loaded = Program.load(tmp_path / "net.pt2")
    loaded.backend = "aot_eager"
    assert [repr(v) for v in loaded.inputs] == ["Variable('x', shape=[-1, 4], dtype=float32)"]
    expected = copy.deepcopy(net).eval()
    for size in (3, 6):
        x = torch.randn(size, 4)
        probabilities, logits = run(loaded, ["softmax_0", "net_0"], x=x)
        np.testing.assert_allclose(logits, expected(x).detach().numpy(), atol=ATOL_SAVED)
        np.testing.assert_allclose(probabilities, expected(x).softmax(1).detach().numpy(), atol=ATOL_SAVED)


def test_a_loaded_program_can_be_saved_again(trained: tuple[Program, Net], tmp_path: Path) -> None:
    program, net = trained
    program.save(tmp_path / "one.pt2", ["net_0"])
    Program.load(tmp_path / "one.pt2").save(tmp_path / "two.pt2", ["net_0"])
    loaded = Program.load(tmp_path / "two.pt2")
    loaded.backend = "aot_eager"
    x = torch.randn(3, 4)
    np.testing.assert_allclose(run(loaded, ["net_0"], x=x)[0], net.eval()(x).detach().numpy(), atol=ATOL_SAVED)


def test_a_loaded_program_has_a_copy_for_test(trained: tuple[Program, Net], tmp_path: Path) -> None:
    trained[0].save(tmp_path / "net.pt2", ["net_0"])
    loaded = Program.load(tmp_path / "net.pt2")
    loaded.backend = "aot_eager"
    assert run(loaded.clone(for_test=True), ["net_0"], x=np.ones((2, 4)))[0].shape == (2, 3)


def test_masters_are_saved_for_a_model_with_half_weights(tmp_path: Path) -> None:
    program, net = new_program(), Net()
    with program_guard(program):
        logits = net(data("x", [None, 4]))
        optimizer = static.amp.decorate(SGD(net.parameters(), lr=1e-3), level="O2")
        optimizer.minimize(logits.pow(2).mean())
    optimizer.amp_init("cpu")
    run(program, [logits], x=torch.randn(8, 4))
    assert net.first.weight.dtype == torch.float16
    program.save(tmp_path / "net.pt2", [logits])
    assert net.first.weight.dtype == torch.float16
    twin = Net().eval()
    twin.load_state_dict(net.state_dict())
    assert not torch.equal(twin.first.weight, net.first.weight.float())  # or masters and half weights are the same
    loaded = Program.load(tmp_path / "net.pt2")
    loaded.backend = "aot_eager"
    x = torch.randn(5, 4)
    np.testing.assert_allclose(run(loaded, ["net_0"], x=x)[0], twin(x).detach().numpy(), atol=ATOL_SAVED)


def test_an_inference_module_takes_what_is_needed_and_evaluates_in_float32(trained: tuple[Program, Net]) -> None:
    program, net = trained
    module = program.inference_module(["softmax_0", "net_0"])
    x = torch.randn(3, 4)
    probabilities, logits = module(x)
    torch.testing.assert_close(logits, copy.deepcopy(net).eval()(x))
    torch.testing.assert_close(probabilities, logits.softmax(1))
    assert not {id(p) for p in module.parameters()} & {id(p) for p in net.parameters()}


def test_a_convolution_of_images_of_any_size_can_be_saved(tmp_path: Path) -> None:
    net = nn.Conv2d(3, 2, 3, stride=2)
    with program_guard(new_program()):
        y = net(data("x", [None, 3, None, None]))
    y._program.save(tmp_path / "net.pt2", [y])
    loaded = Program.load(tmp_path / "net.pt2")
    loaded.backend = "aot_eager"
    x = torch.randn(2, 3, 17, 9)
    np.testing.assert_allclose(run(loaded, [y.name], x=x)[0], net(x).detach().numpy(), atol=ATOL_SAVED)


def test_an_input_is_no_result_to_be_saved(tmp_path: Path) -> None:
    with program_guard(new_program()):
        x = data("x", [None, 2])
        y = x + 1
    with pytest.raises(ProgramError, match="'x' is an input"):
        x._program.save(tmp_path / "net.pt2", [x, y])


def test_what_torch_cannot_export_is_named(tmp_path: Path) -> None:
    class Unwilling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if torch.compiler.is_exporting():
                raise RuntimeError("stays here")
            return x

    with program_guard(new_program()):
        y = Unwilling()(data("x", [None, 4])) + 1
    with pytest.raises(RunError, match="the program cannot be exported: stays here"):
        y._program.save(tmp_path / "net.pt2", [y])
    assert not list(tmp_path.iterdir())


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "net.pt2").write_bytes(b"no archive")
    with pytest.raises(DeployError, match=r"net\.pt2: is not a torch\.export program"):
        Program.load(tmp_path / "net.pt2")


def test_an_input_may_be_called_self_or_is_refused_when_it_is_made() -> None:
    with program_guard(new_program()):
        try:
            y = data("self", [1]) + 1
        except ProgramError:
            return
    assert Executor("cpu").run(y._program, {"self": [1.0]}, [y])[0] == 2


# ---------------------------------------------------------------------------------------------- looking at it


def test_operators_are_those_of_the_graph_that_ran_last(trained: tuple[Program, Net]) -> None:
    program, _ = trained
    totals = program.operators().totals()
    assert totals["addmm"] == (0, 0, 2, 0)
    rows = {(row.module, row.phase) for row in program.operators().rows if row.op == "addmm"}
    assert rows == {("Net_0.first", "forward"), ("Net_0.last", "forward")}
    assert program.operators(include_views=True).totals()["t"][2] > 0
    assert "t" not in totals
    run(program, ["softmax_0"], x=np.ones((2, 4)), label=[0, 0])
    assert program.operators().totals()["_softmax"] == (0, 0, 1, 0)
    assert "_softmax" not in totals


def test_operators_of_a_forward_are_those_of_a_forward(trained: tuple[Program, Net]) -> None:
    program = trained[0].clone(for_test=True)
    run(program, ["net_0"], x=np.ones((2, 4)), label=[0, 0])
    assert {row.phase for row in program.operators().rows} == {"forward"}


def test_a_program_is_printed_as_it_was_written_and_captured(
    trained: tuple[Program, Net], capsys: pytest.CaptureFixture[str]
) -> None:
    program, _ = trained
    text = str(program)
    assert text.startswith("program, O0:\n")
    for part in (
        "placeholder[target=label]",
        "target=Net_0",
        "minimize cross_entropy_0 by SGD",
        "backward:",
        "aten.addmm",
    ):
        assert part in text
    assert text.index("minimize") < text.index("aten.addmm")
    program.print()
    assert capsys.readouterr().out == text + "\n"
    unrun = program.clone()
    assert "target=Net_0" in str(unrun)
    assert "minimize" not in str(unrun)
    assert "aten." not in str(unrun)
