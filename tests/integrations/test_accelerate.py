"""`MezzoAccelerator` against the hand-written loop of `mezzo.Precision`, with the real Accelerate."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from free_port import free_port
from mezzo import Precision
from mezzo.amp import GradScaler, decorate
from mezzo.integrations.accelerate import MezzoAccelerator, MezzoOptimizer

pytestmark = pytest.mark.integrations

X, Y = torch.linspace(-1, 1, 64).reshape(8, 8), torch.linspace(0, 1, 32).reshape(8, 4)
MODES = [(level, dtype) for level in ("O1", "O2", "O3") for dtype in ("float16", "bfloat16")]


@pytest.fixture(autouse=True)
def _forget_state():
    """Accelerate keeps its state in the process."""
    yield
    reset()


def make_precision(level: str, dtype: str, **options) -> Precision:
    fp8 = {"fp8": {"emulate": True, "scaling": "delayed"}, "half_layers": ()} if level == "O3" else {}
    return Precision(level, dtype, **fp8, **options)


def make_net() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.Linear(32, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def small_scale(dtype: str) -> GradScaler:
    """The default scale times the large gradients below would overflow float16."""
    return GradScaler(enable=dtype == "float16", init_loss_scaling=64.0)


def batch(number: int) -> tuple[Tensor, Tensor]:
    return X * (1 + number % 3), Y.roll(number, 0)


def take_steps(accelerator: MezzoAccelerator, model, optimizer, scheduler, numbers) -> None:
    for number in numbers:
        x, y = batch(number)
        with accelerator.autocast():
            loss = mse_loss(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def prepared(level: str, dtype: str, **options):
    accelerator = MezzoAccelerator(cpu=True, precision=make_precision(level, dtype), **options)
    model, optimizer = make_net()
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


@pytest.mark.parametrize(("level", "dtype"), MODES)
def test_training_has_the_bits_of_the_hand_written_loop(level: str, dtype: str) -> None:
    accelerator, model, optimizer, scheduler = prepared(level, dtype)
    take_steps(accelerator, model, optimizer, scheduler, range(6))
    precision, (own, own_optimizer) = make_precision(level, dtype), make_net()
    own_scheduler = torch.optim.lr_scheduler.LinearLR(own_optimizer, total_iters=20)
    precision.prepare(own, own_optimizer)
    for number in range(6):
        x, y = batch(number)
        with precision.autocast():
            loss = mse_loss(own(x).float(), y)
        precision.backward(loss)
        precision.step(own_optimizer, max_norm=0.5)
        own_scheduler.step()
        own_optimizer.zero_grad()
    assert_same(weights(model), weights(own))
    assert isinstance(optimizer, MezzoOptimizer)
    assert model[0].weight.dtype is precision.dtype


@pytest.mark.parametrize(("level", "dtype"), MODES)
def test_a_loaded_state_continues_with_the_same_bits(tmp_path: Path, level: str, dtype: str) -> None:
    accelerator, *parts = prepared(level, dtype)
    take_steps(accelerator, *parts, range(4))
    accelerator.save_state(str(tmp_path))
    take_steps(accelerator, *parts, range(4, 8))
    kept = accelerator.precision.state_dict()
    again, *new_parts = prepared(level, dtype)
    take_steps(again, *new_parts, range(2))  # other weights, which the loaded ones replace
    again.load_state(str(tmp_path))
    take_steps(again, *new_parts, range(4, 8))
    assert_same(weights(parts[0]), weights(new_parts[0]))
    assert again.precision.state_dict() == kept


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_model_and_optimizer_may_be_prepared_one_after_the_other(dtype: str) -> None:
    together, *parts = prepared("O2", dtype)
    take_steps(together, *parts, range(3))
    accelerator = MezzoAccelerator(cpu=True, precision=make_precision("O2", dtype))
    model, optimizer = make_net()
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    model = accelerator.prepare(model)
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    take_steps(accelerator, model, optimizer, scheduler, range(3))
    assert_same(weights(model), weights(parts[0]))


def test_outputs_are_float32_unless_asked_otherwise() -> None:
    _, model, *_ = prepared("O2", "bfloat16")
    assert model(X).dtype is torch.float32
    _, model, *_ = prepared("O2", "bfloat16", float32_outputs=False)
    assert model(X).dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_values_are_clipped_on_true_gradients(dtype: str) -> None:
    accelerator = MezzoAccelerator(cpu=True, precision=Precision("O2", dtype, scaler=small_scale(dtype)))
    model = nn.Linear(2, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.state_dict()["weight"].clone()
    accelerator.backward(model(torch.tensor([[4.0, 0.25]])).sum())  # the gradient is the input
    accelerator.clip_grad_value_(model.parameters(), 1.0)
    optimizer.step()
    torch.testing.assert_close(before - model.state_dict()["weight"], torch.tensor([[1.0, 0.25]]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("norm_type", [2, math.inf])
def test_norms_are_clipped_on_true_gradients(dtype: str, norm_type: float) -> None:
    accelerator = MezzoAccelerator(cpu=True, precision=Precision("O2", dtype, scaler=small_scale(dtype)))
    model = nn.Linear(2, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.state_dict()["weight"].clone()
    accelerator.backward(model(torch.tensor([[3.0, 4.0]])).sum())
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=norm_type)
    optimizer.step()
    expected = 5.0 if norm_type == 2 else 4.0
    assert norm.item() == pytest.approx(expected)
    # torch divides by norm + 1e-6, and rounds the clipped gradients of the other norm to half
    torch.testing.assert_close(
        before - model.state_dict()["weight"], torch.tensor([[3.0, 4.0]]) / expected, rtol=1e-2, atol=0
    )


def test_a_norm_over_some_of_the_parameters_clips_only_these() -> None:
    accelerator = MezzoAccelerator(cpu=True, precision=Precision("O2", scaler=small_scale("float16")))
    model = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
    model.forward = lambda x: model[0](x) + model[1](x)  # two weights with the same gradient
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = weights(model)
    accelerator.backward(model(torch.tensor([[8.0]])).sum())
    accelerator.clip_grad_norm_([model[0].weight], 1.0)
    optimizer.step()
    moved = {name: (before[name] - value).item() for name, value in weights(model).items()}
    assert moved == {"0.weight": pytest.approx(1.0, rel=1e-3), "1.weight": pytest.approx(8.0, rel=1e-3)}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_accumulated_batches_take_one_step_with_their_mean(dtype: str) -> None:
    accelerator = MezzoAccelerator(
        cpu=True, precision=Precision("O2", dtype, scaler=small_scale(dtype)), gradient_accumulation_steps=2
    )
    model = nn.Linear(2, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before, moved = model.state_dict()["weight"].clone(), []
    for row in ([1.0, 2.0], [3.0, 8.0]):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.tensor([row])).sum())
            optimizer.step()
            optimizer.zero_grad()
        moved.append((before - model.state_dict()["weight"]).tolist())
    assert moved == [[[0.0, 0.0]], [[pytest.approx(2.0), pytest.approx(5.0)]]]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_skipped_step_is_reported_and_does_not_step_the_scheduler(device: str) -> None:
    """On CUDA the device decides, and the host must be told the truth."""
    scaler = GradScaler(init_loss_scaling=4.0, decr_every_n_nan_or_inf=1)
    accelerator = MezzoAccelerator(cpu=device == "cpu", precision=Precision("O2", scaler=scaler))
    model, optimizer = make_net()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    found = []
    for factor in (1.0, math.inf, 1.0):
        before = weights(model)
        accelerator.backward(mse_loss(model(X.to(device)), Y.to(device)) * factor)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        is_same = all(torch.equal(value, before[name]) for name, value in weights(model).items())
        found.append((accelerator.optimizer_step_was_skipped, is_same, scheduler.scheduler.last_epoch))
    assert found == [(False, False, 1), (True, True, 1), (False, False, 2)]
    assert accelerator.scaler is scaler
    assert scaler.get_scale() == 2.0


def test_accelerators_that_share_a_precision_report_their_own_skipped_steps() -> None:
    precision = Precision("O2", "float16", scaler=GradScaler(init_loss_scaling=4.0))
    runs = []
    for _ in range(2):
        accelerator = MezzoAccelerator(cpu=True, precision=precision)
        runs.append((accelerator, *accelerator.prepare(*make_net())))

    def is_skipped(run: int, factor: float) -> bool:
        accelerator, model, optimizer = runs[run]
        accelerator.backward(model(X).mean() * factor)
        optimizer.step()
        optimizer.zero_grad()
        return accelerator.optimizer_step_was_skipped

    found = [is_skipped(run, factor) for run, factor in ((0, 1.0), (1, math.inf), (0, 1.0), (0, math.inf))]
    assert found == [False, True, False, True]


def test_a_step_without_gradients_counts_neither_as_skipped_nor_as_taken() -> None:
    accelerator = MezzoAccelerator(cpu=True, precision=Precision("O2"))
    model, optimizer = accelerator.prepare(*make_net())
    with pytest.warns(UserWarning, match="no gradient"):
        optimizer.step()
    assert not accelerator.optimizer_step_was_skipped
    accelerator.backward(mse_loss(model(X), Y) * math.inf)
    optimizer.step()
    assert accelerator.optimizer_step_was_skipped


def test_two_optimizers_after_one_backward_are_refused_with_a_loss_scale() -> None:
    accelerator = MezzoAccelerator(cpu=True, precision=Precision("O2"))
    nets = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    nets.forward = lambda x: nets[1](nets[0](x))
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    nets, one, other = accelerator.prepare(nets, *optimizers)
    accelerator.backward(nets(torch.ones(2, 4)).sum())
    one.step()
    with pytest.raises(RuntimeError, match="step\\(\\) was called twice"):
        other.step()


@pytest.mark.parametrize("mixed_precision", ["bf16", "fp16"])
def test_mixed_precision_beside_ours_is_an_error_in_one_line(mixed_precision: str) -> None:
    with pytest.raises(ValueError, match=f"mixed_precision='{mixed_precision}' beside") as caught:
        MezzoAccelerator(cpu=True, mixed_precision=mixed_precision, precision=Precision("O2"))
    assert "\n" not in str(caught.value)


def test_a_precision_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a mezzo\\.Precision"):
        MezzoAccelerator(cpu=True, precision="O2")


def test_a_model_without_trainable_parameters_keeps_its_weights() -> None:
    accelerator = MezzoAccelerator(cpu=True, precision=Precision("O2", "bfloat16"))
    teacher = nn.Linear(8, 4).requires_grad_(False)
    teacher = accelerator.prepare(teacher)
    assert teacher.weight.dtype is torch.float32
    assert teacher(X).dtype is torch.float32


def reset() -> None:
    """Forget what Accelerate keeps in the process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_a_compiled_model_runs_in_the_region() -> None:
    def run(**options) -> tuple[nn.Module, list[Tensor]]:
        reset()
        accelerator, model, optimizer, _ = prepared("O2", "bfloat16", **options)
        outputs = []
        for number in range(3):
            x, y = batch(number)
            outputs.append(model(x))  # no region around it
            accelerator.backward(mse_loss(outputs[-1], y))
            optimizer.step()
            optimizer.zero_grad()
        return model, outputs

    (eager, expected), (compiled, found) = run(), run(dynamo_backend="eager")
    assert type(compiled).__name__ == "OptimizedModule"
    assert all(map(torch.equal, found, expected))
    assert_same(weights(getattr(compiled, "_orig_mod")), weights(eager))  # noqa: B009  torch's name for it


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's, between two graphs
@pytest.mark.parametrize("when", ["before prepare", "after prepare"])
def test_a_model_compiled_by_the_user_runs_in_the_region_and_is_prepared_once(monkeypatch, when: str) -> None:
    def run(when: str) -> Tensor:
        reset()
        accelerator = MezzoAccelerator(cpu=True, precision=Precision("O2", "bfloat16"))
        model, optimizer = make_net()
        if when == "before prepare":
            model = torch.compile(model, backend="eager")
        model, optimizer = accelerator.prepare(model, optimizer)
        if when == "after prepare":
            model = torch.compile(model, backend="eager")
        return model(X)

    expected = run("")
    calls = []
    prepare = Precision.prepare
    monkeypatch.setattr(Precision, "prepare", lambda *args, **options: calls.append(1) or prepare(*args, **options))
    assert torch.equal(run(when), expected)
    assert len(calls) == 1


