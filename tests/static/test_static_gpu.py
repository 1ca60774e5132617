"""Graph mode on a GPU: one CUDA graph a shape, compiled, equal to the step as written but for rounding."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, RMSprop

from mezzo import static
from mezzo.amp import GradScaler, Policy, decorate
from mezzo.precision import Precision
from mezzo.static import compile_step
from no_waiting import no_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),  # its advice for float32 products
]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


class Net(nn.Module):
    """Plain and depthwise convolutions, statistics, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Hardswish(),
            nn.Conv2d(16, 16, 3, stride=2, padding=1, groups=16, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


def batch_of(seed: int, size: int = 16) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    x, y = torch.randn(size, 3, 16, 16), torch.randn(size, 4)
    return x.cuda().to(memory_format=torch.channels_last), y.cuda()


def train(backend: str, level: str, **more: Any) -> tuple[list[float], list[float], Any, Any]:
    """Train eight steps: a falling rate, an overflow, a smaller batch."""
    torch.manual_seed(0)
    model = Net().cuda().to(memory_format=torch.channels_last)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    decorate(model, optimizer, level=level)
    scaler = GradScaler(init_loss_scaling=1024.0, decr_every_n_nan_or_inf=1)
    step = compile_step(model, mse_loss, optimizer, scaler=scaler, policy=Policy.create(level), backend=backend, **more)
    losses, scales = [], []
    for number in range(8):
        optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
        x, y = batch_of(number, 16 if number < 6 else 8)
        if number == 3:
            y[0, 0] = 1e30
        losses.append(step(x, y).item())
        scales.append(scaler.get_scale())
    scaler.flush()
    assert scaler.skipped_steps == 1
    return losses, scales, step, model


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_compiled_step_is_one_cuda_graph_and_trains_as_the_step_as_written(level: str) -> None:
    expected, scales, _, plain = train("eager", level, max_norm=1.0)
    losses, seen_scales, step, model = train("inductor", level, max_norm=1.0)
    assert step.is_captured
    assert step.num_shapes == 2
    assert step.grad_norm.item() > 0
    assert seen_scales == scales == [1024.0] * 3 + [512.0] * 5
    good = [number for number in range(8) if number != 3]
    # Inductor keeps in float32 what eager rounds to half in between: some units of 2**-11.
    assert [losses[n] for n in good] == pytest.approx([expected[n] for n in good], rel=5e-3)
    for one, other in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)
    convolutions = step.operators().totals()["convolution"]
    assert convolutions == (2, 0, 0, 0)


def test_the_graph_without_a_compiler_is_captured_too() -> None:
    expected, *_ = train("eager", "O2")
    losses, _, step, _ = train("aot_eager", "O2")
    assert step.is_captured
    good = [number for number in range(8) if number != 3]
    assert [losses[n] for n in good] == pytest.approx([expected[n] for n in good], rel=1e-3)


def test_a_changed_setting_captures_again() -> None:
    model = nn.Linear(8, 8).cuda()
    optimizer = SGD(model.parameters(), lr=0.1)
    decorate(model, optimizer, level="O2")
    scaler = GradScaler(init_loss_scaling=64.0)
    step = compile_step(model, mse_loss, optimizer, scaler=scaler, policy=Policy.create("O2"), backend="aot_eager")
    x, y = torch.ones(4, 8, device="cuda"), torch.ones(4, 8, device="cuda")
    first = step(x, y).item()
    scaler.set_incr_every_n_steps(2)
    assert step(x, y).item() < first
    assert scaler.get_scale() == 128.0  # the second good step


def test_an_optimizer_that_reads_from_the_device_is_refused() -> None:
    model = nn.Linear(8, 8).cuda()
    step = compile_step(model, mse_loss, RMSprop(model.parameters()), backend="aot_eager")
    with pytest.raises(ValueError, match="RMSprop reads from the device in its step"):
        step(torch.ones(4, 8, device="cuda"), torch.ones(4, 8, device="cuda"))


def test_a_program_with_a_guard_trains_on_the_gpu_and_waits_for_nothing() -> None:
    class Guarded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            with static.amp.fp16_guard():
                return self.second(x)

    torch.manual_seed(0)
    program = static.Program()
    with static.program_guard(program):
        model = Guarded()
        x, y = static.data("x", [None, 8]), static.data("y", [None, 4])
        predict = model(x)
        loss = mse_loss(predict, y)
        optimizer = static.amp.decorate(SGD(model.parameters(), lr=0.1), use_pure_fp16=True, init_loss_scaling=128.0)
        optimizer.minimize(loss)
    static.disable_static()
    executor = static.Executor("gpu:0")
    optimizer.amp_init("gpu:0")
    feed = {"x": torch.ones(4, 8, device="cuda"), "y": torch.zeros(4, 4, device="cuda")}
    (first,) = executor.run(program, feed, [loss])
    with no_waiting():
        for _ in range(10):
            (last,) = executor.run(program, feed, [loss], return_numpy=False)
    assert last.item() < first
    assert last.dtype is torch.float32
    rows = {row.module.split(".")[-1]: (row.fp16, row.fp32) for row in program.operators().rows if row.op == "addmm"}
    assert rows == {"first": (0, 1), "second": (1, 0)}
    assert model.first.weight.dtype is torch.float32
    assert model.second.weight.dtype is torch.float16


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_captured_step_with_bfloat16_state_draws_new_numbers_in_each_replay(momentum: float) -> None:
    """The optimizer's state after replays is that of the same steps taken eagerly, bit for bit."""
    found = []
    for is_captured in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(64, 64, bias=False).cuda()
        kind: Any = torch.optim.AdamW(model.parameters()) if not momentum else SGD(model.parameters(), 0.1, momentum)
        precision = Precision("O2", "bfloat16", optimizer_state="bfloat16")
        precision.prepare(model, kind)
        x, y = torch.randn(32, 64, device="cuda"), torch.randn(32, 64, device="cuda")
        step = precision.compile(model, mse_loss, kind, backend="eager") if is_captured else None
        for _ in range(5):
            if step is None:
                precision.train_step(lambda: (None, mse_loss(model(x), y)), kind)  # noqa: B023
            else:
                step(x, y)
        found.append({key: value.clone() for key, value in kind.state[model.weight].items()})
    assert found[0]["step"].item() == 5
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
