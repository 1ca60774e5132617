"""Mixed precision of programs, and what is said when a program cannot work."""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

import mezzo.amp
from mezzo import static
from mezzo.amp import GradScaler, auto_cast
from mezzo.devices import DeviceError
from mezzo.optim import master_of, stored_master
from mezzo.static import Executor, InputSpec, Program, ProgramError, data, program_guard
from mezzo.static.amp import CustomOpLists, MixedPrecisionOptimizer, NoGuardError, decorate, fp16_guard


@pytest.fixture(autouse=True)
def leave_no_trace() -> Iterator[None]:
    yield
    static.disable_static()
    torch._dynamo.reset()


class Net(nn.Module):
    """Linear layers; all but the first inside a guard if asked."""

    def __init__(self, guarded: bool = False) -> None:
        super().__init__()
        self.layers, self.guarded = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), guarded

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if self.guarded and number > 0:
                with fp16_guard():
                    x = layer(x)
            else:
                x = layer(x)
        return x


def sgd(net: nn.Module) -> SGD:
    return SGD(net.parameters(), lr=0.1)


def write(
    net: nn.Module, optimizer: Any = None, amp_lists: CustomOpLists | None = None, **options: Any
) -> tuple[Program, MixedPrecisionOptimizer]:
    """Return a program that trains a network on x and label, and its decorated optimizer."""
    program = Program()
    program.backend = "aot_eager"
    with program_guard(program):
        x, label = data("x", [None, 4]), data("label", [None, 4])
        loss = nn.functional.mse_loss(net(x), label)
        wrapped = decorate(sgd(net) if optimizer is None else optimizer, amp_lists, **options)
        wrapped.minimize(loss)
    return program, wrapped


def step(program: Program, seed: int = 0, **feed: Any) -> Any:
    rng = np.random.default_rng(seed)
    batch = {"x": rng.random((8, 4)), "label": rng.random((8, 4)), **feed}
    return Executor("cpu").run(program, batch, ["mse_loss_0"])[0]


def layers_in_half(program: Program) -> dict[str, bool]:
    """Return, for each linear layer, whether its product is float16."""
    return {row.module: row.fp16 == 1 for row in program.operators().rows if row.op == "addmm"}


# ---------------------------------------------------------------------------------------------- decorate


def test_defaults_are_those_of_the_scaler() -> None:
    given, own = (inspect.signature(function).parameters for function in (decorate, GradScaler))
    shared = [name for name in given if name in own]
    assert len(shared) == 6
    assert {n: given[n].default for n in shared if n != "use_dynamic_loss_scaling"} == {
        n: own[n].default for n in shared if n != "use_dynamic_loss_scaling"
    }
    assert decorate(sgd(Net())).scaler.state_dict() == GradScaler().state_dict()
    assert decorate(sgd(Net())).scaler.is_use_dynamic_loss_scaling()


def test_settings_of_the_scale_reach_the_scaler() -> None:
    settings: dict[str, Any] = {
        "init_loss_scaling": 64.0,
        "incr_every_n_steps": 3,
        "decr_every_n_nan_or_inf": 1,
        "incr_ratio": 4.0,
        "decr_ratio": 0.25,
    }
    scaler = decorate(sgd(Net()), **settings).scaler
    assert scaler.state_dict() == GradScaler(**settings).state_dict()
    assert not decorate(sgd(Net()), use_dynamic_loss_scaling=False).scaler.is_use_dynamic_loss_scaling()


