"""A captured step equals the one that is not captured."""

import contextlib
import copy
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, RMSprop

from mezzo.amp import GradScaler, LossScaleFloorError, Policy, _scaler_norms, decorate
from mezzo.optim import engine_of, master_of
from mezzo.static import capture_step

gpu = pytest.mark.gpu


class Net(nn.Module):
    """A convolution, statistics, dropout and linear layers: what a step touches."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(0.25)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        return self.head(self.drop(x).mean((2, 3)))


def batch_of(seed: int, device: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(16, 3, 8, 8).to(device), torch.randn(16, 4).to(device)


def make(
    kind: Any, device: str, level: str = "O2", masters: Any = True, **options: Any
) -> tuple[nn.Module, Optimizer, GradScaler]:
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = kind(model.parameters(), **options)
    decorate(model, optimizer, level=level, master_weight=masters)
    return model, optimizer, GradScaler(init_loss_scaling=1024.0, decr_every_n_nan_or_inf=1)


def everything(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    masters = [m for p in model.parameters() if (m := master_of(p)) is not None]
    states = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers(), *masters, *states)]


def step_of(model: nn.Module, optimizer: Optimizer, scaler: GradScaler | None, device: str, **more: Any) -> Any:
    more.setdefault("policy", Policy.create("O2"))
    return capture_step(model, nn.functional.mse_loss, optimizer, batch_of(0, device), scaler=scaler, **more)


@gpu
def test_depthwise_and_pointwise_convolutions_in_channels_last_can_be_captured() -> None:
    """Their weights are in both memory formats at once; gradients come with the strides of either."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8, bias=False), nn.Conv2d(8, 4, 3)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()).cuda().to(memory_format=torch.channels_last)
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
    decorate(model, optimizer, level="O2")
    x, y = batch_of(0, "cuda")
    batch = (x.to(memory_format=torch.channels_last), y)
    scaler = GradScaler(init_loss_scaling=1024.0)
    step = capture_step(model, nn.functional.mse_loss, optimizer, batch, scaler=scaler, policy=Policy.create("O2"))
    assert step.is_captured
    losses = [step(*batch).item() for _ in range(20)]
    assert losses[-1] < losses[0]


