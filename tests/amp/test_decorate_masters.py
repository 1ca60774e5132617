"""Masters behind half weights: they follow edits, gradients of every kind reach them, no step goes past them unseen."""

from collections.abc import Callable

import pytest
import torch
from decorated import Tied
from torch import nn

from mezzo import Precision
from mezzo.amp import GradScaler, auto_cast, decorate
from mezzo.optim import has_master, master_of, refresh_master

HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("half", HALVES)
def test_bfloat16_and_float16_step_without_a_scaler_too(half: torch.dtype) -> None:
    model = nn.Linear(4, 1, bias=False)
    start = model.weight.detach().clone()
    model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), lr=2.0**-12), level="O2", dtype=half)
    with auto_cast(level="O2", dtype=half):
        model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    master = master_of(model.weight)
    assert master is not None
    torch.testing.assert_close(master, start - 2.0**-12, rtol=1e-6, atol=0)  # too small a step for half weights
    assert torch.equal(model.weight, master.to(half))


@pytest.mark.parametrize(
    "edit",
    [
        lambda p, v: p.copy_(v),
        lambda p, v: p.mul_(0).add_(v.to(p.dtype)),
        lambda p, v: setattr(p, "data", v.to(p.dtype)),
        lambda p, v: nn.init.constant_(p, float(v.flatten()[0])),
        lambda p, v: (p.data.copy_(v), refresh_master(p)),
        lambda p, v: torch._foreach_copy_([p], [v]),
    ],
    ids=["copy_", "in place", ".data =", "init", ".data.copy_ + refresh_master", "foreach"],
)
def test_masters_follow_edits_of_the_half_weights(edit: Callable) -> None:
    """R3: whatever route the edit took, the next step starts from the edited value."""
    model = nn.Linear(3, 3, bias=False)
    model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), lr=0.5), level="O2")
    value = torch.full((3, 3), 0.25)
    with torch.no_grad():
        edit(model.weight, value)
    assert torch.equal(model.state_dict()["weight"], value)
    model.weight.grad = torch.ones(3, 3, dtype=torch.float16)
    optimizer.step()
    assert torch.equal(model.state_dict()["weight"], value - 0.5)
    assert torch.equal(model.weight, (value - 0.5).half())


def test_tied_weights_stay_one_parameter_with_one_master() -> None:
    """R13."""
    model = Tied()
    start = model.embed.weight.detach().clone()
    model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), lr=1.0), level="O2")
    assert model.out.weight is model.embed.weight
    with auto_cast(level="O2"):
        model(torch.tensor([1, 2])).float().sum().backward()
    optimizer.step()
    reference = Tied()
    reference.embed.weight.data.copy_(start)
    reference(torch.tensor([1, 2])).sum().backward()
    assert reference.embed.weight.grad is not None
    # the gradient is rounded to half once or twice: 10 mantissa bits
    torch.testing.assert_close(
        model.state_dict()["out.weight"], start - reference.embed.weight.grad, rtol=2e-3, atol=2e-3
    )


def test_a_weight_tied_to_an_excluded_layer_stays_float32() -> None:
    model = decorate(Tied(), level="O2", excluded_layers="out")
    assert model.embed.weight.dtype is torch.float32
    with auto_cast(level="O2"):
        assert model(torch.tensor([1])).dtype is torch.float32


def test_frozen_weights_that_are_half_already_get_no_master_until_they_are_trained() -> None:
    model = nn.Sequential(nn.Linear(4, 4).half().requires_grad_(False), nn.Linear(4, 4))
    before = model[0].weight.clone()
    decorate(model, level="O2")
    assert [has_master(layer.weight) for layer in model] == [False, True]
    assert torch.equal(model[0].weight, before)
    assert torch.equal(model.state_dict()["0.weight"], before.float())
    model.requires_grad_(True)
    decorate(model, level="O2")
    assert [has_master(layer.weight) for layer in model] == [True, True]


def test_frozen_weights_are_cast_and_left_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5), level="O2")
    before = model[0].weight.clone()
    with auto_cast(level="O2"):
        model(torch.ones(2, 3)).float().sum().backward()
    optimizer.step()
    assert model[0].weight.dtype is torch.float16
    assert torch.equal(model[0].weight, before)


def test_channels_last_layout_is_kept_by_weight_master_and_checkpoint() -> None:
    model = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), level="O2")
    with auto_cast(level="O2"):
        model(torch.ones(1, 4, 8, 8)).float().sum().backward()
    optimizer.step()
    for tensor in (model.weight, master_of(model.weight), model.state_dict()["weight"]):
        assert tensor is not None
        assert tensor.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.filterwarnings("ignore:.*[Ss]parse.*")
@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.SGD(p, lr=1.0), lambda p: torch.optim.SparseAdam(list(p), lr=1.0)]
)
def test_sparse_gradients_reach_the_master(make: Callable) -> None:
    model = nn.Embedding(5, 3, sparse=True)
    start = model.weight.detach().clone()
    model, optimizer = decorate(model, make(model.parameters()), level="O2")
    scaler = GradScaler(init_loss_scaling=8.0)
    with auto_cast(level="O2"):
        loss = model(torch.tensor([1, 1, 3])).float().sum()
    scaler.scale(loss).backward()
    assert model.weight.grad is not None
    assert model.weight.grad.is_sparse
    scaler.step(optimizer)
    moved = (model.state_dict()["weight"] - start).abs().sum(1) > 0
    assert moved.tolist() == [False, True, False, True, False]


