"""What the scaler does on the device: BatchNorm statistics of skipped steps, and no waiting for it."""

import math

import pytest
import torch
from scaled import assert_same, half_model, set_grads, values, wide
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.amp import GradScaler, auto_cast
from mezzo.optim import StepEngine, attach, master_of
from no_waiting import no_waiting

# Gradients are made by hand here, without a loss.
pytestmark = pytest.mark.filterwarnings("ignore:.*before any scale")

# Batch normalisation


def test_statistics_are_kept_when_the_step_is_skipped() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = GradScaler()
    scaler.protect_batch_norm(model)

    def train(factor: float) -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(8, 3) * factor).sum()).backward()
        scaler.minimize(optimizer)

    train(1.0)
    good = {k: v.clone() for k, v in model.state_dict().items()}
    train(math.inf)
    assert all(torch.equal(v, good[k]) for k, v in model.state_dict().items())
    assert model[1].num_batches_tracked.item() == 1
    train(1.0)
    assert model[1].num_batches_tracked.item() == 2
    assert not torch.equal(model[1].running_mean, good["1.running_mean"])
    good["1.running_mean"].fill_(7.0)
    model.load_state_dict(good)  # newer than what was kept
    train(math.inf)
    assert (model[1].running_mean == 7.0).all()


def test_without_protection_the_statistics_are_poisoned() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = GradScaler()
    scaler.scale(model(torch.full((8, 3), math.inf)).sum()).backward()
    scaler.minimize(optimizer)
    assert not model[0].running_mean.isfinite().all()


# No waiting


class CountHostReads(TorchDispatchMode):
    """Counts what would make the host wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"):
            self.reads.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: SGD(p, lr=0.1),
        lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: Adam(p, lr=0.1),
        lambda p: AdamW(p, lr=0.1),
    ],
)
def test_step_and_update_never_read_from_the_device(make, attached: bool, monkeypatch) -> None:
    # On the CPU the host looks first, for free, so that a skipped step runs no hooks: here the CPU plays the device.
    monkeypatch.setattr(StepEngine, "_knows_skips_on_host", lambda _engine: False)
    model = half_model()
    optimizer = make(model.parameters())
    scaler = GradScaler()
    if attached:
        attach(optimizer)
    bn = nn.BatchNorm1d(3)
    scaler.protect_batch_norm(bn)
    with CountHostReads() as counted:
        for i in range(3):
            set_grads(model.parameters(), 1.0, seed=i, bad_at=1 if i == 1 else None)
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            scaler.skipped_steps  # noqa: B018
    assert counted.reads == []


@pytest.mark.parametrize(
    ("make", "reads"),
    [
        (lambda p: SGD(p, lr=0.1, momentum=0.9), False),
        (lambda p: AdamW(p, lr=0.1), False),
        (lambda p: RMSprop(p, lr=0.1), True),  # the generic path reads in any case
        (lambda p: Adam(p, lr=0.1, amsgrad=True), True),
    ],
)
def test_off_the_cpu_the_host_looks_first_only_where_the_step_reads_anyway(make, reads: bool) -> None:
    weight = nn.Parameter(torch.ones(2, device="meta"))
    weight.grad = torch.ones(2, device="meta")
    assert StepEngine(make([weight]))._knows_skips_on_host() is reads


def test_the_counter_sees_the_host_read_of_other_optimizers() -> None:
    model = half_model()
    optimizer = RMSprop(model.parameters(), lr=0.1)
    set_grads(model.parameters(), 1.0, seed=0)
    with CountHostReads() as counted:
        GradScaler().step(optimizer)
    assert counted.reads


@pytest.mark.gpu
@pytest.mark.parametrize(("make", "runs"), [(SGD, True), (AdamW, True), (RMSprop, False)])
def test_on_cuda_hooks_run_in_skipped_steps_only_where_the_host_does_not_know(make, runs: bool) -> None:
    weight = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer, scaler = make([weight], lr=0.1), GradScaler()
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    weight.grad = torch.full_like(weight, math.inf)
    scaler.minimize(optimizer)
    scaler.flush()
    assert (scaler.skipped_steps, bool(calls)) == (1, runs)
    assert (weight == 1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("make", [SGD, AdamW, RMSprop])
def test_on_cuda_a_step_inside_the_region_is_the_step_outside(make, level: str) -> None:
    def run(is_inside: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3).cuda()
        optimizer, scaler = make(model.parameters(), lr=0.1), GradScaler(init_loss_scaling=64.0)
        for _ in range(3):
            with auto_cast(level=level):
                loss = model(torch.ones(2, 4, device="cuda")).float().square().mean()
            with auto_cast(enable=is_inside, level=level):
                scaler.scale(loss).backward()
                scaler.clip_grad_norm_(optimizer, 0.5)
                scaler.minimize(optimizer)
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    assert_same(run(True), run(False))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_step_and_update_do_not_synchronise_on_cuda(kind) -> None:
    model = half_model().cuda()
    optimizer = kind(model.parameters(), lr=0.1)
    attach(optimizer)
    scaler = GradScaler(init_loss_scaling=4.0, decr_every_n_nan_or_inf=1)
    bn = nn.BatchNorm1d(3).cuda()
    scaler.protect_batch_norm(bn)
    outcomes: list[bool] = []
    scaler.register_outcome_hook(outcomes.append)
    for i in range(6):
        generator = torch.Generator(device="cuda").manual_seed(i)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator, device="cuda").to(param.dtype)
        if i == 3:
            model[0].weight.grad[0, 0] = math.inf
            before = values(model.parameters())
        with no_waiting():
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            scaler.skipped_steps  # noqa: B018
        if i == 3:
            assert_same(before, values(model.parameters()))
    scaler.flush()
    assert outcomes == [True, True, True, False, True, True]
    assert (scaler.skipped_steps, scaler.get_scale()) == (1, 2.0)
    saved = optimizer.state_dict()["state"].values()
    assert all("step" not in state or state["step"].device.type == "cpu" for state in saved)


@pytest.mark.gpu
def test_step_and_update_can_be_captured_in_a_cuda_graph() -> None:
    model = half_model().cuda()
    optimizer = AdamW(model.parameters(), lr=0.1)
    attach(optimizer)
    scaler = GradScaler(init_loss_scaling=4.0, decr_every_n_nan_or_inf=1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        scaler.minimize(optimizer)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaler.minimize(optimizer)
    before = values(model.parameters())
    model[0].weight.grad[0, 0] = math.nan
    graph.replay()
    assert_same(before, values(model.parameters()))
    model[0].weight.grad.fill_(1.0)
    graph.replay()
    assert not torch.equal(before[1], master_of(model[0].weight))
    scaler.flush()
    assert (scaler.skipped_steps, scaler.get_scale()) == (1, 2.0)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [SGD, Adam, AdamW, RMSprop])
def test_cuda_steps_equal_cpu_steps(kind) -> None:
    results = []
    for device in ("cpu", "cuda"):
        model = half_model().to(device)
        optimizer = kind(model.parameters(), lr=0.01)
        scaler = GradScaler(init_loss_scaling=8.0)
        for i in range(4):
            generator = torch.Generator().manual_seed(i)
            for param in model.parameters():
                param.grad = torch.randn(param.shape, generator=generator).to(device, param.dtype)
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.minimize(optimizer)
        results.append([wide(p).cpu() for p in model.parameters()])
    for cpu, cuda in zip(*results, strict=True):
        torch.testing.assert_close(cpu, cuda, rtol=1e-4, atol=1e-6)
