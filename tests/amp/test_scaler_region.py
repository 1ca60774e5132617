"""Steps and scaler calls inside an `auto_cast` region: bit for bit those outside of it."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer, RMSprop

from mezzo.amp import GradScaler, auto_cast, decorate
from mezzo.optim import outside_autocast

# Gradients are made by hand here, without a loss.
pytestmark = pytest.mark.filterwarnings("ignore:.*before any scale")


class Products(Optimizer):
    """Its rule has matrix products, as Muon's and Shampoo's; a policy would compute them in half."""

    def __init__(self, params) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for param in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            grad = param.grad.reshape(param.shape[0], -1)
            param.add_((grad @ (grad.T @ grad) + grad).reshape(param.shape).to(param.dtype), alpha=-0.1)


OPTIMIZERS = {
    "products": Products,
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: AdamW(p, lr=0.01),
    "amsgrad": lambda p: AdamW(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, momentum=0.9, centered=True),
}

Step = Callable[[GradScaler, Optimizer], Any]


def unscale_and_step(scaler: GradScaler, optimizer: Optimizer) -> None:
    scaler.unscale_(optimizer)
    scaler.clip_grad_norm_(optimizer, 0.5)
    scaler.step(optimizer)
    scaler.update()


def clip_and_minimize(scaler: GradScaler, optimizer: Optimizer) -> None:
    scaler.clip_grad_norm_(optimizer, 0.5)
    scaler.minimize(optimizer)


def train(make: Any, dtype: str, is_decorated: bool, is_inside: bool, step: Step, steps: int = 3) -> list[Tensor]:
    """Train with every call of the scaler inside the region or outside of it; return weights and state."""

    def region(use: bool) -> Any:
        return auto_cast(level="O2", dtype=dtype) if use else nullcontext()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = make(model.parameters())
    if is_decorated:
        decorate(model, optimizer, level="O2", dtype=dtype)
    scaler = GradScaler(enable=dtype == "float16", init_loss_scaling=2.0**12, incr_every_n_steps=2)
    for _ in range(steps):
        with region(True):
            loss = (model(torch.randn(8, 4)).float() ** 2).mean()
        with region(is_inside):
            scaled = scaler.scale(loss)
        assert scaled.dtype is torch.float32
        scaled.backward()
        with region(is_inside):
            step(scaler, optimizer)
        optimizer.zero_grad()
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return [*(p.detach() for p in model.parameters()), *states, torch.tensor(scaler.get_scale())]


@pytest.mark.parametrize("step", [unscale_and_step, clip_and_minimize])
@pytest.mark.parametrize("is_decorated", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_inside_the_region_is_the_step_outside_bit_for_bit(
    name: str, dtype: str, is_decorated: bool, step: Step
) -> None:
    outside = train(OPTIMIZERS[name], dtype, is_decorated, False, step)
    inside = train(OPTIMIZERS[name], dtype, is_decorated, True, step)
    assert all(t.isfinite().all() for t in inside)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


def test_a_step_is_not_cast_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.13 raises one flag for the whole process while any thread compiles."""
    outside = train(OPTIMIZERS["rmsprop"], "bfloat16", True, False, clip_and_minimize)
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True, raising=False)
    with auto_cast(level="O2", dtype="bfloat16"), outside_autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    inside = train(OPTIMIZERS["rmsprop"], "bfloat16", True, True, clip_and_minimize)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_decorated_optimizers_own_step_is_the_same_inside_and_outside(name: str) -> None:
    def step(_scaler: GradScaler, optimizer: Optimizer) -> None:
        optimizer.step()

    inside, outside = (train(OPTIMIZERS[name], "bfloat16", True, where, step) for where in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


@pytest.mark.parametrize("through_scaler", [True, False])
@pytest.mark.parametrize("make", [lambda p: LBFGS(p, max_iter=4), lambda p: SGD(p, lr=0.1), lambda p: RMSprop(p)])
def test_the_closure_sees_the_policy_of_the_region_and_the_rule_does_not(make, through_scaler: bool) -> None:
    def run(is_inside: bool) -> tuple[list[Tensor], set[torch.dtype]]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = make(model.parameters())
        if not through_scaler:
            decorate(model, optimizer, level="O2", dtype="bfloat16")
        x, seen = torch.randn(8, 4), set()

        def closure() -> Tensor:
            optimizer.zero_grad()
            with nullcontext() if is_inside else auto_cast(level="O2", dtype="bfloat16"):
                out = model(x)
            seen.add(out.dtype)
            loss = torch.nn.functional.mse_loss(out.float(), torch.ones(8, 3)).float()
            loss.backward()
            return loss

        with auto_cast(level="O2", dtype="bfloat16") if is_inside else nullcontext():
            if through_scaler:
                GradScaler(enable=False).step(optimizer, closure)
            else:
                optimizer.step(closure)
        assert not torch.is_autocast_enabled("cpu")
        return [p.detach() for p in model.parameters()], seen

    (inside, seen), (outside, _) = run(True), run(False)
    assert seen == {torch.bfloat16}
    assert all(t.isfinite().all() for t in inside)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


@pytest.mark.parametrize("enable", [True, False])
def test_a_whole_loop_inside_one_region_sees_the_new_weights(enable: bool) -> None:
    """Half copies of float32 weights are kept by torch until the region ends; after a step they are old."""

    def run(is_one_region: bool) -> list[float]:
        torch.manual_seed(0)
        model, x = nn.Linear(4, 3), torch.randn(8, 4)
        optimizer = SGD(model.parameters(), lr=0.5)
        scaler = GradScaler(enable=enable, init_loss_scaling=64.0)

        def step() -> float:
            optimizer.zero_grad()
            with auto_cast(level="O1", dtype="bfloat16"):
                loss = (model(x).float() ** 2).mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            return loss.item()

        with auto_cast(level="O1", dtype="bfloat16") if is_one_region else nullcontext():
            return [step() for _ in range(4)]

    assert run(True) == run(False)


def test_hooks_of_the_step_see_the_region() -> None:
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    seen: list[bool] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    model(torch.ones(1, 2)).sum().backward()
    with auto_cast(level="O2", dtype="bfloat16"):
        GradScaler().step(optimizer)
        assert torch.is_autocast_enabled("cpu")
    assert seen == [True]


@pytest.mark.parametrize("stepped_before", [True, False])
def test_a_loss_is_scaled_in_one_compiled_graph_inside_a_region(stepped_before: bool) -> None:
    torch.manual_seed(0)
    model, x, scaler = nn.Linear(4, 3), torch.randn(8, 4), GradScaler()
    optimizer = SGD(model.parameters(), lr=0.1)

    def scaled_loss() -> Tensor:
        return scaler.scale(model(x).float().square().mean())

    if stepped_before:
        scaled_loss().backward()
        scaler.minimize(optimizer)
    compiled = torch.compile(scaled_loss, backend="eager", fullgraph=True)
    with auto_cast(level="O2"):
        assert compiled().item() == scaled_loss().item()
    assert compiled().item() == scaled_loss().item()
    torch._dynamo.reset()