@gpu
@pytest.mark.parametrize(
    ("kind", "options"), [(SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}), (AdamW, {"lr": 0.01})]
)
@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize(("level", "masters"), [("O1", True), ("O2", True), ("O2", "compact")])
def test_a_captured_step_equals_the_uncaptured_one(
    kind: Any, options: dict, max_norm: Any, level: str, masters: Any
) -> None:
    """Weights, state, statistics, losses and scale over ten steps, one with an overflow, the learning rate falling."""
    seen: dict[bool, Any] = {}
    for captured in (True, False):
        model, optimizer, scaler = make(kind, "cuda", level, masters, **options)
        step = step_of(model, optimizer, scaler, "cuda", policy=Policy.create(level), max_norm=max_norm)
        assert step.is_captured
        call = step if captured else lambda *batch, step=step: step.training.run(batch)[0]
        torch.manual_seed(7)  # dropout
        losses = []
        for number in range(10):
            for group in optimizer.param_groups:
                group["lr"] = options["lr"] / (number + 1)
            x, y = batch_of(number, "cuda")
            torch.cuda.manual_seed(number)
            if number == 4:
                y[0, 0] = 1e30  # its gradient does not fit into float16
            losses.append(call(x, y).item())
        scaler.flush()
        assert scaler.skipped_steps == 1
        seen[captured] = everything(model, optimizer), losses, scaler.state_dict()
    assert seen[True][2] == seen[False][2]
    assert seen[True][1] == pytest.approx(seen[False][1], rel=1e-6)
    for one, other in zip(seen[True][0], seen[False][0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@gpu
@pytest.mark.parametrize("masters", [True, "compact"])
def test_capturing_changes_nothing(masters: Any) -> None:
    model, optimizer, scaler = make(AdamW, "cuda", masters=masters, lr=0.01)
    before = everything(model, optimizer)
    batch = batch_of(0, "cuda")
    torch.manual_seed(3)
    expected = torch.rand(4, device="cuda")
    torch.manual_seed(3)
    step = capture_step(model, nn.functional.mse_loss, optimizer, batch, scaler=scaler, policy=Policy.create("O2"))
    assert torch.equal(torch.rand(4, device="cuda"), expected)
    after = everything(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=False))
    assert all(not state.any() for state in after[len(before) :])
    assert scaler.get_scale() == 1024.0
    assert scaler.skipped_steps == 0
    step(*batch_of(1, "cuda"))
    assert optimizer.state[model.head.weight]["step"].item() == 1


@gpu
def test_an_overflow_inside_the_graph_is_learnt_late_and_ends_training_at_the_floor() -> None:
    model, optimizer, _ = make(SGD, "cuda", lr=0.1)
    scaler = GradScaler(init_loss_scaling=1.0, max_skips_at_floor=3)
    taken: list[bool] = []
    scaler.register_outcome_hook(taken.append)
    step = step_of(model, optimizer, scaler, "cuda")
    x, y = batch_of(0, "cuda")
    step(x, y)
    weights = everything(model, optimizer)[0]
    bad = torch.full_like(y, 1e30)

    def go_on() -> None:
        for _ in range(4):
            step(x, bad)
            torch.cuda.synchronize()

    with pytest.raises(LossScaleFloorError):
        go_on()
    assert taken[0] is True
    assert not any(taken[1:])
    assert torch.equal(everything(model, optimizer)[0], weights)


@gpu
def test_two_shapes_are_two_steps_of_one_optimizer() -> None:
    model, optimizer, scaler = make(SGD, "cuda", lr=0.1)
    large = step_of(model, optimizer, scaler, "cuda")
    x, y = batch_of(1, "cuda")
    small = capture_step(
        model, nn.functional.mse_loss, optimizer, (x[:8], y[:8]), scaler=scaler, policy=Policy.create("O2")
    )
    other, other_optimizer, other_scaler = make(SGD, "cuda", lr=0.1)
    eager = step_of(other, other_optimizer, other_scaler, "cuda").training
    torch.manual_seed(0)
    for step, count in ((large, 16), (small, 8), (large, 16)):
        torch.cuda.manual_seed(count)
        step(x[:count], y[:count])
        torch.cuda.manual_seed(count)
        eager.run((x[:count], y[:count]))
    for one, two in zip(everything(model, optimizer), everything(other, other_optimizer), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)


@gpu
def test_eager_steps_and_checkpoints_work_beside_a_captured_step() -> None:
    model, optimizer, scaler = make(AdamW, "cuda", lr=0.01)
    step = step_of(model, optimizer, scaler, "cuda")
    step(*batch_of(0, "cuda"))
    step.training.run(batch_of(1, "cuda"))
    saved = copy.deepcopy(model.state_dict())
    step(*batch_of(2, "cuda"))
    assert optimizer.state[model.head.weight]["step"].item() == 3
    assert not torch.equal(saved["head.weight"], model.state_dict()["head.weight"])
    assert saved["head.weight"].dtype == torch.float32


@gpu
def test_eager_and_captured_steps_may_alternate() -> None:
    runs = []
    for captured in (True, False):
        model, optimizer, scaler = make(SGD, "cuda", lr=0.1)
        step = step_of(model, optimizer, scaler, "cuda")
        for number in range(6):
            torch.cuda.manual_seed(number)
            batch = batch_of(number, "cuda")
            torch.cuda.manual_seed(number)
            if captured and number % 2:
                step(*batch)
            else:
                step.training.run(batch)
        runs.append(everything(model, optimizer))
    for one, other in zip(*runs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@gpu
def test_each_of_two_graphs_reports_its_own_overflows() -> None:
    model, optimizer, scaler = make(SGD, "cuda", lr=0.1)
    taken: list[bool] = []
    scaler.register_outcome_hook(taken.append)
    first, second = (step_of(model, optimizer, scaler, "cuda") for _ in range(2))
    x, y = batch_of(0, "cuda")
    bad = torch.full_like(y, 1e30)
    for step, target in ((second, y), (first, bad), (second, y), (second, bad), (first, y)):
        step(x, target)
    scaler.flush()
    assert taken == [True, False, True, False, True]


@gpu
def test_edits_and_checkpoints_of_the_model_are_followed_replaced_state_is_refused() -> None:
    model, optimizer, scaler = make(AdamW, "cuda", lr=0.0, weight_decay=0.0)
    step = step_of(model, optimizer, scaler, "cuda")
    batch = batch_of(0, "cuda")
    saved = copy.deepcopy(model.state_dict())
    step(*batch)
    with torch.no_grad():
        model.head.weight.mul_(2)
    doubled = model.head.weight.detach().clone()
    step(*batch)
    assert torch.equal(model.head.weight.detach(), doubled)
    model.load_state_dict(saved)
    step(*batch)
    assert torch.equal(model.state_dict()["head.weight"], saved["head.weight"])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(RuntimeError, match="capture it again"):
        step(*batch)


@gpu
def test_a_step_is_captured_after_a_checkpoint_was_loaded() -> None:
    model, optimizer, scaler = make(AdamW, "cuda", lr=0.01)
    step_of(model, optimizer, scaler, "cuda")(*batch_of(0, "cuda"))
    saved = copy.deepcopy(optimizer.state_dict())
    other, other_optimizer, other_scaler = make(AdamW, "cuda", lr=0.01)
    other_optimizer.load_state_dict(saved)
    step_of(other, other_optimizer, other_scaler, "cuda")
    state, old = other_optimizer.state[other.head.weight], optimizer.state[model.head.weight]
    assert state["step"].item() == 1
    assert torch.equal(state["exp_avg"], old["exp_avg"])


@gpu
def test_settings_of_the_scaler_are_built_in() -> None:
    model, optimizer, scaler = make(SGD, "cuda", lr=0.1)
    step = step_of(model, optimizer, scaler, "cuda")
    scaler.set_incr_every_n_steps(7)
    with pytest.raises(RuntimeError, match="a setting of the scaler"):
        step(*batch_of(0, "cuda"))


@gpu
def test_dampening_is_refused_and_leaves_the_optimizer_alone() -> None:
    model = Net().cuda()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    with pytest.raises(ValueError, match="dampening at the first step"):
        step_of(model, optimizer, None, "cuda")
    assert not engine_of(optimizer).attached


@gpu
def test_bfloat16_needs_no_scaler() -> None:
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = AdamW(model.parameters(), lr=0.01)
    decorate(model, optimizer, level="O2", dtype="bfloat16")
    step = step_of(model, optimizer, None, "cuda", policy=Policy.create("O2", "bfloat16"), max_norm=1.0)
    losses = [step(*batch_of(0, "cuda")).item() for _ in range(30)]
    assert losses[-1] < 0.8 * losses[0]
    assert step.grad_norm.item() > 0


@gpu
def test_what_cannot_be_captured_is_refused_before_anything_changes() -> None:
    torch.manual_seed(0)
    model = Net().cuda()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="RMSprop reads from the device in its step"):
        step_of(model, RMSprop(model.parameters(), lr=0.1), None, "cuda")
    with pytest.raises(ValueError, match="AdamW reads from the device"):
        step_of(model, AdamW(model.parameters(), amsgrad=True), None, "cuda")
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@gpu
def test_an_option_that_is_compiled_in_cannot_change() -> None:
    model, optimizer, scaler = make(SGD, "cuda", lr=0.1)
    step = step_of(model, optimizer, scaler, "cuda")
    optimizer.param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(RuntimeError, match="capture it again"):
        step(*batch_of(0, "cuda"))


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_a_rehearsal_leaves_everything_as_it_was(kind: Any) -> None:
    """What is done before a capture, on the CPU: three steps, the last of them with an overflow."""
    model, optimizer, scaler = make(kind, "cpu", lr=0.1)
    scaler.protect_batch_norm(model)
    taken: list[bool] = []
    scaler.register_outcome_hook(taken.append)
    step = step_of(model, optimizer, scaler, "cpu")
    step(*batch_of(0, "cpu"))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for state in optimizer.state.values():  # as a checkpoint may bring it: the step replaces it
        for key in state:
            state[key] = state[key].double()
    model.register_buffer("own", torch.ones(1))
    before, scale = [t.float() for t in everything(model, optimizer)], scaler.state_dict()
    with step.training.rehearsal():
        for number in range(3):
            x, y = batch_of(number, "cpu")
            y[0, 0] = 1e30 if number == 2 else y[0, 0]
            step.training.run((x, y))
        model.own.add_(1)
        assert scaler.get_scale() == 512.0
    after = everything(model, optimizer)
    assert len(after) == len(before)
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=0, atol=0)
    assert scaler.state_dict() == scale
    assert taken == [True]
    guard = scaler._norms[0]
    for kind, buffers in _scaler_norms._by_kind(guard._live()).items():
        assert torch.equal(guard._kept[kind], _scaler_norms._join(buffers))