def test_a_model_that_was_made_float32_is_prepared_again() -> None:
    accelerator, model, optimizer, scheduler = prepared("O2", "bfloat16")
    take_steps(accelerator, model, optimizer, scheduler, range(2))
    accelerator.free_memory()
    model = accelerator.prepare(model.float())
    assert model[0].weight.dtype is torch.bfloat16


def test_an_evaluation_before_the_training_changes_no_bit_of_it() -> None:
    def run(evaluates: bool) -> dict[str, Tensor]:
        reset()
        accelerator = MezzoAccelerator(cpu=True, precision=Precision("O2", "bfloat16"))
        model, optimizer = make_net()
        if evaluates:
            model = accelerator.prepare_model(model, evaluation_mode=True)
            assert model(X).dtype is torch.float32
            assert model[0].weight.dtype is torch.float32
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        take_steps(accelerator, model, optimizer, scheduler, range(3))
        assert model[0].weight.dtype is torch.bfloat16
        return weights(model)

    assert_same(run(True), run(False))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("first", ["decorate", "accelerator.prepare", "accelerator.prepare without decorate"])
def test_the_scaler_steps_accelerates_own_wrapper(first: str, dtype: str) -> None:
    def run(wraps: bool) -> dict[str, Tensor]:
        model, optimizer = make_net()
        if first == "decorate":
            decorate(model, optimizer, level="O2", dtype=dtype)
        if wraps:
            model, optimizer = Accelerator(cpu=True).prepare(model, optimizer)
        if first == "accelerator.prepare":
            decorate(model, optimizer, level="O2", dtype=dtype)
        scaler = GradScaler(enable=dtype == "float16")
        region = Precision("O2", dtype).autocast()
        for number in range(3):
            x, y = batch(number)
            with region:
                loss = mse_loss(model(x).float(), y)
            scaler.scale(loss).backward()
            scaler.clip_grad_norm_(optimizer, 0.5)
            scaler.step(optimizer, None)
            scaler.update()
            optimizer.zero_grad()
        return weights(model)

    assert_same(run(wraps=True), run(wraps=False))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_two_processes_train_as_one_with_the_whole_batch(tmp_path: Path, dtype: str) -> None:
    """Two halves of a batch against the whole: gradients are averaged in half, so the bits differ."""
    port = str(free_port())
    base = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
    script = str(Path(__file__).with_name("accelerate_run.py"))
    started = []
    for rank in range(2):
        env = base | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, script, str(tmp_path), dtype]
        started.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    for process in started:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    one, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert_same(one["resumed"], one["weights"])
    assert_same(one["weights"], other["weights"])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report == {"kind": "DistributedDataParallel", "processes": 2, "skipped": [False] * 4}
    alone = subprocess.run(
        [sys.executable, script, str(tmp_path / "alone"), dtype],
        env=dict(os.environ, ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1"), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert alone.returncode == 0, alone.stderr
    whole = torch.load(tmp_path / "alone" / "0.pt", weights_only=True)["weights"]
    for name, value in one["weights"].items():
        # Adam's four steps of 0.01: a sign of a tiny gradient may differ
        torch.testing.assert_close(value, whole[name], rtol=0, atol=0.01)


def test_importing_mezzo_imports_neither_accelerate_nor_transformers() -> None:
    code = "import sys, mezzo.integrations, mezzo.precision, mezzo.model; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"accelerate", "transformers", "wandb"} & {name.partition(".")[0] for name in done.stdout.split()}