FP16, BF16 = torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("options", "level", "dtype", "use_guard"),
    [
        ({}, "O1", FP16, False),
        ({"level": "OD"}, "OD", FP16, False),
        ({"level": "O2"}, "O2", FP16, False),
        ({"level": "O2", "use_fp16_guard": True}, "O2", FP16, True),
        ({"level": "O1", "use_amp_guard": True}, "O1", FP16, True),
        ({"level": "O0"}, "O0", FP16, False),
        ({"use_pure_fp16": True}, "O2", FP16, True),
        ({"use_pure_fp16": True, "use_fp16_guard": False}, "O2", FP16, False),
        ({"use_pure_fp16": True, "use_amp_guard": False}, "O2", FP16, False),
        ({"use_pure_fp16": False}, "O1", FP16, False),
        ({"use_pure_fp16": False, "use_fp16_guard": True}, "O1", FP16, True),
        ({"use_bf16": True}, "O1", BF16, False),
        ({"level": "O2", "dtype": "bfloat16"}, "O2", BF16, False),
        ({"use_pure_fp16": True, "use_bf16": True}, "O2", BF16, True),
    ],
)
def test_options_become_a_precision(options: dict[str, Any], level: str, dtype: torch.dtype, use_guard: bool) -> None:
    wrapped = decorate(sgd(Net()), **options)
    policy = wrapped.precision.policy
    assert policy is not None
    assert (policy.level, policy.dtype, wrapped.precision.use_guard) == (level, dtype, use_guard)
    assert wrapped.scaler.is_enable() == (dtype is FP16 and level != "O0")


def test_bfloat16_has_a_scale_if_it_is_asked_for() -> None:
    assert decorate(sgd(Net()), use_bf16=True, use_dynamic_loss_scaling=True).scaler.is_enable()


def test_lists_promotion_and_cpu_arithmetic_reach_the_policy() -> None:
    lists = CustomOpLists(["softmax"], ["linear"], ["x"])
    wrapped = decorate(sgd(Net()), lists, use_promote=True, cpu_compute="native")
    policy = wrapped.precision.policy
    assert policy == mezzo.amp.Policy.create("O1", "float16", ["softmax"], ["linear"], True, "native")
    assert wrapped.precision.float32_names == {"x"}


def test_what_is_not_its_own_is_the_optimizers() -> None:
    optimizer = sgd(Net())
    wrapped = decorate(optimizer)
    assert wrapped.param_groups is optimizer.param_groups
    assert wrapped.state_dict() == optimizer.state_dict()


def test_a_decorated_optimizer_can_be_copied() -> None:
    assert copy.copy(decorate(sgd(Net()))).defaults["lr"] == 0.1


@pytest.mark.parametrize("use_promote", [True, False])
def test_explicit_float32_is_kept_at_o2_where_promotion_is_on(use_promote: bool) -> None:
    """The norm of T5 and Llama: squares of 300 and above do not fit into float16."""
    net = nn.Linear(4, 4)
    nn.init.eye_(net.weight)
    nn.init.zeros_(net.bias)
    program = Program()
    program.backend = "aot_eager"
    with program_guard(program):
        hidden = net(data("x", [None, 4])).float()
        variance = hidden.pow(2).mean(-1, keepdim=True)
        wrapped = decorate(sgd(net), level="O2", use_promote=use_promote, cpu_compute="native")
        wrapped.minimize((hidden * torch.rsqrt(variance + 1e-6)).sum())
    wrapped.amp_init("cpu")
    [seen] = Executor("cpu").run(program, {"x": np.full((2, 4), 300.0)}, [variance])
    assert seen.tolist() == [[90000.0 if use_promote else np.inf]] * 2


# ---------------------------------------------------------------------------------------------- guards and names


def test_the_guard_decides_which_weights_and_operators_are_half() -> None:
    net = Net(guarded=True)
    program, optimizer = write(net, use_pure_fp16=True, cpu_compute="native")
    optimizer.amp_init("cpu")
    assert [layer.weight.dtype for layer in net.layers] == [torch.float32, FP16, FP16]
    assert [layer.bias.dtype for layer in net.layers] == [torch.float32, FP16, FP16]
    step(program)
    assert layers_in_half(program) == {"Net_0.layers.0": False, "Net_0.layers.1": True, "Net_0.layers.2": True}
    assert str(program).startswith("program, O2 float16, inside fp16_guard only:")


