"""Checkpoints and copies of a decorated model: float32 under the usual names, masters bit for bit."""

import copy
import io
import pickle

import pytest
import torch
from decorated import Net, train
from torch import nn

from mezzo.amp import auto_cast, decorate


def test_checkpoints_are_float32_under_the_usual_names_and_exact() -> None:
    reference = Net()
    names = {name: value.clone() for name, value in reference.state_dict().items()}
    model = decorate(reference, level="O2")
    saved = model.state_dict()
    assert list(saved) == list(names)
    for name, value in names.items():
        assert saved[name].dtype is value.dtype
        assert torch.equal(saved[name], value), name  # also what float16 cannot hold
    Net().load_state_dict(saved)  # into an undecorated model


def test_checkpoints_come_back_into_a_decorated_model_with_all_their_bits() -> None:
    source, target = Net(), decorate(Net(), level="O2")
    with torch.no_grad():
        for param in source.parameters():
            param.add_(1e-5)
    missing = target.load_state_dict(source.state_dict())
    assert not missing.missing_keys
    for name, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], value), name
    assert torch.equal(target.lin.weight, source.lin.weight.half())
    assert target.lin.state_dict()["weight"].dtype is torch.float32  # a submodule alone, too


def test_a_run_resumed_from_a_checkpoint_repeats_the_unbroken_one() -> None:
    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(5)
        model = Net()
        return decorate(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level="O2")

    model, optimizer = start()
    train(model, optimizer, "O2", torch.float16)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    unbroken = train(model, optimizer, "O2", torch.float16)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    resumed, optimizer = start()
    resumed.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert train(resumed, optimizer, "O2", torch.float16) == unbroken


@pytest.mark.parametrize("save_dtype", ["float16", torch.bfloat16, "float64"])
def test_save_dtype_is_the_dtype_of_every_floating_tensor(save_dtype: object) -> None:
    model = decorate(Net(), level="O2", save_dtype=save_dtype)
    expected = save_dtype if isinstance(save_dtype, torch.dtype) else getattr(torch, str(save_dtype))
    assert {v.dtype for v in model.state_dict().values() if v.is_floating_point()} == {expected}
    assert model.lin.weight.dtype is torch.float16


def test_loading_by_assignment_is_refused() -> None:
    model = decorate(nn.Linear(2, 2), level="O2")
    with pytest.raises(RuntimeError, match=r"load_state_dict\(assign=True\) would replace the half parameters"):
        model.load_state_dict(nn.Linear(2, 2).state_dict(), assign=True)


def test_swapping_averaged_weights_in_and_out_keeps_masters_right() -> None:
    model = nn.Linear(3, 3)
    decorate(model, torch.optim.SGD(model.parameters(), lr=0.5), level="O2")
    own, average = {k: v.clone() for k, v in model.state_dict().items()}, nn.Linear(3, 3).state_dict()
    model.load_state_dict(average)
    assert all(torch.equal(v, average[k]) for k, v in model.state_dict().items())
    model.load_state_dict(own)
    assert all(torch.equal(v, own[k]) for k, v in model.state_dict().items())


def test_a_decorated_model_can_be_copied_pickled_and_made_float32_again() -> None:
    model = decorate(Net(), level="O2", excluded_layers="head")
    twin = copy.deepcopy(model)
    assert twin.lin.weight.dtype is torch.float16
    with auto_cast(level="O2"):
        assert twin(torch.tensor([[1, 2]])).dtype is torch.float32
    loaded = pickle.loads(pickle.dumps(model))  # noqa: S301  # made two calls ago
    assert torch.equal(loaded.lin.weight, model.lin.weight)
    model.float()
    assert model.state_dict()["lin.weight"].dtype is torch.float32


def test_a_deep_copy_has_masters_of_its_own() -> None:
    model = decorate(Net(), level="O2")
    twin = copy.deepcopy(model)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.lin.weight.zero_()
    for name, value in twin.state_dict().items():
        assert torch.equal(value, expected[name]) or name == "positions", name


def test_keep_vars_gives_the_parameters_themselves() -> None:
    model = decorate(nn.Linear(2, 2), level="O2")
    assert model.state_dict(keep_vars=True)["weight"] is model.weight


def test_float_gives_the_masters_values_back() -> None:
    model = nn.Linear(3, 3)
    exact = {name: value.clone() for name, value in model.state_dict().items()}
    decorate(model, level="O2").float()
    for name, value in model.state_dict().items():
        assert torch.equal(value, exact[name])
    assert torch.equal(model.weight, exact["weight"])


def test_optimizer_state_loaded_before_the_first_scaler_step_stays_float32() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(1, 2)).sum().mul(1e-6).backward()
    optimizer.step()
    saved = optimizer.state_dict()
    decorate(model, level="O2")
    fresh = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fresh.load_state_dict(saved)
    state = fresh.state[model.weight]
    assert state["exp_avg_sq"].dtype is torch.float32
    assert state["exp_avg_sq"].max() > 0  # about 1e-15: nothing of it is left in float16
