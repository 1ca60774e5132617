"""Compact masters: a float32 number as a half weight and 16 bits, and training with them by torch's kernels."""

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer, RMSprop

from mezzo._torch.foreach import foreach_copy_
from mezzo.amp import GradScaler, auto_cast, decorate, exclude_layers
from mezzo.optim import attach, attach_master, master_of, publish, refresh_master, step_tier, stored_master
from mezzo.optim._compact import join, split
from mezzo.vision.train import Ema

HALVES = [torch.float16, torch.bfloat16]


def from_bits(bits: Any) -> Tensor:
    return torch.from_numpy(np.asarray(bits, dtype=np.uint32).view(np.float32).reshape(-1).copy())


def bits_of(value: Tensor) -> list[int]:
    return value.view(torch.int32).tolist()


EVERY_KIND = from_bits(
    np.concatenate([
        np.arange(0, 2**32, 65537 - 2, dtype=np.uint64),  # all exponents, both signs, infinities, not-a-numbers
        (np.arange(2**16, dtype=np.uint64) << 16) + 0x8000,  # half way between any two bfloat16 numbers
        (np.arange(0, 2**32, 2**13, dtype=np.uint64) + 0x1000)[::7],  # and between two of float16
    ])
)  # fmt: skip


def test_bfloat16_and_its_rest_are_the_float32_number_bit_for_bit() -> None:
    value = EVERY_KIND
    half, rest = split(value, torch.bfloat16)
    assert (half.dtype, rest.dtype) == (torch.bfloat16, torch.int16)
    back = join(half, rest)
    numbers = ~value.isnan()
    assert bits_of(back[numbers]) == bits_of(value[numbers])
    assert back[~numbers].isnan().all()
    assert half[~numbers].isnan().all()
    assert not rest[~numbers].any()


def test_bfloat16_is_rounded_to_nearest_and_only_ties_go_another_way() -> None:
    value = EVERY_KIND[~EVERY_KIND.isnan()]
    half, _ = split(value, torch.bfloat16)
    differs = half != value.to(torch.bfloat16)
    assert differs.any()
    assert ((value.view(torch.int32)[differs] & 0xFFFF) == 0x8000).all()
    assert (half[differs].float().abs() > value[differs].abs()).all()


def test_float16_is_as_torch_rounds_it_and_exact_from_two_to_the_minus_16() -> None:
    value = EVERY_KIND
    half, rest = split(value, torch.float16)
    back = join(half, rest)
    is_exact = half.isfinite() & (value.abs() >= 2.0**-16)
    assert bits_of(back[is_exact]) == bits_of(value[is_exact])
    torch.testing.assert_close(half[~value.isnan()], back[~value.isnan()].half(), rtol=0, atol=0)
    small = value.abs() < 2.0**-16
    assert (back[small].double() - value[small].double()).abs().max() <= 2.0**-40  # half of a step of 2**-39
    infinite = half.isinf()
    assert torch.equal(back[infinite], half[infinite].float())
    assert back[value.isnan()].isnan().all()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64), st.sampled_from(HALVES))