@pytest.mark.parametrize(
    ("options", "names", "in_half"),
    [
        ({"use_pure_fp16": True}, [], [False, True, True]),
        ({"level": "O2"}, ["layers.1.bias"], [True, False, True]),
    ],
)
def test_operators_are_float32_by_guard_and_name_where_weights_were_not_prepared(
    options: dict[str, Any], names: list[str], in_half: list[bool]
) -> None:
    """Without amp_init no layer is left out by itself: the captured graph alone decides."""
    lists = CustomOpLists(custom_black_varnames=names)
    program, _ = write(Net(guarded=True), amp_lists=lists, cpu_compute="native", **options)
    with pytest.warns(UserWarning, match="amp_init was not called"):
        step(program)
    assert list(layers_in_half(program).values()) == in_half


def test_calls_are_written_inside_a_guard_too() -> None:
    program, first, second = Program(), nn.Linear(4, 4), nn.Linear(4, 4)
    program.backend = "aot_eager"
    with program_guard(program):
        hidden = first(data("x", [None, 4]))
        with fp16_guard():
            hidden = second(hidden)
        optimizer = decorate(
            SGD([*first.parameters(), *second.parameters()], lr=0.1), use_pure_fp16=True, cpu_compute="native"
        )
        optimizer.minimize(hidden.pow(2).mean())
    optimizer.amp_init("cpu")
    assert [first.weight.dtype, second.weight.dtype] == [torch.float32, FP16]
    Executor("cpu").run(program, {"x": np.ones((2, 4))})
    assert sorted(layers_in_half(program).values()) == [False, True]


@pytest.mark.parametrize("guarded", [True, False])
def test_without_the_option_guards_do_nothing(guarded: bool) -> None:
    net = Net(guarded)
    program, optimizer = write(net, level="O2", cpu_compute="native")
    optimizer.amp_init("cpu")
    step(program)
    assert {p.dtype for p in net.parameters()} == {FP16}
    assert all(layers_in_half(program).values())


@pytest.mark.parametrize("kind", ["of the program", "of the module"])
def test_a_parameter_outside_the_guard_leaves_the_layers_inside_half(kind: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.layer = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.scale
            with fp16_guard():
                return self.layer(x)

    net, program = Scaled(), Program()
    with program_guard(program):
        x = data("x", [None, 4])
        if kind == "of the module":
            y = net(x)
        else:
            x = x * net.scale
            with fp16_guard():
                y = net.layer(x)
        optimizer = decorate(sgd(net), use_pure_fp16=True)
        optimizer.minimize(y.float().mean())
    optimizer.amp_init("cpu")
    assert net.scale.dtype == torch.float32
    assert net.layer.weight.dtype == FP16


@pytest.mark.parametrize(
    ("name", "in_half"),
    [
        ("layers.1.weight", [True, False, True]),
        ("x", [False, True, True]),
        ("net_0", [True, True, False]),
        ("label", [True, True, True]),
    ],
)
def test_what_reads_or_writes_a_named_variable_is_float32(name: str, in_half: list[bool]) -> None:
    net = Net()
    lists = CustomOpLists(custom_black_varnames=[name])
    program, optimizer = write(net, amp_lists=lists, level="O2", cpu_compute="native")
    optimizer.amp_init("cpu")
    step(program)
    assert layers_in_half(program) == {f"Net_0.layers.{n}": half for n, half in enumerate(in_half)}
    halves = [layer.weight.dtype is FP16 for layer in net.layers]
    assert halves == ([True, False, True] if name == "layers.1.weight" else [True] * 3)


def test_weights_of_an_operator_on_the_black_list_stay_float32() -> None:
    weights = {}
    for black in ([], ["linear"]):
        net = nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (4, 1)), nn.Conv1d(4, 4, 1), nn.Flatten())
        lists = CustomOpLists(custom_black_list=black)
        program, _ = write(net, amp_lists=lists, level="O1", cpu_compute="native")
        step(program)
        weights[len(black)] = [net[0].weight.dtype, net[2].weight.dtype]
        assert list(layers_in_half(program).values()) == [not black]
    assert weights == {0: [FP16, FP16], 1: [torch.float32, FP16]}


