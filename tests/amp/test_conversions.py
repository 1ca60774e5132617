"""Models made half by hand, before or after `decorate`, or without it: right, or one clear line; never NaN in silence."""

import copy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from decorated import Net, dtypes, train
from torch import nn

from mezzo.amp import GradScaler, auto_cast, decorate
from mezzo.optim import has_master, master_of

HALVES = [torch.float16, torch.bfloat16]
LEVELS = ["O1", "O2"]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def exact_net() -> Net:
    """A network whose weights are exact in both half dtypes, so that every way to half begins with the same values."""
    net = Net()
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(tensor.bfloat16().half().bfloat16())
    return net


def expected_losses(net: nn.Module, level: str, half: torch.dtype) -> list[float]:
    model = copy.deepcopy(net)
    return train(*decorate(model, adam(model), level=level, dtype=half), level, half, steps=5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("half", HALVES)
def test_half_before_decorate_trains_as_if_it_had_been_float32(half: torch.dtype, level: str) -> None:
    """Norm layers stayed half without masters: NaN from the second step on in float16."""
    net = exact_net()
    model = copy.deepcopy(net).to(half)
    model, optimizer = decorate(model, adam(model), level=level, dtype=half)
    assert dtypes(model) == dtypes(decorate(Net(), level=level, dtype=half))
    assert all(has_master(param) for param in model.parameters() if param.dtype is half)
    assert train(model, optimizer, level, half, steps=5) == expected_losses(net, level, half)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("half", HALVES)
def test_half_after_decorate_warns_once_and_trains_on_masters(half: torch.dtype, level: str) -> None:
    net = exact_net()
    model = copy.deepcopy(net)
    model, optimizer = decorate(model, adam(model), level=level, dtype=half)
    with pytest.warns(UserWarning, match=r"converted to b?float16: \w+, which decorate\(\) keeps in float32") as seen:
        model.to(half)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert {param.dtype for param in model.parameters()} == {half}
    assert all(has_master(param) for param in model.parameters())
    losses = train(model, optimizer, level, half, steps=5)
    # norms and embeddings are rounded to half once more than where decorate keeps them in float32
    assert losses == pytest.approx(
        expected_losses(net, level, half), rel={torch.float16: 2e-3, torch.bfloat16: 2e-2}[half]
    )
    model, optimizer = decorate(model, optimizer, level=level, dtype=half)
    assert dtypes(model) == dtypes(decorate(Net(), level=level, dtype=half))


def test_decorating_again_gives_back_every_bit_that_half_took() -> None:
    model = nn.LayerNorm(4)
    with torch.no_grad():
        model.weight.add_(1e-5)
    model = nn.Sequential(model, nn.Linear(4, 4))
    exact = {name: value.clone() for name, value in model.state_dict().items()}
    decorate(model, level="O2")
    model.eval().half()  # for inference: no warning
    assert model[0].weight.dtype is torch.float16
    for name, value in model.state_dict().items():
        assert torch.equal(value, exact[name])
    decorate(model, level="O2")
    assert model[0].weight.dtype is torch.float32
    assert torch.equal(model[0].weight, exact["0.weight"])


@pytest.mark.parametrize("masters", [None, "compact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float_and_double_bring_the_masters_bits_back_at_once(dtype: torch.dtype, masters: Any) -> None:
    model = Net()
    exact = {name: value.clone() for name, value in model.state_dict().items()}
    decorate(model, level="O2", master_weight=masters)
    model.to(dtype)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor.dtype is (dtype if tensor.is_floating_point() else torch.int64)
        # a compact master has steps of 2^-39 for float16
        torch.testing.assert_close(tensor, exact[name].to(tensor.dtype), rtol=0, atol=2.0**-39)
    for level, half in (("O2", "float16"), ("O1", "bfloat16")):  # every region fits a float32 model: no warning
        if dtype is torch.float32:
            with auto_cast(level=level, dtype=half):
                model(torch.tensor([[1, 2]]))


@pytest.mark.parametrize("level", LEVELS)
def test_training_goes_on_in_float32_after_float(level: str) -> None:
    net = exact_net()
    model = copy.deepcopy(net)
    model, optimizer = decorate(model, adam(model), level=level)
    model.float()
    losses = train(model, optimizer, level, torch.float16, steps=5)
    assert losses == pytest.approx(expected_losses(net, level, torch.float16), rel=2e-3)


@pytest.mark.parametrize("masters", [None, "compact"])
def test_the_other_half_dtype_is_written_from_the_masters(masters: Any) -> None:
    """Not from the float16 weights: bfloat16 of those would be rounded twice."""
    model = nn.Sequential(nn.Linear(64, 64))
    exact = model[0].weight.detach().clone()
    decorate(model, level="O2", dtype="float16", master_weight=masters)
    model.to(torch.bfloat16)
    master = master_of(model[0].weight)
    assert master is not None
    torch.testing.assert_close(master, exact, rtol=0, atol=2.0**-39)
    torch.testing.assert_close(model[0].weight.detach().float(), exact, rtol=2.0**-8, atol=0)
    if masters is None:
        assert torch.equal(model[0].weight, exact.bfloat16())
    with (
        pytest.warns(
            UserWarning, match=r"decorate\(level='O2', dtype='bfloat16'\) but auto_cast\(level='O2', dtype='float16'\)"
        ),
        auto_cast(level="O2", dtype="float16"),
    ):
        model(torch.ones(1, 64))


def test_a_part_made_half_by_hand_keeps_its_value_too() -> None:
    model = decorate(Net(), level="O2")
    exact = model.layer_norm.weight.detach().clone()
    with pytest.warns(UserWarning, match="converted to float16: LayerNorm, which"):
        model.layer_norm.half()
    assert torch.equal(master_of(model.layer_norm.weight), exact)
    assert model.batch_norm.weight.dtype is torch.float32


def test_moves_and_copies_are_left_as_they_were() -> None:
    model = decorate(Net(), level="O2")
    before = {name: (tensor, tensor.data_ptr()) for name, tensor in model.named_parameters()}
    masters = {name: master_of(tensor) for name, tensor in model.named_parameters()}
    model.to("cpu").cpu().share_memory()
    for name, tensor in model.named_parameters():
        assert before[name][0] is tensor
        assert master_of(tensor) is masters[name]
    copied = copy.deepcopy(model).eval().half()
    assert all(has_master(param) for param in copied.parameters())
    assert model.layer_norm.weight.dtype is torch.float32


def test_parameters_that_torch_replaces_keep_their_masters() -> None:
    """`torch.__future__.set_overwrite_module_params_on_conversion(True)` makes new parameters."""
    model = decorate(nn.Sequential(nn.Linear(4, 4)), level="O2")
    exact = model.state_dict()["0.weight"].clone()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.to(torch.float16)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert torch.equal(model.state_dict()["0.weight"], exact)
    assert has_master(model[0].weight)


def test_gradients_and_optimizer_state_of_a_half_norm_become_float32_with_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    decorate(model, optimizer, level="O2")
    norm = model[1].weight
    assert norm.dtype is norm.grad.dtype is optimizer.state[norm]["momentum_buffer"].dtype is torch.float32
    optimizer.step()
    # two steps of 0.1 and 0.19, the first of which was rounded to half
    torch.testing.assert_close(norm.detach(), torch.full((4,), 1 - 0.1 - 0.19), rtol=0, atol=1e-3)


def test_a_half_model_with_a_scaler_and_without_decorate_gets_one_warning() -> None:
    """Torch says 'Attempting to unscale FP16 gradients'; here Adam gave NaN from the second step on."""
    model = Net().half()
    with pytest.warns(
        UserWarning, match=r"float16 parameters without float32 masters, the first is .*decorate\(model, opt"
    ):
        train(model, adam(model), "O2", torch.float16, steps=2)


@pytest.mark.parametrize("given", [True, False])
def test_masters_that_were_not_wanted_are_not_missed(given: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if given:
        decorate(model, optimizer, level="O2", master_weight=False)
    else:
        decorate(model, level="O2", master_weight=False)
    scaler = GradScaler()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with auto_cast(level="O2"):
            loss = model(torch.ones(1, 4)).float().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)


def test_bfloat16_weights_without_masters_are_a_choice() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler(enable=False)
    with auto_cast(level="O2", dtype="bfloat16"):
        loss = model(torch.ones(1, 4)).float().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    assert torch.isfinite(model[0].weight).all()


def test_buffers_that_half_rounded_come_back_with_every_bit() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("positions", torch.arange(4096.0) + 0.1)
    exact = model.positions.clone()
    decorate(model, level="O2", dtype="bfloat16")
    with pytest.warns(UserWarning, match=r"call decorate\(\) again"):
        model.bfloat16()
    decorate(model, level="O2", dtype="bfloat16")
    assert torch.equal(model.positions, exact)


def test_a_decorated_model_is_watched_in_a_process_that_loads_it(tmp_path: Path) -> None:
    """The patches of `decorate` are made per process."""
    torch.save(decorate(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), level="O2"), tmp_path / "model.pt")
    script = (
        "import copy, sys, torch\n"
        "from mezzo.optim import has_master\n"
        "model = torch.load(sys.argv[1], weights_only=False)\n"
        "model.eval().half()\n"
        "assert has_master(model[1].weight) and has_master(copy.deepcopy(model)[0].weight)\n"
        "average = torch.optim.swa_utils.AveragedModel(model)\n"
        "assert average.module[0].weight.dtype is torch.float32\n"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path / "model.pt"], check=True)


def test_a_half_layer_put_in_after_decorate_gets_one_warning() -> None:
    model = decorate(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), level="O2")
    model[1] = nn.Linear(8, 2).half()
    optimizer, scaler = torch.optim.Adam(model.parameters()), GradScaler(init_loss_scaling=8.0)
    with auto_cast(level="O2"):
        loss = model(torch.ones(3, 4)).float().sum()
    scaler.scale(loss).backward()
    with pytest.warns(UserWarning, match=r"without float32 masters, the first is .*decorate\(model, optimizer\)"):
        scaler.step(optimizer)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_an_eps_that_is_zero_in_float16_warns_without_masters(kind) -> None:
    model = nn.Linear(4, 2)
    with pytest.warns(UserWarning, match=r"eps=1e-08 of this \w+ is 0 in float16"):
        decorate(model, kind(model.parameters()), level="O2", master_weight=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = nn.Linear(4, 2)
        decorate(other, kind(other.parameters(), eps=1e-4), level="O2", master_weight=False)
        third = nn.Linear(4, 2)
        decorate(third, kind(third.parameters()), level="O2", dtype="bfloat16", master_weight=False)
