"""Modules and functions that are captured when they are called."""

import copy
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graph_backends import skip_without_compiler, use_backend
from mezzo import static
from mezzo.amp import Policy, auto_cast, decorate
from mezzo.static import (
    CaptureError,
    InputSpec,
    ProgramError,
    StaticFunction,
    _region,
    compile_step,
    static_forward,
    to_static,
)
from mezzo.static._traced_regions import regions_traced


@pytest.fixture(autouse=True)
def leave_no_trace() -> Iterator[None]:
    yield
    static.disable_static()
    torch._dynamo.reset()


class Net(nn.Module):
    """A convolution, statistics and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def captured(module: nn.Module, **options: Any) -> nn.Module:
    result = to_static(module, backend="aot_eager", **options)
    assert isinstance(result, nn.Module)
    return result


def add(x: Tensor, y: Tensor, *, times: float = 1.0) -> Tensor:
    """Return a sum."""
    return (x + y) * times


# ---------------------------------------------------------------------------------------------- modules


def test_a_module_stays_the_object_it_is() -> None:
    net = Net()
    names, kind = list(net.state_dict()), type(net)
    assert captured(net) is net
    assert type(net) is kind
    assert list(net.state_dict()) == names
    assert [name for name, _ in net.named_modules()] == ["", "conv", "norm", "head"]


def test_gradients_and_statistics_of_a_captured_module_equal_the_eager_ones_bit_for_bit() -> None:
    net = Net()
    twin = copy.deepcopy(net)
    captured(net)
    x = torch.randn(4, 3, 6, 6)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [net(inputs[0]), twin(inputs[1])]
    for output in outputs:
        output.pow(2).sum().backward()
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    for one, other in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    for name, value in net.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name]), name
    assert net.norm.num_batches_tracked.item() == 1
    assert len(static_forward(net).graphs) == 1


def test_a_module_is_captured_once_for_a_kind_of_input_and_follows_its_weights() -> None:
    net = captured(nn.Linear(2, 1, bias=False))
    for value in (1.0, 2.0, 3.0):
        with torch.no_grad():
            net.weight.fill_(value)
        assert net(torch.ones(3, 2)).unique().item() == 2 * value
    assert len(static_forward(net).graphs) == 1
    for size in (4, 5, 6):  # the first other size leaves it free
        assert net(torch.ones(size, 2)).shape == (size, 1)
    assert len(static_forward(net).graphs) == 2


def test_copies_and_pickles_of_a_module_are_not_captured() -> None:
    net = captured(nn.Linear(2, 1))
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):  # noqa: S301  our own bytes
        x = torch.ones(3, 2)
        assert torch.equal(other(x), net(x))
        with pytest.raises(ProgramError, match="this Linear is not captured"):
            static_forward(other)
    assert len(static_forward(net).graphs) == 1


def test_hooks_of_a_captured_module_run() -> None:
    net = captured(nn.Linear(2, 1))
    net.register_forward_hook(lambda module, args, output: output + 100)
    assert net(torch.zeros(1, 2)).item() > 90


@pytest.mark.parametrize(("only_training", "graphs"), [(True, 1), (False, 2)])
def test_a_module_for_training_only_is_called_as_it_is_in_evaluation(only_training: bool, graphs: int) -> None:
    net = captured(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.99)), only_training=only_training)
    x = torch.ones(3, 2)
    net(x)
    assert len(static_forward(net).graphs) == 1
    torch.testing.assert_close(net.eval()(x), net[0](x))
    assert len(static_forward(net).graphs) == graphs


def test_the_region_around_a_call_decides_its_precision() -> None:
    net = captured(nn.Linear(4, 4))
    x = torch.randn(2, 4)
    regions: list[tuple[dict[str, Any], torch.dtype, tuple[int, ...]]] = [
        ({"level": "O1", "dtype": "float16", "cpu_compute": "native"}, torch.float16, (1, 0, 0, 0)),
        ({"level": "O1", "dtype": "bfloat16", "cpu_compute": "native"}, torch.bfloat16, (0, 1, 0, 0)),
    ]
    for options, dtype, counts in regions:
        with auto_cast(**options):
            assert net(x).dtype == dtype
        assert static_forward(net).operators().totals()["addmm"] == counts
    assert net(x).dtype == torch.float32
    assert static_forward(net).operators().totals()["addmm"] == (0, 0, 1, 0)
    for options, dtype, _ in regions:  # what was captured is found again
        with auto_cast(**options):
            assert net(x).dtype == dtype
    assert len(static_forward(net).graphs) == 3


@pytest.mark.parametrize("custom_black_list", [None, ["linear"]])
def test_the_lists_of_a_region_are_followed(custom_black_list: list[str] | None) -> None:
    net = captured(nn.Linear(4, 4))
    x = torch.randn(2, 4)
    with auto_cast(level="O1"):
        net(x)
    with auto_cast(level="O1", custom_black_list=custom_black_list):
        assert net(x).dtype == (torch.float32 if custom_black_list else torch.float16)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_in_mixed_precision_equal_the_eager_ones_bit_for_bit(level: str) -> None:
    net = Net()
    twin = copy.deepcopy(net)
    captured(net)
    x = torch.randn(4, 3, 6, 6)
    outputs = []
    for model in (net, twin):
        with auto_cast(level=level):
            outputs.append(model(x))
        outputs[-1].float().pow(2).sum().backward()
    assert torch.equal(outputs[0], outputs[1])
    for one, other in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_captured_module_is_called_by_a_program(level: str) -> None:
    """A decorated class has a call of its own, which Dynamo traces in full."""
    layer = nn.Linear(4, 2)
    net = captured(layer if level == "O0" else decorate(nn.Sequential(layer), level=level))
    program = static.Program()
    program.backend = "aot_eager"
    with static.program_guard(program):
        y = net(static.data("x", [None, 4]))
    (result,) = static.Executor("cpu").run(program, {"x": np.ones((3, 4))}, [y])
    with auto_cast(level=level):
        expected = net(torch.ones(3, 4)).detach().float().numpy()
    atol = 1e-6 if level == "O0" else 2**-10  # the last bit of float16 below 2
    np.testing.assert_allclose(result, expected, atol=atol)


def test_a_module_is_captured_while_a_program_is_written() -> None:
    with static.program_guard(static.Program()):
        static.data("x", [None, 4])
        net = captured(nn.Sequential(nn.Linear(4, 2), nn.ReLU()))
        assert net(torch.ones(3, 4)).shape == (3, 2)
    assert static_forward(net).operators().totals()["addmm"] == (0, 0, 1, 0)


# ---------------------------------------------------------------------------------------------- functions


@pytest.mark.parametrize("how", ["call", "decorator", "decorator with arguments"])
def test_a_function_is_captured_and_keeps_its_name(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "call":
        function = to_static(add, backend="aot_eager")
    elif how == "decorator":
        use_backend(monkeypatch, "aot_eager")

        @to_static
        def function(x: Tensor, y: Tensor, *, times: float = 1.0) -> Tensor:
            """Return a sum."""
            return add(x, y, times=times)

    else:

        @to_static(backend="aot_eager")
        def function(x: Tensor, y: Tensor, *, times: float = 1.0) -> Tensor:
            """Return a sum."""
            return add(x, y, times=times)

    assert isinstance(function, StaticFunction)
    assert function.__name__ == ("add" if how == "call" else "function")
    assert function.__doc__ == "Return a sum."
    x = torch.arange(3.0, requires_grad=True)
    result = function(x, torch.ones(3), times=2.0)
    assert result.tolist() == [2, 4, 6]
    result.sum().backward()
    assert x.grad.tolist() == [2, 2, 2]
    assert len(function.graphs) == 1
    assert function.operators().totals()["add"] == (0, 0, 1, 0)


def test_a_function_follows_the_region_around_its_call() -> None:
    multiply = to_static(torch.matmul, backend="aot_eager")
    x = torch.randn(2, 2)
    with auto_cast(level="O1", dtype="bfloat16"):
        assert multiply(x, x).dtype == torch.bfloat16
    with auto_cast(level="O1"):
        assert multiply(x, x).dtype == torch.float16
    assert torch.equal(multiply(x, x), x @ x)


def test_views_are_counted_if_asked() -> None:
    function = to_static(lambda x: x.reshape(4).exp(), backend="aot_eager")
    function(torch.ones(2, 2))
    assert set(function.operators().totals()) == {"exp"}
    assert set(function.operators(include_views=True).totals()) == {"exp", "view"}


def test_a_method_is_captured() -> None:
    class Double(nn.Module):
        @to_static(backend="aot_eager")
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    assert Double()(torch.ones(2)).tolist() == [2, 2]


# ---------------------------------------------------------------------------------------------- inputs


def test_inputs_are_cast_to_their_specification() -> None:
    specs = [InputSpec([None, 2]), InputSpec([2], "float16", "y")]
    function = to_static(lambda x, y, z: (x, y, z), input_spec=specs, backend="aot_eager")
    results = function(torch.ones(5, 2, dtype=torch.int64), torch.ones(2), torch.ones(1, dtype=torch.float64))
    assert [result.dtype for result in results] == [torch.float32, torch.float16, torch.float64]
    net = captured(nn.Linear(2, 1), input_spec=specs[:1])
    assert net(torch.ones(3, 2, dtype=torch.float64)).dtype == torch.float32


def test_what_is_no_tensor_passes_a_specification() -> None:
    function = to_static(F.softmax, input_spec=[InputSpec([2]), InputSpec([1])], backend="aot_eager")
    assert function(torch.zeros(2), 0).tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("spec", "shape", "message"),
    [
        (InputSpec([None, 2], name="x"), (3, 4), r"^x has shape \[3, 4\]; it was declared as \[-1, 2\]"),
        (InputSpec([3, 2]), (3, 2, 1), r"^the input has shape \[3, 2, 1\]; it was declared as \[3, 2\]"),
    ],
)
def test_an_input_of_another_shape_is_refused(spec: InputSpec, shape: tuple[int, ...], message: str) -> None:
    for target in (nn.Identity(), torch.neg):
        with pytest.raises(ProgramError, match=message):
            to_static(target, input_spec=[spec], backend="aot_eager")(torch.ones(shape))


# ---------------------------------------------------------------------------------------------- what is said


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: to_static(3), TypeError, "to_static takes a module or a function; got int"),
        (lambda: to_static(add, backend="aot"), ValueError, "unknown backend 'aot'"),
        (lambda: static_forward(Net()), ProgramError, r"this Net is not captured: call mezzo\.static\.to_static"),
        (
            lambda: to_static(add, backend="aot_eager").operators(),
            ProgramError,
            "no graph was captured yet: call the function once",
        ),
    ],
)
def test_a_mistake_is_explained(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_function_that_is_not_one_graph_is_refused_with_its_line() -> None:
    @to_static(backend="aot_eager")
    def choose(x: Tensor) -> Tensor:
        return x if x.sum().item() > 0 else -x

    with pytest.raises(static.CaptureError, match=r"cannot be captured as one graph; it stops at .*`return x if"):
        choose(torch.ones(2))


def test_without_capture_a_function_runs_as_it_is() -> None:
    seen: list[int] = []

    @to_static(backend="eager")
    def count(x: Tensor) -> Tensor:
        seen.append(len(seen))
        return x

    for _ in range(3):
        count(torch.ones(2))
    assert seen == [0, 1, 2]
    assert count.graphs == []


# ---------------------------------------------------------------------------------------------- regions inside


class WithRegions(nn.Module):
    """Enters regions in its forward, as models do that decide their own precision."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        with auto_cast(**self.options):
            hidden = torch.relu(self.norm(self.first(x)))
            with auto_cast(enable=False):
                scores = torch.softmax(hidden.float(), -1)
            hidden = hidden * scores
        with auto_cast(True, None, ["relu"], "O2", "bfloat16"):
            return self.last(torch.relu(hidden)).float()


