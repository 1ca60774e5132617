"""Averages of a decorated model: of its masters, in float32, by torch's class and by hand."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from decorated import Net
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from mezzo.amp import auto_cast, decorate, master_parameters
from mezzo.optim import master_of

DECAY = 0.999
STEPS = 20


def moving(model: nn.Module, steps: int = STEPS) -> Iterator[None]:
    """Train with gradients that move every weight by less than half weights can show."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    decorate(model, optimizer, level="O2")
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        yield


def small_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def expected_average(model: nn.Module, update: Callable[[float, float, int], float]) -> float:
    """How far the average of a weight moves in float64, if the weight moves by 1e-5 in each step."""
    average = weight = 0.0
    for step in range(STEPS):
        weight -= 1e-5
        average = weight if step == 0 else update(average, weight, step)
    return average


FUNCTIONS: dict[str, tuple[dict[str, Any], Callable[[float, float, int], float]]] = {
    "swa": ({}, lambda a, w, n: a + (w - a) / (n + 1)),
    "ema": ({"avg_fn": get_ema_avg_fn(DECAY)}, lambda a, w, n: DECAY * a + (1 - DECAY) * w),
    "multi ema": ({"multi_avg_fn": get_ema_multi_avg_fn(DECAY)}, lambda a, w, n: DECAY * a + (1 - DECAY) * w),
    "ema with buffers": (
        {"multi_avg_fn": get_ema_multi_avg_fn(DECAY), "use_buffers": True},
        lambda a, w, n: DECAY * a + (1 - DECAY) * w,
    ),
}