def test_a_plain_tensor_of_the_program_keeps_its_values_at_o2() -> None:
    net = nn.Linear(4, 4)
    with program_guard(Program()):
        x, target = data("x", [2, 4]), torch.full((2, 4), 1e6)
        loss = nn.functional.l1_loss(net(x), target)  # black: float32, where half of the target would be inf
        optimizer = decorate(sgd(net), level="O2")
        optimizer.minimize(loss)
    loss._program.backend = "aot_eager"
    optimizer.amp_init("cpu")
    assert np.isfinite(Executor("cpu").run(loss._program, {"x": np.full((2, 4), 1e-3)}, [loss])[0])


# ---------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_that_overflows_leaves_the_weights_and_shrinks_the_scale(level: str) -> None:
    net = Net()
    program, optimizer = write(net, level=level, init_loss_scaling=1024.0, decr_every_n_nan_or_inf=1)
    optimizer.amp_init("cpu")
    step(program)
    before = copy.deepcopy(net.state_dict())
    assert optimizer.get_loss_scaling() == 1024.0
    step(program, label=np.full((8, 4), 1e30))
    assert optimizer.get_loss_scaling() == 512.0
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    step(program)
    assert optimizer.get_loss_scaling() == 512.0
    assert not torch.equal(net.state_dict()["layers.0.weight"], before["layers.0.weight"])


def test_the_scale_shrinks_at_the_second_overflow_and_grows_after_good_steps() -> None:
    program, optimizer = write(Net(), init_loss_scaling=256.0, incr_every_n_steps=2)
    scales = []
    for bad in (True, True, False, False):
        step(program, **({"label": np.full((8, 4), 1e30)} if bad else {}))
        scales.append(optimizer.get_loss_scaling())
    assert scales == [256.0, 128.0, 128.0, 256.0]


def test_the_loss_scale_is_read_from_the_scaler() -> None:
    _, optimizer = write(Net(), init_loss_scaling=256.0)
    assert optimizer.get_loss_scaling() == 256.0
    optimizer.scaler.load_state_dict({**optimizer.scaler.state_dict(), "scale": 64.0})
    assert optimizer.get_loss_scaling() == 64.0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_program_follows_a_schedule_and_equals_the_eager_loop_bit_for_bit(level: str) -> None:
    net = Net()
    twin = copy.deepcopy(net)

    def schedule(optimizer: Any) -> LambdaLR:
        return LambdaLR(optimizer, lambda number: 0.5**number)

    program, wrapped = write(net, level=level, init_loss_scaling=128.0)
    wrapped.amp_init("cpu")
    scheduler = schedule(wrapped.optimizer)
    optimizer, scaler = sgd(twin), GradScaler(init_loss_scaling=128.0)
    mezzo.amp.decorate(twin, optimizer, level=level)
    twin_scheduler = schedule(optimizer)
    for number in range(4):
        loss = step(program, number)
        scheduler.step()
        rng = np.random.default_rng(number)
        x, label = (torch.from_numpy(rng.random((8, 4))).float() for _ in range(2))
        with auto_cast(level=level):
            twin_loss = nn.functional.mse_loss(twin(x), label)
        scaler.scale(twin_loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        twin_scheduler.step()
        assert loss == twin_loss.item()
    for name, value in net.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name]), name
    assert wrapped.param_groups[0]["lr"] == 0.1 / 16


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_resumed_program_goes_on_bit_for_bit(level: str) -> None:
    def fresh() -> tuple[nn.Module, Program, MixedPrecisionOptimizer]:
        net = Net()
        optimizer = AdamW(net.parameters(), lr=0.01)
        program, wrapped = write(net, optimizer, level=level, init_loss_scaling=1024.0, incr_every_n_steps=3)
        wrapped.amp_init("cpu")
        return net, program, wrapped

    net, program, wrapped = fresh()
    for number in range(2):
        step(program, number)
    saved = copy.deepcopy((net.state_dict(), wrapped.state_dict(), wrapped.scaler.state_dict()))
    assert {value.dtype for value in saved[0].values()} == {torch.float32}
    losses = [step(program, number) for number in range(2, 5)]
    other, resumed, again = fresh()
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    again.scaler.load_state_dict(saved[2])
    assert [step(resumed, number) for number in range(2, 5)] == losses
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in other.state_dict().items())
    assert again.get_loss_scaling() == wrapped.get_loss_scaling() == 2048.0