def test_state_that_a_rehearsal_makes_is_zero() -> None:
    model, optimizer, scaler = make(AdamW, "cpu", lr=0.1)
    step = step_of(model, optimizer, scaler, "cpu")
    with step.training.rehearsal():
        step(*batch_of(0, "cpu"))
    assert all(not t.any() for state in optimizer.state.values() for t in state.values())


def test_gradients_of_others_are_put_aside_and_back() -> None:
    model, _, scaler = make(SGD, "cpu", lr=0.1)
    optimizer = SGD(model.head.parameters(), lr=0.1)
    step = step_of(model, optimizer, scaler, "cpu")
    model.conv.weight.grad = torch.ones_like(model.conv.weight)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    with step.training.gradients_put_aside():
        assert all(p.grad is None for p in model.parameters())
        step(*batch_of(0, "cpu"))
    assert (model.conv.weight.grad == 1).all()
    assert model.head.weight.grad is None


def test_what_triton_does_not_step_is_not_captured_and_everything_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's part of a capture, whose warm-up is stepped by another tier here: there is no CUDA to speak of."""
    nothing = types.SimpleNamespace(wait_stream=lambda other: None)
    for name in ("Stream", "current_stream", "CUDAGraph", "get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: nothing)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model, optimizer, scaler = make(SGD, "cpu", lr=0.1)
    step = step_of(model, optimizer, scaler, "cpu")
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match="the step cannot be captured: some parameter or gradient is not float16"):
        step.capture(batch_of(0, "cpu"), torch.device("cpu"), 2)
    assert not step.is_captured
    assert all(torch.equal(a, b) for a, b in zip(before, everything(model, optimizer), strict=True))
    assert scaler.get_scale() == 1024.0


