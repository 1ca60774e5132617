"""FP8 copies that are kept beside a weight: when they are renewed, from what, and whose they are."""

import copy
import gc
import math
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from mezzo.amp import Fp8Recipe, auto_cast, decorate
from mezzo.fp8 import (
    WeightCopies,
    copies_for_update,
    copies_of,
    count_of_copies,
    fp8_linear,
    keep_copies,
    recipe_to_text,
    renew_copies,
)
from mezzo.optim import attach_master

RECIPE = Fp8Recipe(emulate=True, min_width=0, min_size=0)


@pytest.fixture
def renewed(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The weights whose copies were renewed, in order."""
    found: list[Tensor] = []
    renew = WeightCopies.renew

    def spy(copies: WeightCopies, weight: Tensor) -> None:
        found.append(weight)
        renew(copies, weight)

    monkeypatch.setattr(WeightCopies, "renew", spy)
    return found


def weight_of(rows: int = 32, columns: int = 48, factor: float = 1.0) -> nn.Parameter:
    return with_master(torch.randn(rows, columns) * factor, torch.bfloat16)


def with_master(value: Tensor, half: torch.dtype) -> nn.Parameter:
    weight = nn.Parameter(value.to(half))
    attach_master(weight, value)
    return weight


def assert_copies(copies: WeightCopies, weight: Tensor) -> None:
    amax = weight.detach().double().abs().max().item()
    scale = 2.0 ** math.floor(math.log2(448 / (2 * amax)))
    # A power of two moves a half number exactly; torch rounds it to FP8.
    wanted = (weight.detach().float() * scale).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(copies.values.view(torch.uint8), wanted)
    assert torch.equal(copies.transposed.view(torch.uint8), wanted.t())
    assert copies.transposed.is_contiguous()
    assert copies.state.tolist() == [1 / scale, amax, 0.0, 0.0]


def kept(weight: Tensor) -> WeightCopies:
    copies = keep_copies(weight)
    assert copies is not None
    return copies


@pytest.mark.parametrize("factor", [1e-3, 1.0, 700.0])
def test_copies_are_the_weight_and_its_transpose_with_room_for_twice_the_largest(factor: float) -> None:
    weight = weight_of(factor=factor)
    kept(weight).operand(weight)
    assert_copies(kept(weight), weight)
    # Three bits of mantissa: half of 2**-3; below, steps of 2**-9 times the scale's inverse.
    back = kept(weight).values.float() * kept(weight).state[0]
    torch.testing.assert_close(
        back, weight.detach().float(), rtol=2**-4, atol=2**-10 * kept(weight).state[0].item(), check_dtype=False
    )


def test_a_weight_of_zeros_has_copies_of_zeros_at_scale_one() -> None:
    weight = with_master(torch.zeros(16, 16), torch.float16)
    operand = kept(weight).operand(weight)
    assert operand.inverse.item() == 1
    assert not operand.values.float().any()


def test_copies_are_made_once_and_again_after_each_change_where_they_are(renewed: list[Tensor]) -> None:
    layer = nn.Linear(48, 32, bias=False)
    decorate(layer, level="O2", dtype="bfloat16")
    weight = layer.weight
    copies = kept(weight)
    addresses = [t.data_ptr() for t in (copies.values, copies.transposed, copies.state)]
    for _ in range(2):
        copies.operand(weight)
    assert len(renewed) == 1
    with torch.no_grad():
        weight.mul_(3)
    copies.operand(weight)
    assert_copies(copies, weight)
    layer.load_state_dict({"weight": torch.randn(32, 48) * 5})
    copies.operand(weight)
    assert_copies(copies, weight)
    weight.data = torch.randn(32, 48).bfloat16()
    copies.operand(weight)
    assert_copies(copies, weight)
    layer.half()
    kept(weight).operand(weight)
    assert_copies(copies, weight)
    assert len(renewed) == 1 + 4
    assert kept(weight) is copies
    assert addresses == [t.data_ptr() for t in (copies.values, copies.transposed, copies.state)]


def test_a_parameter_without_a_master_is_converted_in_each_call() -> None:
    weight = nn.Parameter(torch.randn(32, 48).bfloat16())
    assert keep_copies(weight) is None
    x = torch.randn(16, 48).bfloat16()
    fp8_linear(x, weight, None, recipe_to_text(RECIPE))
    weight.data.copy_(torch.randn(32, 48) * 9)  # as FSDP gathers: at the same address, and no version says so
    after = fp8_linear(x, weight, None, recipe_to_text(RECIPE))
    assert torch.equal(after, fp8_linear(x, weight.detach().clone(), None, recipe_to_text(RECIPE)))
    assert copies_of(weight) is None


def test_a_change_that_leaves_no_trace_is_told_by_renew_copies() -> None:
    weight, without = weight_of(), weight_of()
    kept(weight).operand(weight)
    weight.data.copy_(torch.randn(32, 48) * 9)
    assert kept(weight).is_of(weight)  # by all that torch shows
    renew_copies([weight, without])
    assert_copies(kept(weight), weight)
    assert copies_of(without) is None


def test_a_weight_of_another_shape_gets_new_copies() -> None:
    weight = weight_of(32, 48)
    old = kept(weight)
    old.operand(weight)
    weight.data = weight.data[:16].clone()
    assert copies_of(weight) is None
    kept(weight).operand(weight)
    assert kept(weight) is not old
    assert_copies(kept(weight), weight)


def test_only_parameters_get_copies_and_no_alias_of_one_has_them() -> None:
    weight = weight_of()
    assert keep_copies(weight.detach()) is None
    copies = kept(weight)
    assert copies_of(weight.detach()) is None  # its versions may be another's
    weight.data = weight.data.clone()
    assert kept(weight) is copies


def test_a_square_weight_and_its_transpose_are_not_taken_for_each_other() -> None:
    weight = weight_of(32, 32)
    kept(weight).operand(weight)
    assert copies_of(weight.t()) is None
    x = torch.randn(16, 32).bfloat16()
    turned = fp8_linear(x, weight.t(), None, recipe_to_text(RECIPE))
    apart = fp8_linear(x, weight.detach().t().clone(), None, recipe_to_text(RECIPE))
    assert torch.equal(turned, apart)
    assert not torch.equal(turned, fp8_linear(x, weight, None, recipe_to_text(RECIPE)))


def test_the_count_goes_up_when_a_weight_gets_copies_and_not_when_they_are_made_anew() -> None:
    weight = weight_of()
    before = count_of_copies()
    kept(weight).operand(weight)
    assert count_of_copies() == before + 1
    renew_copies([weight])
    kept(weight).operand(weight)
    assert count_of_copies() == before + 1


def test_copies_go_with_their_weight() -> None:
    weight = weight_of()
    copies = weakref.ref(kept(weight))
    assert copies() is not None
    del weight
    gc.collect()
    assert copies() is None


def test_a_first_call_for_inference_does_not_stand_in_the_way_of_training() -> None:
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16))
    recipe = Fp8Recipe(emulate=True, min_width=0, min_size=0, scaling="delayed")
    optimizer = SGD(model.parameters(), lr=0.1)
    decorate(model, optimizer, level="O3", dtype="bfloat16", fp8=recipe, half_layers=())
    with torch.inference_mode(), auto_cast(level="O3", dtype="bfloat16", fp8=recipe):
        model(torch.randn(16, 32))
    for _ in range(2):
        with auto_cast(level="O3", dtype="bfloat16", fp8=recipe):
            loss = model(torch.randn(16, 32)).float().square().mean()
        loss.backward()
        optimizer.step()
    copies = kept(model[0].weight)
    copies.operand(model[0].weight)
    assert_copies(copies, model[0].weight)


def test_a_weight_made_for_inference_is_converted_in_each_call() -> None:
    with torch.inference_mode():
        weight = nn.Parameter(torch.randn(32, 48).bfloat16())
        assert keep_copies(weight) is None
        x = torch.randn(16, 48).bfloat16()
        result = fp8_linear(x, weight, None, recipe_to_text(RECIPE))
    assert torch.equal(result, fp8_linear(x, weight.detach().clone(), None, recipe_to_text(RECIPE)))


def test_where_no_kernel_writes_them_they_are_made_in_the_forward_after_each_step(renewed: list[Tensor]) -> None:
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    optimizer = SGD(model.parameters(), lr=0.1)
    decorate(model, optimizer, level="O3", dtype="bfloat16", fp8=RECIPE, half_layers=())
    x = torch.randn(16, 32)
    for _ in range(3):
        with auto_cast(level="O3", dtype="bfloat16", fp8=RECIPE):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
    assert [id(w) for w in renewed] == [id(model[0].weight), id(model[2].weight)] * 3
    assert copies_for_update(model[0].weight) is None
    assert copies_of(model[0].bias) is None
    twin = copy.deepcopy(model)
    assert copies_of(twin[0].weight) is None