REGIONS: list[dict[str, Any]] = [
    {"dtype": "bfloat16"},
    {"level": "O2", "dtype": torch.bfloat16},
    {"level": "O2", "dtype": "float16", "use_promote": True},
    {"level": "OD", "dtype": "bfloat16"},
    {"enable": False},
    {"dtype": "bfloat16", "custom_white_list": {"relu"}, "custom_black_list": ["linear"]},
    {"policy": Policy.create("O2", "bfloat16", custom_black_list=["linear"])},
]


@pytest.mark.parametrize("options", REGIONS, ids=lambda options: ", ".join(map(str, options)))
def test_regions_in_a_forward_are_captured_in_one_graph_with_the_numbers_of_eager(options: dict[str, Any]) -> None:
    net = WithRegions(**options)
    twin = copy.deepcopy(net)
    captured(net)
    for size in (3, 5):
        x = torch.randn(size, 8)
        output, expected = net(x), twin(x)
        assert torch.equal(output, expected)
        output.square().sum().backward()
        expected.square().sum().backward()
        for one, other in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
    assert not torch.is_autocast_enabled("cpu")
    graphs = static_forward(net).graphs
    assert len(graphs) == 2  # each shape is one graph
    assert "_to_copy" in str(graphs[0])


def test_a_function_with_a_region_keeps_the_region_around_its_call_apart() -> None:
    def product(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        outside = x @ y
        with auto_cast(dtype="bfloat16"):
            return outside, x @ y

    static_product = to_static(product, backend="aot_eager")
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    assert [part.dtype for part in static_product(x, y)] == [torch.float32, torch.bfloat16]
    with auto_cast(dtype="float16"):
        assert [part.dtype for part in static_product(x, y)] == [torch.float16, torch.bfloat16]
    assert [part.dtype for part in static_product(x, y)] == [torch.float32, torch.bfloat16]
    assert len(static_product.graphs) == 2


def test_a_region_of_another_dtype_is_captured_anew() -> None:
    net = WithRegions(dtype="bfloat16")
    twin = copy.deepcopy(net)
    captured(net)
    x = torch.randn(3, 8)
    for dtype in ("bfloat16", "float16", "bfloat16"):
        net.options = twin.options = {"dtype": dtype}
        assert torch.equal(net(x), twin(x))
    assert len(static_forward(net).graphs) == 2


@pytest.mark.slow
def test_regions_in_a_forward_are_compiled_by_inductor() -> None:
    skip_without_compiler()
    net = WithRegions(dtype="bfloat16")
    twin = copy.deepcopy(net)
    to_static(net)
    x = torch.randn(3, 8)
    torch.testing.assert_close(net(x), twin(x), rtol=2**-7, atol=2**-7)  # Inductor leaves out roundings to bfloat16


def test_a_step_whose_model_has_regions_is_captured() -> None:
    net = WithRegions(dtype="bfloat16")
    twin = copy.deepcopy(net)
    step = compile_step(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.1), backend="aot_eager")
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(2):
        x, y = torch.randn(3, 8), torch.randn(3, 4)
        loss = F.mse_loss(twin(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(step(x, y), loss.detach())


def test_a_region_that_was_made_elsewhere_is_refused_with_advice() -> None:
    region = auto_cast(dtype="bfloat16")

    @to_static(backend="aot_eager")
    def product(x: Tensor) -> Tensor:
        with region:
            return x @ x

    with pytest.raises(CaptureError, match=r"with region:.*write `with auto_cast\(\.\.\.\):`"):
        product(torch.ones(2, 2))
    assert auto_cast(dtype="bfloat16").policy.dtype == torch.bfloat16  # its methods are back


@pytest.mark.parametrize("enable", [True, False, "cpu", "cuda"])
def test_a_region_with_a_policy_keeps_its_other_arguments(enable: Any) -> None:
    policy = Policy.create("O1", "bfloat16")

    def product(x: Tensor, enable: Any) -> Tensor:
        with auto_cast(enable, policy=policy):
            return x @ x

    x = torch.randn(4, 4)
    expected = product(x, enable)
    assert expected.dtype == (torch.bfloat16 if enable in (True, "cpu") else torch.float32)
    assert torch.equal(to_static(product, backend="aot_eager")(x, enable), expected)


@pytest.mark.parametrize("wrong", [{"policy": Policy.create("O1"), "level": "O2"}, {"policy": "O2"}])
def test_a_region_that_is_refused_is_refused_in_captured_code(wrong: dict[str, Any]) -> None:
    @to_static(backend="aot_eager")
    def product(x: Tensor) -> Tensor:
        with auto_cast(**wrong):
            return x @ x

    with pytest.raises(CaptureError, match=r"give a policy, or level|must be a mezzo.amp.Policy"):
        product(torch.ones(2, 2))


def test_regions_for_one_device_and_for_all_are_kept_apart() -> None:
    def products(x: Tensor) -> tuple[Tensor, ...]:
        with auto_cast("cuda", dtype="bfloat16"):
            of_cuda = x @ x
        with auto_cast(dtype="bfloat16"):
            of_all = x @ x
        with auto_cast("cpu", dtype="bfloat16"):
            of_cpu = x @ x
        return of_cuda, of_all, of_cpu

    x = torch.randn(4, 4)
    expected = [torch.float32, torch.bfloat16, torch.bfloat16]
    assert [part.dtype for part in products(x)] == expected
    assert [part.dtype for part in to_static(products, backend="aot_eager")(x)] == expected


def test_other_threads_enter_regions_while_a_function_with_regions_is_captured() -> None:
    compiling, product_is_made = threading.Event(), threading.Event()

    def product() -> torch.dtype:
        compiling.wait(10)
        try:
            with auto_cast(policy=Policy.create("O1", "bfloat16")) as region:
                assert region.policy.level == "O1"
                return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        finally:
            product_is_made.set()

    @torch._dynamo.assume_constant_result
    def meet() -> int:
        """Let the other thread run while Dynamo traces this one."""
        compiling.set()
        product_is_made.wait(10)
        return 1

    @to_static(backend="aot_eager")
    def captured_product(x: Tensor) -> Tensor:
        with auto_cast(dtype="bfloat16"):
            return x @ x * meet()

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(product)
        assert captured_product(torch.ones(2, 2)).dtype is torch.bfloat16
        assert other.result() is torch.bfloat16
    assert product_is_made.is_set()


def test_another_threads_compiled_function_leaves_regions_alone_during_a_capture() -> None:
    def region_is_real() -> bool:
        @torch.compile(backend="eager")
        def product(x: Tensor) -> Tensor:
            with auto_cast(dtype="bfloat16"):
                return x @ x

        return product(torch.ones(2, 2)).dtype is torch.bfloat16 and not _region.thread_state.open

    with regions_traced(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(region_is_real).result()