@example(
    [0x33BFFFFF], torch.float16
)  # a hair below the middle of two float16 numbers, where steps are coarser than that
def test_splitting_again_what_was_joined_changes_nothing(bits: list[int], half_dtype: torch.dtype) -> None:
    """So a step that is skipped, an update of zero and a published master all leave the same bits."""
    once = split(from_bits(bits), half_dtype)
    again = split(join(*once), half_dtype)
    for one, other in zip(once, again, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("half_dtype", HALVES)
def test_every_97th_of_all_float32_numbers_is_split_and_joined_right(half_dtype: torch.dtype) -> None:
    for start in range(0, 2**32, 2**27):
        value = from_bits(np.arange(start, start + 2**27, 97, dtype=np.uint64))
        value = value[~value.isnan()]
        half, rest = split(value, half_dtype)
        back = join(half, rest)
        for one, other in zip((half, rest), split(back, half_dtype), strict=True):
            assert torch.equal(one, other)
        is_exact = half.isfinite() & (value.abs() >= 2.0**-16) if half_dtype is torch.float16 else value == value
        assert torch.equal(back.view(torch.int32)[is_exact], value.view(torch.int32)[is_exact])
        assert (back - value)[~is_exact & half.isfinite()].abs().le(2.0**-40).all()


def parameters(half: torch.dtype, compact: bool) -> list[nn.Parameter]:
    """Of several shapes and layouts, no value below what float16 keeps exactly."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in ((), (5,), (17, 33), (4, 3, 5, 5), (0, 3)):
        value = torch.rand(shape, generator=generator) + 0.5
        if len(shape) == 4:
            value = value.to(memory_format=torch.channels_last)
        param = nn.Parameter(value.to(half))
        attach_master(param, value, compact=compact)
        made.append(param)
    return made


def masters(params: list[nn.Parameter]) -> list[Tensor]:
    found = [master_of(param) for param in params]
    assert all(master is not None for master in found)
    return [master.clone() for master in found if master is not None]


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: SGD(params, lr=1e-3),
    "momentum": lambda params: SGD(params, lr=1e-3, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda params: Adam(params, lr=1e-4),
    "adamw": lambda params: AdamW(params, lr=1e-4),
    "a rule of its own": lambda params: RMSprop(params, lr=1e-4),
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_gradients_give_the_same_masters_bit_for_bit(name: str, half: torch.dtype) -> None:
    trained = []
    for compact in (False, True):
        params = parameters(half, compact)
        attach(optimizer := OPTIMIZERS[name](params))
        generator = torch.Generator().manual_seed(1)
        with step_tier("fused"):
            for _ in range(4):
                for param in params:
                    param.grad = torch.randn(param.shape, generator=generator).to(half)
                optimizer.step()
        trained.append((params, optimizer))
    (full, stock), (small, ours) = trained
    for one, other, start in zip(full, small, parameters(half, False), strict=True):
        assert bits_of(master_of(one).reshape(-1)) == bits_of(master_of(other).reshape(-1))
        assert other.numel() == 0 or not torch.equal(master_of(other), master_of(start))
        assert torch.equal(other.detach(), split(master_of(one), half)[0])
        assert master_of(other).stride() == master_of(one).stride()
        for key, value in stock.state[one].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(ours.state[other][key]))
            assert torch.as_tensor(ours.state[other][key]).dtype is torch.float32


def test_a_closure_that_is_evaluated_often() -> None:
    losses = []
    for compact in (False, True):
        params = parameters(torch.bfloat16, compact)[:3]  # torch's LBFGS takes no channels-last gradients
        attach(optimizer := LBFGS(params, lr=0.1, max_iter=3))

        def closure(optimizer: Optimizer = optimizer, params: list[nn.Parameter] = params) -> Tensor:
            optimizer.zero_grad()
            loss = torch.stack([(param.float() ** 2).sum() for param in params]).sum()
            loss.backward()
            return loss

        losses.append([optimizer.step(closure).item() for _ in range(2)])
    assert losses[1][1] < losses[1][0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # a tie of bfloat16 may be rounded the other way


def test_an_overflow_changes_no_bit() -> None:
    params = parameters(torch.float16, True)
    attach(optimizer := AdamW(params, lr=0.1))
    scaler = GradScaler(init_loss_scaling=8.0)
    before = [(param.detach().clone(), stored_master(param).clone()) for param in params]
    for param in params:
        param.grad = torch.full(param.shape, torch.inf, dtype=torch.float16)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.skipped_steps == 1
    for param, (half, rest) in zip(params, before, strict=True):
        assert torch.equal(param.detach(), half)
        assert torch.equal(stored_master(param), rest)


def test_two_bytes_are_kept_of_a_master_and_no_float32_tensor() -> None:
    model = nn.Linear(64, 64)
    exact = model.weight.detach().clone()
    decorate(model, level="O2", dtype="bfloat16", master_weight="compact")
    kept = stored_master(model.weight)
    assert (kept.dtype, kept.shape, model.weight.dtype) == (torch.int16, model.weight.shape, torch.bfloat16)
    assert torch.equal(master_of(model.weight), exact)
    assert master_of(model.weight) is not master_of(model.weight)


def test_whoever_writes_a_half_weight_sets_its_master() -> None:
    for param in parameters(torch.float16, True):
        with torch.no_grad():
            param.fill_(0.3)
        assert torch.equal(master_of(param), param.detach().float())
        publish([param], [torch.full(param.shape, 0.7)])
        assert (master_of(param) == torch.tensor(0.7)).all()
        param.data.copy_(torch.full(param.shape, 0.1))
        refresh_master(param)
        assert torch.equal(master_of(param), param.detach().float())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_rest_is_not_taken_for_that_of_another_half_dtype(device: str) -> None:
    model = nn.Linear(4, 3)
    decorate(model, level="O2", dtype="bfloat16", master_weight="compact")
    exact = master_of(model.weight).clone()
    model.to(device, torch.float16)
    kept = stored_master(model.weight)
    assert (kept.dtype, kept.device.type) == (torch.int16, device)
    assert torch.equal(master_of(model.weight).cpu(), exact)
    assert torch.equal(model.weight.detach().cpu(), exact.half())


@pytest.mark.parametrize("masters", ["compact", True])
def test_a_copy_follows_edits_from_its_first_day(masters: Any) -> None:
    model = nn.Linear(4, 3)
    decorate(model, level="O2", master_weight=masters)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.weight.fill_(0.3)
    assert torch.equal(master_of(copied.weight), copied.weight.detach().float())


@pytest.mark.parametrize("shape", [(7,), (2, 2)])
def test_other_data_of_another_shape_is_followed(shape: tuple[int, ...]) -> None:
    param = parameters(torch.float16, True)[1]
    param.data = torch.rand(shape).half()
    assert torch.equal(master_of(param), param.detach().float())


def test_the_same_memory_in_another_half_dtype_is_another_value() -> None:
    param = parameters(torch.float16, True)[2]
    param.data = param.data.view(torch.bfloat16)
    assert torch.equal(master_of(param), param.detach().float())


@pytest.mark.parametrize("half", HALVES)
def test_zeros_behind_our_back_stay_near_zero(half: torch.dtype) -> None:
    """`.data` leaves no trace; the old rest, less than half weights can tell, must not make more of them than that."""
    param = nn.Parameter(torch.zeros(4096, dtype=half))
    attach_master(param, torch.randn(4096), compact=True)
    param.data.zero_()
    assert master_of(param).abs().max() < 2.0**-24


@pytest.mark.parametrize("half", HALVES)
def test_a_model_made_float32_again_has_all_its_bits(half: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(33, 7), nn.Linear(7, 3))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    exact = [param.detach().clone() for param in model.parameters()]
    decorate(model, level="O2", dtype=half, master_weight="compact")
    with torch.no_grad():
        model[1].bias.fill_(0.25)  # an edit of somebody's before,
    model.float()
    with torch.no_grad():
        model[1].weight.zero_()  # and one afterwards
    assert all(master_of(param) is None for param in model.parameters())
    for param, value in zip(list(model.parameters())[:2], exact[:2], strict=True):
        assert torch.equal(param.detach(), value)
    assert (model[1].bias == 0.25).all()
    assert (model[1].weight == 0).all()


@pytest.mark.parametrize("masters", ["compact", True])
def test_a_copy_of_a_model_made_float32_has_all_bits(masters: Any) -> None:
    model = nn.Linear(33, 7)
    exact = model.weight.detach().clone()
    decorate(model, level="O2", dtype="bfloat16", master_weight=masters)
    assert torch.equal(copy.deepcopy(model.float()).weight.detach(), exact)


@pytest.mark.parametrize("masters", ["compact", True])
def test_a_loaded_object_knows_its_half_dtype(masters: Any) -> None:
    model = nn.Linear(33, 7)
    exact = model.weight.detach().clone()
    decorate(model, level="O2", dtype="bfloat16", master_weight=masters)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False).float()
    assert master_of(loaded.weight) is None
    assert torch.equal(loaded.weight.detach(), exact)


def test_a_layer_that_is_excluded_later_gets_its_bits_back() -> None:
    model = nn.Sequential(nn.Linear(9, 5), nn.Linear(5, 3))
    exact = [param.detach().clone() for param in model[0].parameters()]
    decorate(model, level="O2", dtype="bfloat16", master_weight="compact")
    exclude_layers(model, "0")
    for param, value in zip(model[0].parameters(), exact, strict=True):
        assert torch.equal(param.detach(), value)
        assert stored_master(param) is None
    assert stored_master(model[1].weight) is not None


@pytest.mark.gpu
def test_a_move_carries_masters_along() -> None:
    model = nn.Linear(9, 5)
    exact = model.weight.detach().clone()
    decorate(model, level="O2", dtype="bfloat16", master_weight="compact")
    model.cuda()
    assert stored_master(model.weight).is_cuda
    assert torch.equal(master_of(model.weight).cpu(), exact)
    model.to("cpu", torch.float32)
    assert master_of(model.weight) is None
    assert torch.equal(model.weight.detach(), exact)


@pytest.mark.parametrize("half", HALVES)
def test_copies_and_files_have_all_bits(half: torch.dtype) -> None:
    model = nn.Linear(9, 5)
    exact = model.weight.detach().clone() + 1
    with torch.no_grad():
        model.weight.add_(1)
    decorate(model, level="O2", dtype=half, master_weight="compact")
    copied = copy.deepcopy(model)
    assert torch.equal(master_of(copied.weight), exact)
    assert stored_master(copied.weight).data_ptr() != stored_master(model.weight).data_ptr()
    stream = io.BytesIO()
    torch.save(model.weight, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)
    assert torch.equal(master_of(loaded), exact)
    state = model.state_dict()
    assert state["weight"].dtype is torch.float32
    assert torch.equal(state["weight"], exact)
    other = nn.Linear(9, 5)
    decorate(other, level="O2", dtype=half, master_weight="compact")
    other.load_state_dict(state)
    assert torch.equal(master_of(other.weight), exact)
    assert torch.equal(other.weight.detach(), model.weight.detach())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_values_of_any_dtype_are_loaded(dtype: torch.dtype) -> None:
    model = nn.Linear(9, 5)
    decorate(model, level="O2", dtype="bfloat16", master_weight="compact")
    state = {name: torch.rand(value.shape, dtype=dtype) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    assert torch.equal(master_of(model.weight), state["weight"].float())


@pytest.mark.parametrize("masters", ["compact", True])
def test_a_state_that_is_refused_changes_no_bit(masters: Any) -> None:
    model = nn.Linear(9, 5)
    exact = model.weight.detach().clone()
    decorate(model, level="O2", dtype="bfloat16", master_weight=masters)
    for shape in ((2, 2), (9, 5)):
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict({"weight": torch.rand(shape), "bias": torch.rand(5)})
        assert torch.equal(master_of(model.weight), exact)


def test_a_number_saved_as_a_list_of_one_is_loaded() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(0.5))

    model = decorate(Scaled(), level="O2", master_weight="compact")
    model.load_state_dict({"factor": torch.tensor([0.3])})
    assert master_of(model.factor).item() == torch.tensor(0.3).item()


@pytest.mark.parametrize("destination", [None, {}])
def test_tied_weights_are_saved_once(destination: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    decorate(model, level="O2", dtype="bfloat16", master_weight="compact")
    state = model.state_dict(destination=destination)
    assert torch.equal(state["0.weight"], state["1.weight"])
    assert (state["0.weight"] is state["1.weight"]) == (destination is None)  # a plain dict cannot be watched
    assert state["0.weight"] is not model.state_dict()["0.weight"]


def test_a_parameter_that_is_listed_twice_is_stepped_twice() -> None:
    found = []
    for compact in (False, True):
        param = parameters(torch.bfloat16, compact)[1]
        with pytest.warns(UserWarning, match="duplicate parameters"):
            attach(optimizer := SGD([param, param], lr=0.25))
        param.grad = torch.ones_like(param)
        with step_tier("fused"):
            optimizer.step()
        found.append(master_of(param).clone())
    assert torch.equal(*found)


def test_state_of_the_stock_optimizer_goes_in_and_out() -> None:
    params = parameters(torch.bfloat16, True)
    attach(optimizer := AdamW(params, lr=1e-4))
    stock_params = [nn.Parameter(master) for master in masters(params)]
    stock = AdamW(stock_params, lr=1e-4)
    for param in stock_params:
        param.grad = torch.ones_like(param)
    stock.step()
    optimizer.load_state_dict(copy.deepcopy(stock.state_dict()))
    for param, stock_param in zip(params, stock_params, strict=True):
        moment = optimizer.state[param]["exp_avg"]
        assert moment.dtype is torch.float32
        assert torch.equal(moment, stock.state[stock_param]["exp_avg"])


def test_an_average_is_applied_and_taken_back_bit_for_bit() -> None:
    model = nn.Linear(9, 5)
    decorate(model, optimizer := SGD(model.parameters(), lr=0.1), level="O2", master_weight="compact")
    ema = Ema(model, decay=0.5)
    for _ in range(2):
        with auto_cast(level="O2"):
            loss = model(torch.ones(2, 9)).float().square().sum()
        loss.backward()
        optimizer.step()
        ema.update()
    before = [(p.detach().clone(), master_of(p)) for p in model.parameters()]
    with ema.applied():
        assert torch.equal(master_of(model.weight), join(*split(ema.state_dict()["values"]["weight"], torch.float16)))
        assert not torch.equal(model.weight.detach(), before[0][0])
    for param, (half, master) in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.detach(), half)
        assert torch.equal(master_of(param), master)


@pytest.mark.parametrize("masters", [True, False])
def test_one_call_copies_into_tensors_of_one_dtype_alone(masters: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's kernel for CUDA took the dtype of the first target for all of them until it learnt to look."""
    model = nn.Sequential(nn.Linear(9, 5), nn.BatchNorm1d(5))
    decorate(model, level="O2", master_weight=masters)
    calls = []
    copy_in_torch = foreach_copy_

    def watched(targets: list[Tensor], sources: list[Tensor]) -> None:
        calls.append({target.dtype for target in targets})
        copy_in_torch(targets, sources)

    monkeypatch.setattr("mezzo.optim._masters.foreach_copy_", watched)
    with Ema(model).applied():
        model.load_state_dict({name: torch.ones(value.shape) for name, value in model.state_dict().items()})
        assert (model[0].weight == 1).all()
    assert {torch.float16, torch.float32} <= set().union(*calls)
    assert all(len(dtypes) == 1 for dtypes in calls)


def test_parameters_added_later_are_compact_too() -> None:
    model = nn.Linear(4, 4)
    decorate(model, optimizer := SGD(model.parameters(), lr=0.1), level="O2", master_weight="compact")
    late = nn.Parameter(torch.ones(3).half())
    optimizer.add_param_group({"params": [late]})
    assert stored_master(late).dtype is torch.int16


def test_a_parameter_added_between_forward_and_backward_is_not_written() -> None:
    attach(optimizer := SGD([nn.Parameter(torch.ones(1))], lr=0.1), compact=True)
    late = nn.Parameter(torch.ones(3).half())
    loss = late.square().sum()
    optimizer.add_param_group({"params": [late]})
    loss.backward()
    assert (late.grad == 2).all()


def test_masters_of_another_kind_are_refused_and_none_is_any() -> None:
    model = nn.Linear(4, 4)
    decorate(model, level="O2", master_weight="compact")
    decorate(model, level="O2")
    with pytest.raises(RuntimeError, match=r"'weight' has a compact master already.*full"):
        decorate(model, level="O2", master_weight=True)
    full = decorate(nn.Linear(4, 4), level="O2")
    with pytest.raises(RuntimeError, match=r"'weight' has a full master already.*compact"):
        decorate(full, level="O2", master_weight="compact")


@pytest.mark.parametrize("given_value", ["small", "", 1, 0.5])
def test_what_masters_are_wanted_must_be_said_right(given_value: Any) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"master_weight=.*'compact'"):
        decorate(model, level="O2", master_weight=given_value)
    assert model.weight.dtype is torch.float32


def test_sharded_weights_are_refused_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    monkeypatch.setattr("mezzo.amp._decorate_checks.is_dtensor", lambda tensor: True)
    with pytest.raises(RuntimeError, match=r"master_weight='compact': 'weight' is a DTensor.*True"):
        decorate(model, level="O2", master_weight="compact")
    assert model.weight.dtype is torch.float32
    monkeypatch.setattr("mezzo.optim._masters.is_dtensor", lambda tensor: True)
    with pytest.raises(ValueError, match=r"DTensor.*compact"):
        attach_master(param := nn.Parameter(torch.ones(2).half()), torch.ones(2), compact=True)
    assert stored_master(param) is None
