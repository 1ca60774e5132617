"""The moving average follows its formula, and the model is untouched by looking at it."""

import copy

import pytest
import torch
from torch import Tensor, nn

from mezzo.amp import GradScaler, auto_cast, decorate
from mezzo.checkpoint import read_state, write_state
from mezzo.optim import master_of
from mezzo.vision.train import Ema

RTOL = 1e-5  # float32 sums of 40 terms, each rounded to 2**-24


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)
        self.register_buffer("scale", torch.rand(8) + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).mean((2, 3)) * self.scale)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, level: str = "O0", half: str = "float16") -> None:
    scaler = GradScaler(enable=level != "O0", init_loss_scaling=128)
    with auto_cast(level=level, dtype=half, enable=level != "O0"):
        loss = model(torch.randn(4, 3, 8, 8)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def bits(model: nn.Module) -> dict[str, tuple]:
    """Every parameter and buffer with its master, as bytes."""
    found = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        master = master_of(tensor)
        raw = [
            t.detach().contiguous().reshape(-1).view(torch.uint8).tolist() for t in (tensor, master) if t is not None
        ]
        found[name] = (tensor.dtype, raw, tensor.data_ptr(), None if master is None else master.data_ptr())
    return found


def made(level: str, half: str = "float16") -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if level != "O0":
        decorate(model, optimizer, level=level, dtype=half)
    return model, optimizer


LEVELS = [("O0", "float16"), ("O1", "float16"), ("O2", "float16"), ("O2", "bfloat16")]


@pytest.mark.parametrize(("level", "half"), LEVELS)
@pytest.mark.parametrize("decay", [0.9998, 0.5])
def test_average_is_that_of_the_formula_in_float64(level, half, decay):
    model, optimizer = made(level, half)
    ema = Ema(model, decay)
    expected = {name: value.double().clone() for name, value in model.state_dict().items()}
    for n in range(40):
        step(model, optimizer, level, half)
        d = min(decay, (1 + n) / (10 + n))
        assert ema.next_decay() == d
        ema.update()
        for name, value in model.state_dict().items():  # a decorated model gives its float32 masters there
            is_buffer = name in dict(model.named_buffers())
            expected[name] = value.double() if is_buffer else d * expected[name] + (1 - d) * value.double()
    values = ema.state_dict()["values"]
    assert set(values) == set(expected)
    for name, value in values.items():
        assert value.dtype in (torch.float32, torch.int64)
        torch.testing.assert_close(value.double(), expected[name].double(), rtol=RTOL, atol=1e-7)


@pytest.mark.parametrize(("level", "half"), LEVELS)
def test_average_is_in_the_model_inside_and_gone_after_it_bit_for_bit(level, half):
    model, optimizer = made(level, half)
    ema = Ema(model)
    for _ in range(3):
        step(model, optimizer, level, half)
        ema.update()
    before = bits(model)
    values = {name: value.clone() for name, value in ema.state_dict()["values"].items()}
    with ema.applied():
        inside = model.state_dict()
        for name, value in values.items():
            assert torch.equal(inside[name], value), name  # what is saved here are the averages, in float32
        for name, param in model.named_parameters():
            assert torch.equal(param, values[name].to(param.dtype)), name
        model.norm.running_mean.add_(1)  # as evaluation in the wrong mode would
    assert bits(model) == before
    for name, value in ema.state_dict()["values"].items():
        assert torch.equal(value, values[name]), name


@pytest.mark.parametrize(("level", "half"), LEVELS)
def test_training_goes_on_after_a_look_as_if_there_had_been_none(level, half):
    results = []
    for looks in (False, True):
        torch.manual_seed(0)
        model, optimizer = made(level, half)
        ema = Ema(model)
        for _ in range(4):
            step(model, optimizer, level, half)
            ema.update()
            if looks:
                with ema.applied():
                    pass
        results.append([raw for _, raw, _, _ in bits(model).values()])
    assert results[0] == results[1]


def test_masters_keep_their_bits_where_several_ranks_would_take_over_half_values(monkeypatch):
    monkeypatch.setattr("mezzo.optim._masters.has_several_ranks", lambda: True)
    model, optimizer = made("O2")
    ema = Ema(model)
    step(model, optimizer, "O2")
    before = bits(model)
    with ema.applied():
        assert bits(model) != before
    assert bits(model) == before


def test_an_exception_inside_gives_the_weights_back():
    model, optimizer = made("O2")
    ema = Ema(model)
    step(model, optimizer, "O2")
    before = bits(model)
    with pytest.raises(ZeroDivisionError), ema.applied():
        raise ZeroDivisionError
    assert bits(model) == before
    ema.update()
    with ema.applied():
        pass


def test_half_weights_without_masters_are_averaged_in_float32():
    model = nn.Linear(4, 4).bfloat16()
    ema = Ema(model, decay=0.5)
    start = model.weight.detach().double().clone()
    with torch.no_grad():
        model.weight.add_(1)
    before = model.weight.detach().clone()
    ema.update()
    expected = 0.1 * start + 0.9 * model.weight.detach().double()
    torch.testing.assert_close(ema.state_dict()["values"]["weight"].double(), expected, rtol=RTOL, atol=1e-7)
    with ema.applied():
        assert torch.equal(model.weight, expected.to(torch.bfloat16))
    assert torch.equal(model.weight, before)


def test_tied_weights_and_models_without_any_are_fine():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    ema = Ema(model)
    ema.update()
    assert list(ema.state_dict()["values"]) == ["0.weight", "0.bias", "1.bias"]
    Ema(nn.ReLU()).update()


def test_update_asks_the_device_for_nothing():
    ema = Ema(Net().to("meta"))  # whatever reads a value raises there
    ema.update()


def test_state_goes_through_a_checkpoint_and_on(tmp_path):
    model, optimizer = made("O2")
    ema = Ema(model)
    step(model, optimizer, "O2")
    ema.update()
    write_state(tmp_path, {"ema": ema.state_dict()})
    other = Ema(copy.deepcopy(model))
    other.load_state_dict(read_state(tmp_path)["ema"])
    assert other.updates == 1
    for one in (ema, other):
        one.update()
    theirs = other.state_dict()["values"]
    assert all(torch.equal(value, theirs[name]) for name, value in ema.state_dict()["values"].items())


def test_mistakes_are_named():
    model = nn.Linear(2, 2)
    for decay in (1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match=r"decay=.*: must be from 0 to below 1, such as 0\.9998"):
            Ema(model, decay)
    ema = Ema(model)
    with ema.applied():
        with pytest.raises(RuntimeError, match=r"Ema\.update\(\) inside applied\(\): the model holds the average"):
            ema.update()
        with pytest.raises(RuntimeError, match=r"Ema\.applied\(\) is active already"), ema.applied():
            pass
    with pytest.raises(ValueError, match="the EMA does not fit the model: 'bias' is only in this run"):
        ema.load_state_dict(Ema(nn.Linear(2, 2, bias=False)).state_dict())
    with pytest.raises(ValueError, match=r"'weight' is a tensor \(3, 2\) .*; must be a tensor \(2, 2\)"):
        ema.load_state_dict(Ema(nn.Linear(2, 3)).state_dict())