def test_a_clipped_step_is_as_long_as_it_may_be() -> None:
    net = Net()
    with program_guard(Program()):
        loss = net(data("x", [None, 4])).pow(2).mean()
        optimizer = decorate(SGD(net.parameters(), lr=1.0), level="OD")
        optimizer.minimize(loss, static.default_startup_program(), max_norm=0.01)
    loss._program.backend = "aot_eager"
    before = [p.detach().clone() for p in net.parameters()]
    Executor("cpu").run(loss._program, {"x": np.ones((2, 4))})
    moved = torch.cat([(p.detach() - b).flatten() for p, b in zip(net.parameters(), before, strict=True)])
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)


# ---------------------------------------------------------------------------------------------- amp_init


@pytest.mark.parametrize("master_weight", [None, False, "compact"])
def test_weights_are_stored_in_half_with_masters_that_hold_their_values(master_weight: Any) -> None:
    net = Net()
    before = [p.detach().clone() for p in net.parameters()]
    _, optimizer = write(net, level="O2", master_weight=master_weight)
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    optimizer.amp_init("cpu", scope=None, rewrite_master_weight=True)
    for param, value in zip(net.parameters(), before, strict=True):
        assert torch.equal(param, value.half())
        master = master_of(param)
        assert (master is None) == (master_weight is False)
        # a compact master of float16 has steps of 2**-39 where weights are small
        assert master is None or (master - value).abs().max() <= (2.0**-40 if master_weight == "compact" else 0)
        assert master is None or (stored_master(param) is master) == (master_weight != "compact")


def test_unknown_masters_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="master_weight='small': must be True, False or 'compact'"):
        static.amp.decorate(torch.optim.SGD(Net().parameters(), lr=0.1), level="O2", master_weight="small")


def test_gradients_arrive_in_float32_if_asked() -> None:
    net = Net()
    _, optimizer = write(net, level="O2", master_grad=True)
    optimizer.amp_init("cpu")
    assert {p.grad_dtype for p in net.parameters()} == {torch.float32}


def test_at_o1_weights_are_stored_in_half_at_the_first_run() -> None:
    net = Net()
    program, optimizer = write(net)
    optimizer.amp_init("cpu")
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    step(program)
    assert {p.dtype for p in net.parameters()} == {FP16}


def test_o2_without_amp_init_says_so_once_and_trains_float32_weights() -> None:
    net = Net()
    program, _ = write(net, level="O2")
    with pytest.warns(UserWarning, match="amp_init was not called: weights stay float32"):
        step(program)
    step(program)
    assert {p.dtype for p in net.parameters()} == {torch.float32}


def test_the_warning_names_the_line_that_runs_the_program() -> None:
    program, _ = write(Net(), level="O2")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        Executor("cpu").run(program, {"x": np.ones((2, 4)), "label": np.ones((2, 4))})
    assert seen[0].filename == __file__