@pytest.mark.parametrize("masters", [None, "compact"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_averaged_model_moves_as_the_float32_formula_says(name: str, masters: Any) -> None:
    """Half weights moved by 2.5e-5 where masters move by 1e-4."""
    options, update = FUNCTIONS[name]
    model = small_model()
    decorate(model, level="O2", master_weight=masters)
    start = [value.clone() for value in master_parameters(model)]
    average = AveragedModel(model, **options)
    assert {param.dtype for param in average.module.parameters()} == {torch.float32}
    for _ in moving(model):
        average.update_parameters(model)
    moved = expected_average(model, update)
    for before, after in zip(start, average.module.parameters(), strict=True):
        # weights below 1 in float32, 20 updates rounded to 2^-24 each; 2^-39 for compact masters is less
        torch.testing.assert_close(after - before, torch.full_like(before, moved), rtol=0, atol=20 * 2.0**-24)


def test_an_average_made_before_decorate_reads_masters_too() -> None:
    model = small_model()
    start = model[0].weight.detach().clone()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in moving(model, 2):
        average.update_parameters(model)
    torch.testing.assert_close(average.module[0].weight - start, torch.full((4, 4), -1.5e-5), rtol=0, atol=2.0**-22)


def test_the_averaged_model_runs_everywhere_and_is_saved_in_float32() -> None:
    model = decorate(Net(), level="O2")
    average = AveragedModel(model)
    average.update_parameters(model)
    tokens = torch.tensor([[1, 2, 3]])
    assert average(tokens).dtype is torch.float32
    for level, half in (
        ("O2", "float16"),
        ("O1", "bfloat16"),
    ):  # warnings are errors: every region fits a float32 model
        with auto_cast(level=level, dtype=half):
            average(tokens)
    state = average.state_dict()
    assert {value.dtype for value in state.values()} == {torch.float32, torch.int64}
    other = AveragedModel(decorate(Net(), level="O2"))
    other.load_state_dict(state)
    assert torch.equal(other.module.head.weight, average.module.head.weight)
    assert torch.equal(average.module.positions, torch.linspace(0, 1, 8) + 1e-5)


def test_averaged_model_of_a_plain_model_is_torchs() -> None:
    decorate(nn.Linear(1, 1), level="O2")
    model = nn.Linear(2, 2).double()
    average = AveragedModel(model)
    average.update_parameters(model)
    assert average.module.weight.dtype is torch.float64
    assert torch.equal(average.module.weight, model.weight)


def by_values(average: nn.Module, model: nn.Module) -> None:  # timm's ModelEmaV2
    for mine, theirs in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
        mine.copy_(DECAY * mine + (1 - DECAY) * theirs)


def by_items(average: nn.Module, model: nn.Module) -> None:  # YOLO's
    state = model.state_dict()
    for name, value in average.state_dict().items():
        if value.dtype.is_floating_point:
            value *= DECAY
            value += (1 - DECAY) * state[name].detach()


def by_lists(
    average: nn.Module, model: nn.Module
) -> None:  # timm's ModelEmaV3: both state dicts are gone by the update
    mine, theirs = list(average.state_dict().values()), list(model.state_dict().values())
    for own, other in zip(mine, theirs, strict=True):
        own.lerp_(other, 1 - DECAY)


@pytest.mark.parametrize("masters", [None, "compact", False])
@pytest.mark.parametrize("update", [by_values, by_items, by_lists])
def test_writing_into_the_state_dict_of_a_copy_averages_in_float32(update: Callable[..., None], masters: Any) -> None:
    """A state dict of masters was written, and the half weights with which the copy computes stayed as they were."""
    model = small_model()
    decorate(model, level="O2", master_weight=masters)
    average = copy.deepcopy(model).eval()
    goal = copy.deepcopy(model)
    with torch.no_grad():
        for param in goal.parameters():
            param.add_(1.0)
        for _ in range(10):
            update(average, goal)
    names = [name for name, _ in model.named_parameters()]
    start, target, seen = (module.state_dict() for module in (model, goal, average))
    for name in names:
        wanted = start[name].double() + (1 - DECAY**10) * (target[name].double() - start[name].double())
        is_exact = masters is not False or average.get_parameter(name).dtype is torch.float32
        # float32: ten updates of weights below 2; half: each of the ten is rounded
        tolerance = 10 * 2.0**-24 if is_exact else 10 * 2.0**-12
        torch.testing.assert_close(seen[name].double(), wanted, rtol=0, atol=tolerance)
        weight = average.get_parameter(name)
        assert torch.equal(weight, seen[name].to(weight.dtype))


def test_a_state_dict_that_was_only_read_changes_nothing() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    decorate(model, optimizer, level="O2")
    early = model.state_dict()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()
    after = model[0].weight.detach().clone()
    exact = master_of(model[0].weight).clone()
    del early
    assert torch.equal(model[0].weight, after)
    assert torch.equal(master_of(model[0].weight), exact)


@pytest.mark.parametrize("masters", [None, "compact", False])
def test_master_parameters_are_float32_in_the_order_of_parameters(masters: Any) -> None:
    model = small_model()
    exact = [param.detach().clone() for param in model.parameters()]
    decorate(model, level="O2", master_weight=masters)
    seen = master_parameters(model)
    assert [value.shape for value in seen] == [value.shape for value in exact]
    if masters is not False:
        for value, wanted in zip(seen, exact, strict=True):
            assert value.dtype is torch.float32
            torch.testing.assert_close(value, wanted, rtol=0, atol=2.0**-39)


def test_an_average_by_hand_from_master_parameters_is_exact() -> None:
    model = small_model()
    decorate(model, level="O2")
    shadows: list[Tensor] = [value.clone() for value in master_parameters(model)]
    start = [shadow.clone() for shadow in shadows]
    for _ in moving(model):
        for shadow, value in zip(shadows, master_parameters(model), strict=True):
            shadow.lerp_(value, 0.5)
    average = weight = 0.0
    for _ in range(STEPS):
        weight -= 1e-5
        average += 0.5 * (weight - average)
    for before, after in zip(start, shadows, strict=True):
        torch.testing.assert_close(after - before, torch.full_like(before, average), rtol=0, atol=20 * 2.0**-24)