def test_gradients_accumulate_in_float32_with_master_grad() -> None:
    """1 + 64 x 2^-11 loses every addend in half; the sum is exact in float32."""
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), lr=1.0), level="O2", master_grad=True)
    start = model.state_dict()["weight"].clone()
    for value in (1.0, *[2.0**-11] * 64):
        with auto_cast(level="O2"):
            out = model(torch.full((1, 1), value)).float().sum()
        out.backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype is torch.float32
    assert float(model.weight.grad) == 1 + 64 * 2.0**-11
    optimizer.step()
    assert torch.equal(model.state_dict()["weight"], start - (1 + 64 * 2.0**-11))


def test_master_weight_false_updates_the_half_weights_themselves() -> None:
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1.0)
    model, optimizer = decorate(
        model, torch.optim.SGD(model.parameters(), lr=2.0**-12), level="O2", master_weight=False
    )
    assert master_of(model.weight) is None
    for _ in range(8):
        model.weight.grad = torch.ones(1, 1, dtype=torch.float16)
        optimizer.step()
    assert model.weight.item() == 1.0  # each step is below half an ulp
    assert model.state_dict()["weight"].dtype is torch.float32


def test_without_optimizers_masters_join_at_the_first_scaler_step() -> None:
    model = nn.Linear(1, 1, bias=False)
    start = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-12)
    decorate(model, level="O2")
    scaler = GradScaler(init_loss_scaling=16.0)
    with auto_cast(level="O2"):
        loss = model(torch.ones(1, 1)).float().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    assert torch.equal(model.state_dict()["weight"], start - 2.0**-12)


def test_a_plain_step_past_the_masters_warns_once() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    decorate(model, level="O2")
    model.weight.grad = torch.ones_like(model.weight)
    with pytest.warns(UserWarning, match=r"without their float32 masters; pass the optimizer to mezzo\.amp\.decorate"):
        optimizer.step()
    optimizer.step()  # warnings are errors: a second one would fail here
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    other.step()


def test_decorating_again_changes_nothing_and_the_other_dtype_is_refused() -> None:
    model = decorate(nn.Linear(2, 2), level="O2")
    master = master_of(model.weight)
    assert decorate(model, level="O2") is model
    assert master_of(model.weight) is master
    with pytest.raises(RuntimeError, match=r"'weight' is float16 already.*bfloat16"):
        decorate(model, level="O2", dtype="bfloat16")


def test_decorating_at_another_level_follows_the_last_call_and_keeps_every_bit() -> None:
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))
    exact = model[0].weight.detach().clone()
    decorate(decorate(model, level="O2"), level="O1")
    assert torch.equal(model[0].weight, exact)
    assert model[1].weight.dtype is torch.float16
    decorate(model, level="O2")
    assert model[0].weight.dtype is torch.float16
    assert torch.equal(model.state_dict()["0.weight"], exact)


def test_a_model_that_is_half_already_gets_masters_from_its_half_values() -> None:
    model = nn.Linear(2, 2).half()
    model, _ = decorate(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O2")
    master = master_of(model.weight)
    assert master is not None
    assert torch.equal(master, model.weight.float())


@pytest.mark.parametrize(("ranks", "kept"), [(1, True), (4, False)])
def test_writing_a_weight_onto_itself_keeps_the_masters_bits_in_one_process(
    ranks: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Distributed wrappers broadcast half weights in place; with several ranks all of them must end with one master."""
    model = decorate(nn.Linear(3, 3), level="O2")
    exact, rounded = model.state_dict()["weight"].clone(), model.weight.detach().float()
    assert not torch.equal(exact, rounded)
    monkeypatch.setattr("mezzo.optim._masters.has_several_ranks", lambda: ranks > 1)
    with torch.no_grad():
        model.weight.copy_(model.weight.clone())
    assert torch.equal(model.state_dict()["weight"], exact if kept else rounded)


def test_a_disabled_scaler_still_steps_through_the_masters() -> None:
    model = nn.Linear(1, 1, bias=False)
    start = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-12)
    decorate(model, level="O2", dtype="bfloat16")
    scaler = GradScaler(enable=False)
    for _ in range(4):
        model.weight.grad = torch.ones(1, 1, dtype=torch.bfloat16)
        scaler.step(optimizer)
    assert torch.equal(model.state_dict()["weight"], start - 4 * 2.0**-12)


def test_a_second_optimizer_that_decorate_never_saw_warns() -> None:
    model = nn.Linear(1, 1)
    decorate(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O2")
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight.grad = torch.ones_like(model.weight)
    with pytest.warns(UserWarning, match="updates half weights without their float32 masters"):
        second.step()


def test_an_optimizer_of_another_model_warns() -> None:
    foreign = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    for prepare in (Precision("O2").prepare, decorate):
        with pytest.warns(UserWarning, match="^this SGD has no parameter of the models given") as caught:
            prepare(nn.Linear(1, 1), foreign)
        assert caught[0].filename == __file__  # the line of the user, not one of mezzo


def test_a_half_model_without_masters_cannot_change_its_dtype() -> None:
    model = decorate(nn.Linear(2, 2), level="O2", master_weight=False)
    with pytest.raises(RuntimeError, match=r"'weight' is float16 already.*bfloat16"):
        decorate(model, level="O2", dtype="bfloat16")
