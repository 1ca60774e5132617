"""`unscale_` and clipping: true gradients, one reading of them, the norm in float64 where squares need it."""

import math

import pytest
import torch
from scaled import CLOSE, assert_same, half_model, set_grads, values, wide
from torch import nn
from torch.optim import SGD, AdamW, RMSprop

from mezzo.amp import GradScaler, debugging, decorate
from mezzo.optim import attach, attach_master, master_of

# Gradients are made by hand here, without a loss.
pytestmark = pytest.mark.filterwarnings("ignore:.*before any scale")


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


@pytest.mark.filterwarnings("ignore:scaler.step.optimizer. updates float16 parameters")
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
        torch.testing.assert_close(wide(a), wide(b), rtol=1e-4, atol=1e-6)


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


@pytest.mark.parametrize("max_norm", [float("nan"), -1.0])
def test_clipping_refuses_norms_that_are_none(max_norm: float) -> None:
    with pytest.raises(ValueError, match="max_norm="):
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


def decorated_pair() -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    decorate(model, optimizer, level="O2", dtype="bfloat16")
    return model, optimizer


def set_half_grads(model: nn.Module, seed: int = 0) -> None:
    torch.manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape).to(param.dtype)


def test_without_a_scale_clipping_is_folded_into_the_step_too() -> None:
    model, optimizer = decorated_pair()
    scaler = GradScaler(enable=False)
    set_half_grads(model)
    grads = [p.grad.clone() for p in model.parameters()]
    before = [master_of(p).clone() for p in model.parameters()]
    norm = scaler.clip_grad_norm_(optimizer, 0.5)
    expected = torch.linalg.vector_norm(torch.cat([g.double().flatten() for g in grads]))
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    scaler.step(optimizer)
    for param, grad, old in zip(model.parameters(), grads, before, strict=True):
        assert torch.equal(param.grad, grad)
        right = old - grad.float() * (0.5 / (norm.item() + 1e-6))
        torch.testing.assert_close(master_of(param), right, rtol=1e-6, atol=1e-7)
    before = [master_of(p).clone() for p in model.parameters()]
    optimizer.step()  # once: the next step is not clipped
    for param, grad, old in zip(model.parameters(), grads, before, strict=True):
        torch.testing.assert_close(master_of(param), old - grad.float(), rtol=1e-6, atol=1e-7)


def test_a_clip_of_gradients_that_were_thrown_away_is_forgotten() -> None:
    model, optimizer = decorated_pair()
    set_half_grads(model)
    GradScaler(enable=False).clip_grad_norm_(optimizer, 1e-3)
    optimizer.zero_grad()
    set_half_grads(model, 1)
    before = [master_of(p).clone() for p in model.parameters()]
    optimizer.step()
    for param, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(master_of(param), old - param.grad.float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("change", ["accumulate", "replace one", "drop one"])
def test_gradients_that_change_after_clipping_are_an_error(change: str) -> None:
    model, optimizer = decorated_pair()
    set_half_grads(model)
    GradScaler(enable=False).clip_grad_norm_(optimizer, 0.5)
    if change == "accumulate":
        model.weight.grad.add_(1)
    else:
        model.weight.grad = torch.ones_like(model.weight) if change == "replace one" else None
    before = master_of(model.weight).clone()
    with pytest.raises(RuntimeError, match="clip after the last backward"):
        optimizer.step()
    assert torch.equal(master_of(model.weight), before)