@pytest.mark.parametrize(
    ("level", "use_fp16_test", "is_half"), [("O2", False, True), ("O1", True, True), ("O1", False, False)]
)
def test_a_test_program_gets_the_precision_by_amp_init(level: str, use_fp16_test: bool, is_half: bool) -> None:
    program, optimizer = write(Net(), level=level)
    test = program.clone(for_test=True)
    assert not test.precision.is_on
    optimizer.amp_init("cpu", test_program=test, use_fp16_test=use_fp16_test)
    assert (test.precision == optimizer.precision) == is_half
    if is_half:
        step(program)
        feed = {"x": np.ones((2, 4)), "label": np.ones((2, 4))}
        assert Executor("cpu").run(test, feed, ["net_0"])[0].dtype == np.float16


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_test_program_without_mixed_precision_runs_beside_half_weights(level: str) -> None:
    net = Net()
    program, optimizer = write(net, level=level)
    test = program.clone(for_test=True)
    optimizer.amp_init("cpu")
    step(program)
    feed = {"x": np.ones((2, 4)), "label": np.ones((2, 4))}
    assert Executor("cpu").run(test, feed, ["net_0"])[0].dtype == np.float32


def test_a_test_program_that_has_run_gets_the_precision_too() -> None:
    program, optimizer = write(Net(), level="O2")
    test = program.clone(for_test=True)
    feed = {"x": np.ones((2, 4)), "label": np.ones((2, 4))}
    assert Executor("cpu").run(test, feed, ["net_0"])[0].dtype == np.float32
    optimizer.amp_init("cpu", test_program=test)
    assert Executor("cpu").run(test, feed, ["net_0"])[0].dtype == np.float16


# ---------------------------------------------------------------------------------------------- what is said


def in_program(action: Callable[[Any], Any]) -> Callable[[], Any]:
    """Return a call of an action with an input of a fresh program."""

    def call() -> Any:
        program = Program()
        program.backend = "aot_eager"
        with program_guard(program):
            return action(data("x", [None, 4]))

    return call


def closed(x: Any) -> Program:
    net = nn.Linear(4, 4)
    static.minimize(sgd(net), net(x).mean())
    return x._program


def feeding(program: Program, **feed: Any) -> Any:
    return Executor("cpu").run(program, feed, ["x"])


