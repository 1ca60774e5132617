"""GradScaler around real steps: order of calls, gradients, clipping, accumulation, several optimizers."""

import math

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.amp import debugging
from mezzo.amp._scaler import GradScaler, LossScaleFloorError
from mezzo.optim import attach, attach_master, master_of

CLOSE = {"rtol": 1e-5, "atol": 1e-7}  # one rounding more or less in float32


def half_model(seed: int = 1) -> nn.Sequential:
    """A small network with half weights, float32 masters, and a normalisation that stays float32."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    for layer in (model[0], model[2]):
        for param in layer.parameters():
            value = param.detach().clone()
            param.data = value.half()
            attach_master(param, value)
    return model


def set_grads(params, scale: float, seed: int, bad_at: int | None = None) -> None:
    generator = torch.Generator().manual_seed(seed)
    for i, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator).to(param.dtype) * scale
        param.grad = grad.fill_(math.inf) if i == bad_at else grad


def values(params) -> list[torch.Tensor]:
    return [t.detach().clone() for p in params for t in (p, master_of(p)) if t is not None]


def assert_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# scale()


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_scaled_loss_is_float32_at_least_and_keeps_its_shape(shape, dtype, expected) -> None:
    loss = torch.full(shape, 3.0, dtype=dtype, requires_grad=True)
    scaled = GradScaler().scale(loss)
    assert (scaled.dtype, scaled.shape) == (expected, shape)
    assert (scaled == 3 * 2.0**15).all()  # half would have overflowed
    scaled.sum().backward()
    assert (loss.grad.float() == 2.0**15).all()


def test_lists_and_tuples_of_losses_are_scaled() -> None:
    scaler = GradScaler(init_loss_scaling=2.0)
    one, (two, three) = scaler.scale([torch.tensor(1.0), (torch.tensor(2.0), torch.tensor(3.0))])
    assert (one.item(), two.item(), three.item()) == (2.0, 4.0, 6.0)
    with pytest.raises(TypeError, match="a list or tuple of tensors; got float"):
        scaler.scale(1.0)


# step()


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("make", [SGD, AdamW, RMSprop])
def test_scaled_step_equals_the_plain_step_with_true_gradients(make, attached: bool) -> None:
    ours, plain = half_model(), half_model()
    optimizer, reference = make(ours.parameters(), lr=0.01), make(plain.parameters(), lr=0.01)
    attach(reference)
    if attached:
        attach(optimizer)
    scaler = GradScaler(init_loss_scaling=256.0)
    for i in range(4):
        set_grads(ours.parameters(), 256.0, seed=i)
        set_grads(plain.parameters(), 1.0, seed=i)
        before = [p.grad.clone() for p in ours.parameters()]
        scaler.step(optimizer)
        scaler.update()
        reference.step()
        assert_same(before, [p.grad for p in ours.parameters()])
    assert_same(values(ours.parameters()), values(plain.parameters()))


def test_undecorated_float32_model_trains_as_with_torchs_own_scaler() -> None:
    def run(scaler) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Linear(4, 2)
        optimizer = Adam(model.parameters(), lr=0.01)
        for _ in range(5):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert type(optimizer).step is Adam.step
        return [p.detach() for p in model.parameters()]

    stock = run(torch.amp.GradScaler("cpu", init_scale=2.0**15))
    for ours, theirs in zip(run(GradScaler()), stock, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("make", [SGD, AdamW, RMSprop])
def test_step_is_skipped_and_scale_halved_when_a_gradient_overflows(make) -> None:
    model = half_model()
    optimizer = make(model.parameters(), lr=0.1)
    scaler = GradScaler(decr_every_n_nan_or_inf=1)
    before = values(model.parameters())
    set_grads(model.parameters(), 1.0, seed=0, bad_at=2)
    scaler.minimize(optimizer)
    assert_same(before, values(model.parameters()))
    assert scaler.get_scale() == 2.0**14
    assert scaler.skipped_steps == 1
    set_grads(model.parameters(), 1.0, seed=0)
    optimizer.step()  # nothing sticks to the optimizer: a plain step is taken
    assert not torch.equal(before[0], model[0].weight.detach())
    assert not hasattr(optimizer, "found_inf")


def test_model_decorated_alone_gets_its_optimizer_attached_at_the_first_step() -> None:
    model = half_model()
    optimizer = SGD(model.parameters(), lr=1e-5)
    before = master_of(model[0].weight).clone()
    set_grads(model.parameters(), 1.0, seed=0)
    GradScaler(init_loss_scaling=1.0).step(optimizer)
    assert not torch.equal(before, master_of(model[0].weight))
    assert "step" in optimizer.__dict__


def test_step_returns_what_the_optimizer_returns_and_takes_no_closure() -> None:
    class Talking(SGD):
        def step(self, closure=None):
            super().step(closure)
            return "done"

    weight = nn.Parameter(torch.zeros(1))
    optimizer = Talking([weight], lr=1.0)
    weight.grad = torch.ones(1)
    assert GradScaler().minimize(optimizer) == "done"
    with pytest.raises(RuntimeError, match=r"step\(\) takes no closure: evaluate it before"):
        GradScaler().step(optimizer, lambda: None)
    with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer, got Linear"):
        GradScaler().step(nn.Linear(1, 1))


# unscale_() and clipping


def test_unscale_stores_true_float32_gradients_and_step_does_not_unscale_again() -> None:
    ours, plain = half_model(), half_model()
    optimizer, reference = SGD(ours.parameters(), lr=0.1), SGD(plain.parameters(), lr=0.1)
    attach(reference)
    scaler = GradScaler(init_loss_scaling=128.0)
    set_grads(ours.parameters(), 128.0, seed=5)
    set_grads(plain.parameters(), 1.0, seed=5)
    norm_grad = ours[1].weight.grad
    scaler.unscale_(optimizer)
    assert ours[1].weight.grad is norm_grad  # float32 gradients in place: DDP looks at the same memory
    for param, true in zip(ours.parameters(), plain.parameters(), strict=True):
        assert param.grad.dtype == torch.float32
        assert torch.equal(param.grad, true.grad.float())
    scaler.step(optimizer)
    reference.step()
    assert_same(values(ours.parameters()), values(plain.parameters()))


def test_backward_works_after_unscale_on_half_parameters() -> None:
    weight = nn.Parameter(torch.ones(2).half())
    optimizer = SGD([weight], lr=0.0)
    scaler = GradScaler(init_loss_scaling=2.0)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(weight.float().sum()).backward()
        scaler.unscale_(optimizer)
        assert weight.grad.tolist() == [1.0, 1.0]
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_unscale_handles_sparse_gradients() -> None:
    table = nn.Embedding(5, 2, sparse=True).half()
    optimizer = SGD(table.parameters(), lr=1.0)
    scaler = GradScaler(init_loss_scaling=4.0)
    scaler.scale(table(torch.tensor([1, 3, 1])).float().sum()).backward()
    scaler.unscale_(optimizer)
    assert table.weight.grad.is_sparse
    assert table.weight.grad.to_dense()[:, 0].tolist() == [0.0, 2.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("scale", [1024.0, 1000.0])
@pytest.mark.parametrize("max_norm", [0.5, 100.0])
@pytest.mark.parametrize("make", [SGD, AdamW, RMSprop])
def test_folded_clipping_equals_unscale_and_torchs_clipping(make, max_norm: float, scale: float) -> None:
    ours, plain = half_model(), half_model()
    optimizer, reference = make(ours.parameters(), lr=0.1), make(plain.parameters(), lr=0.1)
    scaler, other = GradScaler(init_loss_scaling=scale), GradScaler(init_loss_scaling=scale)
    for i in range(3):
        set_grads(ours.parameters(), scale, seed=i)
        set_grads(plain.parameters(), scale, seed=i)
        before = [p.grad.clone() for p in ours.parameters()]
        norm = scaler.clip_grad_norm_(optimizer, max_norm)
        scaler.minimize(optimizer)
        assert_same(before, [p.grad for p in ours.parameters()])
        other.unscale_(reference)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        other.minimize(reference)
        torch.testing.assert_close(norm, expected, **CLOSE)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(_wide(a), _wide(b), rtol=1e-4, atol=1e-6)


def _wide(param: nn.Parameter) -> torch.Tensor:
    return param.detach() if master_of(param) is None else master_of(param)


def test_clipping_after_unscale_and_of_a_disabled_scaler() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = SGD([weight], lr=1.0)
    scaler = GradScaler(init_loss_scaling=8.0)
    weight.grad = torch.tensor([24.0, 32.0])
    scaler.unscale_(optimizer)
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == pytest.approx(5.0)
    scaler.minimize(optimizer)
    assert weight.tolist() == pytest.approx([-0.6, -0.8], rel=1e-5)
    weight.grad = torch.tensor([3.0, 4.0])
    assert GradScaler(enable=False).clip_grad_norm_(optimizer, 1.0).item() == pytest.approx(5.0)
    assert weight.grad.norm().item() == pytest.approx(1.0, rel=1e-5)


def test_clipping_applies_to_one_step_only_and_sees_overflow() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = SGD([weight], lr=1.0)
    scaler = GradScaler(init_loss_scaling=1.0)
    weight.grad = torch.tensor([math.inf])
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.minimize(optimizer)
    assert weight.item() == 0.0
    weight.grad = torch.tensor([10.0])
    scaler.minimize(optimizer)
    assert weight.item() == -10.0


# Accumulation (the guide's 3.1)


def test_accumulated_micro_batches_equal_one_large_batch() -> None:
    def run(micro_batches: int) -> list[torch.Tensor]:
        model = half_model().float()
        optimizer = SGD(model.parameters(), lr=0.1)
        scaler = GradScaler(init_loss_scaling=64.0)
        data = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
        for _ in range(3):
            for part in data.chunk(micro_batches):
                scaler.scale(model(part).square().sum() / 16).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return values(model.parameters())

    for one, four in zip(run(1), run(4), strict=True):
        torch.testing.assert_close(one, four, rtol=1e-4, atol=1e-6)


# Order of calls


def ready(dynamic: bool = True) -> tuple[GradScaler, SGD]:
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    return GradScaler(use_dynamic_loss_scaling=dynamic), SGD([weight], lr=1.0)


def test_wrong_orders_are_errors_that_say_what_to_do() -> None:
    scaler, optimizer = ready()
    with pytest.raises(RuntimeError, match=r"update\(\) without a step since the last update\(\): call step"):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) was already called on this optimizer since"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) is called after step\(\): call update\(\)"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_\(\) is called after step\(\)"):
        scaler.clip_grad_norm_(optimizer, 1.0)
    for call in (scaler.step, scaler.minimize):
        with pytest.raises(RuntimeError, match=r"step\(\) was already called on this optimizer since the last update"):
            call(optimizer)
    scaler.update()
    with pytest.raises(RuntimeError, match="without a step"):
        scaler.update()
    scaler.step(optimizer)


def test_fixed_scaling_may_step_again_at_once_and_keeps_its_scale() -> None:
    scaler, optimizer = ready(dynamic=False)
    weight = optimizer.param_groups[0]["params"][0]
    weight.grad.fill_(2.0**15)
    scaler.step(optimizer)
    scaler.step(optimizer)
    assert weight.item() == -2.0
    assert len(scaler._stepped) == 1  # does not grow where update() is never called
    weight.grad.fill_(math.nan)
    for _ in range(5):
        scaler.minimize(optimizer)
    assert (weight.item(), scaler.get_scale(), scaler.skipped_steps) == (-2.0, 2.0**15, 5)


def test_disabled_scaler_does_nothing() -> None:
    scaler, (_, optimizer) = GradScaler(enable=False), ready()
    weight = optimizer.param_groups[0]["params"][0]
    loss = torch.tensor(2.0).half()
    assert scaler.scale(loss) is loss
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaler.update()
    assert scaler.minimize(optimizer, loss) is None
    assert weight.item() == -2.0
    assert scaler.state_dict() == {}
    assert (scaler.is_enable(), scaler.get_scale()) == (False, 1.0)


# Several optimizers


@pytest.mark.parametrize("bad", [0, 1])
def test_each_optimizer_skips_by_its_own_gradients_and_the_scale_sees_all(bad: int) -> None:
    params = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizers = [SGD([p], lr=1.0) for p in params]
    scaler = GradScaler(init_loss_scaling=4.0, decr_every_n_nan_or_inf=1)
    for i, param in enumerate(params):
        param.grad = torch.tensor([math.inf if i == bad else 4.0])
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [p.item() for p in params] == [0.0 if i == bad else -1.0 for i in range(2)]
    assert scaler.get_scale() == 2.0
    assert scaler.skipped_steps == 1


# The floor


def poison(scaler: GradScaler, optimizer: SGD, steps: int) -> None:
    for _ in range(steps):
        set_grads([p for g in optimizer.param_groups for p in g["params"]], 1.0, seed=0, bad_at=2)
        scaler.minimize(optimizer)


def test_too_many_bad_steps_at_the_floor_stop_training_and_name_the_parameter() -> None:
    model = half_model()
    optimizer = SGD(model.named_parameters(), lr=0.1)
    scaler = GradScaler(init_loss_scaling=2.0, decr_every_n_nan_or_inf=1, max_skips_at_floor=3)
    poison(scaler, optimizer, 3)  # one at scale 2, two at the floor
    with pytest.raises(LossScaleFloorError, match=r"3 steps in a row.*floor \(1\); first in '1\.weight'\. "):
        poison(scaler, optimizer, 1)


def test_names_come_from_the_scaler_or_else_place_and_shape() -> None:
    weight = nn.Parameter(torch.zeros(2, 3))
    optimizer = SGD([weight], lr=0.1)
    scaler = GradScaler(init_loss_scaling=1.0, max_skips_at_floor=1)
    weight.grad = torch.full((2, 3), math.nan)
    with pytest.raises(LossScaleFloorError, match=r"first in parameter #0 of group 0, shape \(2, 3\)"):
        scaler.minimize(optimizer)
    holder = nn.Module()
    holder.stem = weight
    scaler.name_parameters(holder)
    with pytest.raises(LossScaleFloorError, match="first in 'stem'"):
        scaler.minimize(optimizer)


def test_a_good_step_ends_the_row_and_none_means_no_limit() -> None:
    model = half_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = GradScaler(init_loss_scaling=1.0, max_skips_at_floor=3)
    for _ in range(4):
        poison(scaler, optimizer, 2)
        set_grads(model.parameters(), 1.0, seed=0)
        scaler.minimize(optimizer)
    poison(GradScaler(init_loss_scaling=1.0, max_skips_at_floor=None), optimizer, 60)


# Outcomes


def test_outcome_hook_is_called_once_per_update_in_order() -> None:
    scaler, optimizer = ready()
    weight = optimizer.param_groups[0]["params"][0]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    outcomes: list[bool] = []
    handle = scaler.register_outcome_hook(outcomes.append)
    scaler.register_outcome_hook(lambda taken: scheduler.step() if taken else None)
    for bad in (False, True, True, False):
        weight.grad = torch.tensor([math.nan if bad else 0.0])
        scaler.minimize(optimizer)
    assert outcomes == [True, False, False, True]
    assert optimizer.param_groups[0]["lr"] == 0.25
    handle.remove()
    handle.remove()
    scaler.minimize(optimizer)
    scaler.flush()
    assert len(outcomes) == 4
    assert scaler.skipped_steps == 2


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
def test_step_and_update_never_read_from_the_device(make, attached: bool) -> None:
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


def test_the_counter_sees_the_host_read_of_other_optimizers() -> None:
    model = half_model()
    optimizer = RMSprop(model.parameters(), lr=0.1)
    set_grads(model.parameters(), 1.0, seed=0)
    with CountHostReads() as counted:
        GradScaler().step(optimizer)
    assert counted.reads


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
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
        torch.cuda.set_sync_debug_mode("error")
        try:
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            scaler.skipped_steps  # noqa: B018
        finally:
            torch.cuda.set_sync_debug_mode("default")
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
        results.append([_wide(p).cpu() for p in model.parameters()])
    for cpu, cuda in zip(*results, strict=True):
        torch.testing.assert_close(cpu, cuda, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("max_norm", [float("nan"), -1.0])
def test_clipping_refuses_norms_that_are_none(max_norm: float) -> None:
    with pytest.raises(ValueError, match=r"max_norm=.*: must be a number of at least 0"):
        GradScaler().clip_grad_norm_(SGD([nn.Parameter(torch.zeros(1))], lr=1.0), max_norm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipping_reads_the_gradients_once_and_large_ones_do_not_overflow(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.zeros(3, dtype=dtype))
    if dtype is torch.bfloat16:
        attach_master(weight, torch.zeros(3))
    optimizer = SGD([weight], lr=1.0)
    scaler = GradScaler(init_loss_scaling=2.0**15)
    scaler.scale(torch.ones(()))
    weight.grad = (torch.full((3,), 2.0**53) * 2**15).to(dtype)
    with debugging.collect_operator_stats(print_table=False) as stats:
        norm = scaler.clip_grad_norm_(optimizer, 1.0)
    assert sum(stats.totals()["_foreach_norm"]) == 1
    assert norm.item() == pytest.approx(3**0.5 * 2.0**53, rel=1e-6)
    scaler.step(optimizer)
    result = weight.detach() if dtype is torch.float32 else master_of(weight)
    torch.testing.assert_close(result, torch.full((3,), -(3**-0.5)), rtol=1e-6, atol=0)