def test_on_a_cpu_the_step_runs_as_written() -> None:
    model, optimizer, scaler = make(SGD, "cpu", lr=0.1)
    step = step_of(model, optimizer, scaler, "cpu", max_norm=1.0)
    assert not step.is_captured
    x, y = batch_of(0, "cpu")
    losses = [step(x, y).item() for _ in range(20)]
    assert losses[-1] < losses[0]
    assert step.grad_norm.item() > 0
    assert engine_of(optimizer).attached


def test_a_batch_of_another_shape_is_refused() -> None:
    model, optimizer, scaler = make(SGD, "cpu", lr=0.1)
    step = step_of(model, optimizer, scaler, "cpu")
    x, y = batch_of(0, "cpu")
    with pytest.raises(ValueError, match=r"captured for float32\[16, 3, 8, 8\], float32\[16, 4\]; got float32\[8, 3"):
        step(x[:8], y[:8])
    with pytest.raises(ValueError, match="got float32"):
        step(x)


def test_a_step_without_batch_or_warm_up_is_refused() -> None:
    model, optimizer, _ = make(SGD, "cpu", lr=0.1)
    loss = nn.functional.mse_loss
    with pytest.raises(ValueError, match="inputs of the model first, the target last"):
        capture_step(model, loss, optimizer, (torch.ones(1),))
    with pytest.raises(ValueError, match="warmup_steps=0: must be at least 1"):
        capture_step(model, loss, optimizer, batch_of(0, "cpu"), warmup_steps=0)
    with pytest.raises(ValueError, match="on one device; they are on cpu, meta"):
        capture_step(model, loss, optimizer, (batch_of(0, "cpu")[0], torch.ones(1, device="meta")))