def other_input() -> Any:
    with program_guard(Program()):
        return data("x", [None, 4])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        # decorate
        (lambda: decorate(Net()), TypeError, r"decorate: Net is not a torch\.optim\.Optimizer"),
        (lambda: decorate(sgd(Net()), ["x"]), TypeError, r"amp_lists: list is not a mezzo\.static\.amp\.CustomOpLists"),
        (lambda: decorate(sgd(Net()), level="O2", use_pure_fp16=True), TypeError, "level or use_pure_fp16, not both"),
        (
            lambda: decorate(sgd(Net()), use_fp16_guard=True, use_amp_guard=True),
            TypeError,
            "use_fp16_guard or use_amp_guard, not both",
        ),
        (lambda: decorate(sgd(Net()), level="O4"), ValueError, "level='O4'"),
        (
            lambda: decorate(sgd(Net()), level="O2", fp8={}),
            ValueError,
            "fp8 with level='O2'",
        ),
        (
            lambda: decorate(sgd(Net()), half_layers=()),
            ValueError,
            "half_layers with level='O1': it belongs to level O3",
        ),
        (lambda: decorate(sgd(Net()), level="O3", fp8={"emulat": True}), ValueError, "did you mean 'emulate'"),
        (lambda: decorate(sgd(Net()), dtype="float64"), ValueError, "dtype='float64': must be 'float16' or 'bfloat16'"),
        (
            lambda: CustomOpLists(custom_black_varnames="x"),
            TypeError,
            "custom_black_varnames='x': give a list of names",
        ),
        (lambda: CustomOpLists(custom_white_list=["linaer"]), ValueError, "linaer"),
        (lambda: CustomOpLists(["linear"], ["linear"]), ValueError, "linear"),
        (lambda: decorate(sgd(Net())).amp_init(), ProgramError, r"call minimize\(loss\) before amp_init"),
        (
            lambda: decorate(sgd(Net())).get_loss_scaling(),
            ProgramError,
            r"call minimize\(loss\) before get_loss_scaling",
        ),
        (lambda: decorate(sgd(Net())).minimize(torch.ones(1)), TypeError, "the loss is a Tensor, not a variable"),
        (lambda: write(Net(), use_pure_fp16=True), NoGuardError, "use_fp16_guard is on, and no part of the network"),
        (lambda: write(Net(), level="O1", use_amp_guard=True), NoGuardError, "or give use_fp16_guard=False"),
        (
            lambda: write(Net(), amp_lists=CustomOpLists(custom_black_varnames=["layers.1.wieght"])),
            ProgramError,
            r"unknown custom_black_varnames 'layers\.1\.wieght'; did you mean 'layers\.\d\.weight'\?",
        ),
        # inputs
        (lambda: InputSpec([2.5]), ValueError, r"shape=\[2\.5\]: sizes are whole numbers"),
        (lambda: InputSpec([-2]), ValueError, r"shape=\[-2\]: sizes are whole numbers; use -1 or None"),
        (lambda: InputSpec([1], "flaot32"), ValueError, "dtype='flaot32': must be .*; did you mean 'float32'"),
        (lambda: InputSpec([1], "nn"), ValueError, "dtype='nn': must be a dtype of torch"),
        (lambda: Program().data(3, [1]), ProgramError, "name=3: an input's name is a string; got int"),
        (in_program(lambda x: [data("X", [1]), data("X", [1])]), ProgramError, "has a variable 'X' already"),
        (in_program(lambda x: data("x", [1])), ProgramError, "has a variable 'x' already; choose another name"),
        (in_program(lambda x: [x + 1, data("add_0", [1])]), ProgramError, "has a variable 'add_0' already"),
        # writing
        (
            in_program(lambda x: nn.Linear(5, 2)(x)),
            ProgramError,
            r"linear does not take these variables: .*\[5, 2\]",
        ),
        (in_program(lambda x: x.view(3)), ProgramError, "view does not take these variables"),
        (in_program(lambda x: x + other_input()), ProgramError, "a call has variables of two programs"),
        (in_program(lambda x: closed(x) and x + 1), ProgramError, "closed by minimize and takes no call any more"),
        (
            in_program(lambda x: closed(x).data("y", [1])),
            ProgramError,
            "closed by minimize and takes no input any more",
        ),
        (in_program(lambda x: x.no_such_method()), AttributeError, "a Variable has no attribute 'no_such_method'"),
        (in_program(lambda x: x.T), AttributeError, "a Variable has no attribute 'T'"),
        # minimize
        (in_program(lambda x: static.minimize(Net(), x.mean())), TypeError, r"minimize: Net is not a torch\.optim"),
        (lambda: static.minimize(sgd(Net()), 3.0), TypeError, "the loss is a float, not a variable of a program"),
        (
            in_program(lambda x: static.minimize(sgd(Net()), x.sum(1))),
            ProgramError,
            r"'sum_0' has shape \[-1\]: minimize takes one number; call \.mean\(\)",
        ),
        (
            in_program(lambda x: static.minimize(sgd(Net()), Net()(x).mean())),
            ProgramError,
            "the optimizer has no parameter of this program",
        ),
        (
            in_program(lambda x: closed(x).training and static.minimize(sgd(Net()), x._program.variable("mean_0"))),
            ProgramError,
            "minimize once",
        ),
        # looking and running
        (in_program(lambda x: x._program.operators()), ProgramError, "no graph was captured yet: run the program once"),
        (in_program(lambda x: x._program.variable("xx")), ProgramError, "unknown variable 'xx'; did you mean 'x'"),
        (in_program(lambda x: x._program.save("never.pt2", ["y"])), ProgramError, "unknown variable 'y'"),
        (in_program(lambda x: x._program.inference_module(["y"])), ProgramError, "unknown variable 'y'"),
        (
            in_program(lambda x: Executor("cpu").run(x)),
            TypeError,
            r"Executor\.run: Variable is not a mezzo\.static\.Program",
        ),
        (in_program(lambda x: feeding(x._program)), ProgramError, "feed has no 'x': the program reads x"),
        (in_program(lambda x: feeding(x._program, z=1)), ProgramError, "unknown input in feed 'z'; allowed: x"),
        (
            in_program(lambda x: feeding(x._program, x=np.ones((2, 3)))),
            ProgramError,
            r"feed\['x'\] has shape \[2, 3\]; it was declared as \[-1, 4\], where -1 is any size",
        ),
        (
            in_program(lambda x: feeding(x._program, x=[["one"]])),
            ProgramError,
            r"feed\['x'\]: list is not an array of numbers",
        ),
        (
            in_program(lambda x: feeding(x._program, x=np.array(["one"]))),
            ProgramError,
            r"feed\['x'\]: ndarray is not an array of numbers",
        ),
        (
            in_program(lambda x: [setattr(x._program, "backend", "inducter"), feeding(x._program, x=np.ones((1, 4)))]),
            ValueError,
            "unknown backend 'inducter'; did you mean 'inductor'",
        ),
    ],
)
def test_a_mistake_is_explained(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda x: x.item(), r"\.item\(\)"),
        (lambda x: x.tolist(), r"\.tolist\(\)"),
        (lambda x: x.numpy(), r"\.numpy\(\)"),
        (lambda x: x.mean().backward(), r"\.backward\(\)"),
        (lambda x: x.cpu(), r"\.cpu\(\)"),
        (lambda x: x.cuda(), r"\.cuda\(\)"),
        (lambda x: x.data_ptr(), r"\.data_ptr\(\)"),
        (lambda x: x.to_sparse(), r"\.to_sparse\(\)"),
        (lambda x: 1 if x.mean() > 0 else 2, "a condition"),
        (lambda x: float(x.mean()), r"float\(\)"),
        (lambda x: int(x.mean()), r"int\(\)"),
        (lambda x: list(x), "a loop over it"),
        (lambda x: len(x), r"len\(\)"),
        (lambda x: np.asarray(x), "numpy"),
    ],
)
def test_what_needs_numbers_says_so(use: Callable[[Any], Any], what: str) -> None:
    with pytest.raises(ProgramError, match=f"^{what} needs numbers, and a Variable has none .*: fetch it"):
        in_program(use)()


