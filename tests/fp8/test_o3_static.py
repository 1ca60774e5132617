"""Level O3 in graph mode: the numbers of eager mode, the operators in the table, files without FP8."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from o3_nets import FP8, RECIPE, are_equal, batch, calls, decorated, layers, region, train, weights
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from graph_backends import skip_without_compiler
from mezzo import static
from mezzo.amp import GradScaler, Policy, explain, float32_copy
from mezzo.precision import Precision
from mezzo.static import Executor, Program, data, program_guard
from mezzo.static._region import CastRules
from mezzo.static._step import TrainingStep, forward_and_loss

RTOL_FP8 = 2.0**-3 / 32  # an e4m3 number moved to its neighbour, one of the 32 or more in a sum


@pytest.fixture(autouse=True)
def leave_no_trace() -> Iterator[None]:
    yield
    static.disable_static()
    torch._dynamo.reset()


def scaler_of(dtype: str) -> GradScaler | None:
    return GradScaler() if dtype == "float16" else None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_captured_step_gives_the_bits_of_the_eager_one(dtype: str) -> None:
    net, optimizer = decorated(dtype=dtype)
    expected = train(net, optimizer, 3, dtype, scaler_of(dtype))
    policy = Policy.create("O3", dtype, fp8=RECIPE)
    for make in ("compile", "capture"):
        other, its = decorated(dtype=dtype)
        step: Any
        if make == "compile":
            step = static.compile_step(
                other, mse_loss, its, policy=policy, scaler=scaler_of(dtype), backend="aot_eager"
            )
        else:
            step = static.capture_step(other, mse_loss, its, batch(), policy=policy, scaler=scaler_of(dtype))
        assert [step(*batch()).item() for _ in range(3)] == expected
        assert are_equal(weights(other), weights(net))


@pytest.mark.parametrize("taken_before", [0, 2])
def test_a_rehearsal_teaches_delayed_scales_nothing(taken_before: int) -> None:
    recipe = replace(RECIPE, scaling="delayed")
    policy = Policy.create("O3", "bfloat16", fp8=recipe)
    losses = []
    for rehearses in (False, True):
        net, optimizer = decorated()
        step = TrainingStep(
            forward_and_loss(net, mse_loss), [net], optimizer, Precision(policy=policy), CastRules(policy), None
        )
        for _ in range(taken_before):
            step.run(batch())
        if rehearses:
            with step.rehearsal():
                for factor in (1.0, 4096.0):  # another batch, by whose scales small numbers would be lost
                    step.run([batch()[0] * factor, batch()[1]])
        losses.append([step.run(batch())[0].item() for _ in range(3)])
    assert losses[0] == losses[1]


def test_the_table_of_a_step_shows_fp8_products_by_layer() -> None:
    net, optimizer = decorated()
    step = static.compile_step(
        net, mse_loss, optimizer, policy=Policy.create("O3", "bfloat16", fp8=RECIPE), backend="aot_eager"
    )
    step(*batch())
    stats = step.operators()
    assert calls(stats) == calls(stats, f"{FP8}_backward") == 3
    assert [row.module for row in stats.rows if row.op == FP8] == ["2", "4", "6"]  # the first and the last are in half


def test_a_module_made_static_follows_the_region_around_its_call() -> None:
    net, _ = decorated()
    x = batch()[0]
    with region():
        expected = net(x)
    static.to_static(net, backend="aot_eager")
    with region():
        assert torch.equal(net(x), expected)
    assert calls(static.static_forward(net).operators()) == 3


@pytest.mark.parametrize("make", ["to_static", "torch.compile"])
def test_layers_stay_in_half_in_a_graph_that_was_captured_outside_a_region_before(make: str) -> None:
    net, _ = decorated(half_layers="2")
    x = batch()[0]
    with region():
        expected = net(x)
    plain = net(x.bfloat16())
    captured: Any = (
        static.to_static(net, backend="aot_eager")
        if make == "to_static"
        else torch.compile(net, backend="aot_eager", fullgraph=True)
    )
    for _ in range(2):
        assert torch.equal(captured(x.bfloat16()), plain)
        with region():
            assert torch.equal(captured(x), expected)
            assert torch.equal(captured(x.bfloat16()), expected)


def test_an_exported_network_has_nothing_of_o3() -> None:
    net, _ = decorated()
    exported = torch.export.export(float32_copy(net).eval(), (batch()[0],), strict=False)
    calls = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert calls == {"aten.linear.default", "aten.relu.default"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_step_compiled_by_inductor_agrees_with_the_graph_as_it_is(dtype: str) -> None:
    skip_without_compiler()
    found = {}
    for backend in ("aot_eager", "inductor"):
        net, optimizer = decorated(dtype=dtype)
        step = static.compile_step(
            net, mse_loss, optimizer, policy=Policy.create("O3", dtype, fp8=RECIPE), scaler=scaler_of(dtype),
            backend=backend,
        )  # fmt: skip
        found[backend] = torch.tensor([step(*batch()).item() for _ in range(3)])
    # A fused operator rounds once where two round twice, which may move the FP8 number made from its result.
    torch.testing.assert_close(found["inductor"], found["aot_eager"], rtol=RTOL_FP8, atol=0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = layers()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def written(**options: Any) -> tuple[Program, Any, Net]:
    """Return a program that trains a network at O3, its optimizer and the network."""
    net, program = Net(), Program()
    program.backend = "aot_eager"
    with program_guard(program):
        x, target = data("x", [None, 32]), data("target", [None, 16])
        loss = mse_loss(net(x), target)
        sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        optimizer = static.amp.decorate(sgd, level="O3", dtype="bfloat16", fp8=RECIPE, **options)
        optimizer.minimize(loss)
    return program, optimizer, net


def fed() -> dict[str, np.ndarray[Any, Any]]:
    x, target = batch()
    return {"x": x.numpy(), "target": target.numpy()}


def test_a_program_trains_as_eager_mode_does_and_shows_its_fp8_products() -> None:
    program, optimizer, net = written()
    optimizer.amp_init("cpu")
    losses = [Executor("cpu").run(program, fed(), ["mse_loss_0"])[0].item() for _ in range(3)]
    eager, its = decorated()
    assert losses == train(eager, its, 3)
    assert are_equal(weights(net), weights(eager))
    modules = [row.module for row in program.operators().rows if row.op == FP8]
    assert modules == ["Net_0.body.2", "Net_0.body.4", "Net_0.body.6"]
    assert str(program).startswith("program, O3 bfloat16:")


@pytest.mark.parametrize(
    ("half_layers", "in_fp8"),
    [((), ["0", "2", "4", "6", "8"]), ("Net_0.body.[24]", ["0", "6", "8"]), (nn.Linear, [])],
)
def test_half_layers_of_a_program_are_named_or_given_as_modules(half_layers: Any, in_fp8: list[str]) -> None:
    _, optimizer, net = written(half_layers=half_layers)
    optimizer.amp_init("cpu")
    rows = explain(net.body, optimizer.precision.policy).rows
    assert [row.name for row in rows if row.on_half.startswith("float8")] == in_fp8


def test_a_test_program_gets_the_precision_of_o3_by_amp_init() -> None:
    program, optimizer, net = written()
    test = program.clone(for_test=True)
    optimizer.amp_init("cpu", test_program=test)
    (found,) = Executor("cpu").run(test, fed(), ["net_0"], return_numpy=False)
    with region(), torch.no_grad():
        assert torch.equal(found, net.eval()(batch()[0]))
    assert calls(test.operators()) == 3


def test_without_amp_init_o3_says_so_as_o2_does() -> None:
    program, _, _ = written()
    with pytest.warns(UserWarning, match="amp_init was not called: weights stay float32"):
        Executor("cpu").run(program, fed(), ["mse_loss_0"])
    assert calls(program.operators()) == 5  # nothing is marked to stay in half


def test_a_saved_program_is_float32_and_has_no_fp8(tmp_path: Path) -> None:
    program, optimizer, net = written()
    optimizer.amp_init("cpu")
    Executor("cpu").run(program, fed(), ["mse_loss_0"])
    program.save(tmp_path / "net.pt2", ["net_0"])
    loaded = Program.load(tmp_path / "net.pt2")
    loaded.backend = "aot_eager"
    (found,) = Executor("cpu").run(loaded, {"x": fed()["x"]}, ["net_0"])
    values = batch()[0].double()
    for name, value in net.state_dict().items():  # the same in float64, from the masters
        part = value.double()
        values = values @ part.t() if name.endswith("weight") else values + part
        if name.endswith("bias") and "8" not in name:
            values = values.relu()
    np.testing.assert_allclose(found, values.numpy(), rtol=1e-5, atol=1e-5)  # five sums of at most 64 float32 products
    assert calls(loaded.operators()) == 0