def test_a_shape_that_does_not_fit_is_told_as_it_was_declared() -> None:
    with pytest.raises(ProgramError, match=r"\[-1, 4\]"):
        in_program(nn.Linear(5, 2))()


def test_a_module_that_needs_numbers_is_explained() -> None:
    class Choice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if x.sum() > 0 else x

    with pytest.raises(ProgramError, match="reads numbers"):
        in_program(Choice())()


@pytest.mark.parametrize("by_name", [False, True])
def test_a_fetch_list_that_is_no_list_is_explained(by_name: bool) -> None:
    def fetch(x: Any) -> Any:
        y = x + 1
        return Executor("cpu").run(x._program, {"x": np.ones((1, 4))}, y.name if by_name else y)

    with pytest.raises((ProgramError, TypeError), match="fetch_list"):
        in_program(fetch)()


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "gpu", "gpu:1"], ids="a b c d".split())  # 'gpu' is a marker
def test_a_gpu_that_is_not_there_is_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(DeviceError, match=rf"Executor\('{device}'\): .*'cpu'"):
        Executor(device)
    assert Executor().device == torch.device("cpu")


@pytest.mark.parametrize(
    ("given", "device"), [("gpu", "cuda:0"), ("gpu:1", "cuda:1"), (None, "cuda:0"), ("cpu", "cpu")]
)
def test_a_gpu_has_two_names_and_a_number(given: str | None, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert Executor(given).device == torch.device(device)
