"""`mezzo.Precision` against its parts: `auto_cast`, `decorate` and `GradScaler` called by hand."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import mezzo
from mezzo.amp import GradScaler, Policy, auto_cast, decorate, float32_copy
from no_waiting import no_waiting

X, Y = torch.linspace(-1, 1, 32).reshape(8, 4), torch.linspace(0, 1, 16).reshape(8, 2)
MODES = [
    ("O0", "float16"),
    ("OD", "bfloat16"),
    ("O1", "float16"),
    ("O1", "bfloat16"),
    ("O2", "float16"),
    ("O2", "bfloat16"),
]


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def train(precision: mezzo.Precision, model: nn.Module, steps: int = 4, max_norm: float | None = None) -> list[float]:
    model, optimizer = precision.prepare(model, adam(model))
    losses = []
    for _ in range(steps):
        with precision.autocast():
            loss = mse_loss(model(X), Y)
        precision.backward(loss)
        precision.step(optimizer, max_norm=max_norm)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_by_hand(
    level: str, dtype: str, model: nn.Module, steps: int = 4, max_norm: float | None = None
) -> list[float]:
    """The same training with the functions that the guide names."""
    optimizer = adam(model)
    if level in ("O1", "O2"):
        decorate(model, optimizer, level=level, dtype=dtype)
    scaler = GradScaler(enable=level != "O0" and dtype == "float16")
    scaler.protect_batch_norm(model)
    losses = []
    for _ in range(steps):
        with auto_cast(enable=level != "O0", level=level, dtype=dtype):
            loss = mse_loss(model(X), Y)
        scaler.scale(loss).backward()
        if max_norm is not None:
            scaler.clip_grad_norm_(optimizer, max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize(("level", "dtype"), MODES)
def test_steps_are_those_of_the_parts_bit_for_bit(level: str, dtype: str, max_norm: float | None) -> None:
    model, other = make_net(), make_net()
    losses = train(mezzo.Precision(level, dtype), model, max_norm=max_norm)
    assert losses == train_by_hand(level, dtype, other, max_norm=max_norm)
    expected = weights(other)
    assert all(torch.equal(value, expected[name]) for name, value in weights(model).items())


@pytest.mark.parametrize(("level", "dtype"), MODES)
def test_train_step_is_the_written_out_step_and_frees_gradients(level: str, dtype: str) -> None:
    precision, model = mezzo.Precision(level, dtype), make_net()
    model, optimizer = precision.prepare(model, adam(model))

    def forward() -> tuple[Tensor, Tensor]:
        outputs = model(X)
        return outputs, mse_loss(outputs, Y)

    losses = [precision.train_step(forward, optimizer)[1].item() for _ in range(4)]
    assert losses == train(mezzo.Precision(level, dtype), make_net())
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize(("level", "dtype"), [("O0", "float16"), ("O2", "float16"), ("O2", "bfloat16")])
def test_compiled_step_trains_as_the_written_out_one(level: str, dtype: str) -> None:
    precision, model = mezzo.Precision(level, dtype), make_net()
    model, optimizer = precision.prepare(model, adam(model))
    step = precision.compile(model, mse_loss, optimizer, backend="aot_eager")
    losses = [step(X, Y).item() for _ in range(4)]
    # The captured graph may order additions differently: a few units in the last place of a half number.
    rtol = 0 if level == "O0" else 4 * torch.finfo(precision.dtype).eps
    assert losses == pytest.approx(train(mezzo.Precision(level, dtype), make_net()), rel=max(rtol, 1e-6))


def test_float16_alone_gets_a_scaler() -> None:
    assert isinstance(mezzo.Precision("O2").scaler, GradScaler)
    assert mezzo.Precision("O2", "bfloat16").scaler is None
    assert mezzo.Precision("O0").scaler is None
    scaler = GradScaler(init_loss_scaling=8.0)
    assert mezzo.Precision("O1", scaler=scaler).scaler is scaler


def test_an_overflow_changes_nothing_but_the_scale() -> None:
    precision = mezzo.Precision("O2", scaler=GradScaler(init_loss_scaling=4.0, decr_every_n_nan_or_inf=1))
    model = make_net()
    model, optimizer = precision.prepare(model, adam(model))
    before = weights(model)
    with precision.autocast():
        loss = mse_loss(model[3](torch.ones(8, 16)), Y)
    precision.backward(loss * float("inf"))
    precision.step(optimizer)
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    assert precision.scaler is not None
    assert precision.scaler.get_scale() == 2.0


def test_accumulated_gradients_are_those_of_the_whole_batch() -> None:
    precision, model = mezzo.Precision("O0"), nn.Linear(4, 2)
    whole = copy.deepcopy(model)
    mse_loss(whole(X), Y).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for part in (slice(0, 4), slice(4, 8)):
        forward = lambda part=part: (None, mse_loss(model(X[part]), Y[part]) / 2)  # noqa: E731
        precision.train_step(forward, optimizer, update=False)
    assert torch.allclose(model.weight.grad, whole.weight.grad, rtol=1e-6)  # another order of a float32 sum


def two_nets(precision: mezzo.Precision) -> tuple[nn.ModuleList, list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    nets = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 2)])
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    precision.prepare(nets, optimizers)
    return nets, optimizers


def test_several_optimizers_step_in_one_call_by_one_scale() -> None:
    precision = mezzo.Precision("O2", scaler=GradScaler(init_loss_scaling=8.0, incr_every_n_steps=1))
    nets, optimizers = two_nets(precision)
    reference = float32_copy(nets)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(3):  # the scale doubles each time; a wrong one would show as a factor of 2
        with precision.autocast():
            loss = mse_loss(nets[1](nets[0](X)), Y)
        precision.backward(loss)
        norm = precision.step(*optimizers, max_norm=1e6)
        nets.zero_grad()
        plain.zero_grad()
        mse_loss(reference[1](reference[0](X)), Y).backward()
        expected = torch.cat([param.grad.flatten() for param in reference.parameters()]).norm()
        plain.step()
        assert norm is not None
        assert norm.item() == pytest.approx(expected.item(), rel=0.01)  # float16 has 11 bits, a few roundings


def test_a_second_step_after_one_backward_is_refused() -> None:
    """The first step may change the scale that the second optimizer's gradients carry."""
    precision = mezzo.Precision("O2")
    nets, (first, second) = two_nets(precision)
    with precision.autocast():
        loss = mse_loss(nets[1](nets[0](X)), Y)
    precision.backward(loss)
    precision.step(first)
    with pytest.raises(RuntimeError, match=r"precision\.step\(optimizer_a, optimizer_b\)"):
        precision.step(second)


def test_losses_may_be_scaled_by_hand() -> None:
    precision, model = mezzo.Precision("O2"), make_net()
    model, optimizer = precision.prepare(model, adam(model))
    assert precision.scaler is not None
    losses = []
    for _ in range(4):
        with precision.autocast():
            loss = mse_loss(model(X), Y)
        precision.scaler.scale(loss).backward()
        precision.step(optimizer)
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == train(mezzo.Precision("O2"), make_net())


def test_without_a_loss_scale_optimizers_may_step_one_by_one() -> None:
    precision = mezzo.Precision("O2", "bfloat16")
    nets, optimizers = two_nets(precision)
    with precision.autocast():
        loss = mse_loss(nets[1](nets[0](X)), Y)
    precision.backward(loss)
    before = weights(nets)
    for optimizer in optimizers:
        precision.step(optimizer)
    assert all(not torch.equal(value, before[name]) for name, value in weights(nets).items() if "weight" in name)


def test_lists_of_a_file_win_over_custom_lists(tmp_path: Path) -> None:
    path = tmp_path / "lists.yml"
    path.write_text("custom_black_list: [softmax]\nexcluded_layers: ['3']\n")
    precision = mezzo.Precision("O1", custom_white_list=["softmax", "exp"], lists=path)
    assert precision.policy == Policy.create("O1", custom_white_list=["exp"], custom_black_list=["softmax"])
    model = precision.prepare(make_net())
    assert (model[0].weight.dtype, model[3].weight.dtype) == (torch.float16, torch.float32)


def test_layers_can_be_excluded_by_module_type_and_name() -> None:
    for excluded in (nn.Linear, "3", ["0", "3"]):
        model = mezzo.Precision("O2", excluded_layers=excluded).prepare(make_net())
        assert model[3].weight.dtype is torch.float32
    with pytest.raises(ValueError, match="heed"):
        mezzo.Precision("O2", excluded_layers="heed").prepare(make_net())


def test_weights_stay_float32_where_asked() -> None:
    model = mezzo.Precision("O1", half_weights=False).prepare(make_net())
    assert model[0].weight.dtype is torch.float32
    assert mezzo.Precision("O1").prepare(make_net())[0].weight.dtype is torch.float16


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"level": "O4"}, "O4"),
        ({"level": "O2", "dtype": "float64"}, "float64"),
        ({"level": "O2", "half_weights": False}, "half_weights"),
        ({"level": "O0", "half_weights": True}, "half_weights"),
        ({"level": "O2", "master_weight": "compct"}, "compct"),
        ({"level": "O2", "half_layers": ["0"]}, "O3"),
        ({"level": "O2", "fp8": {}}, "O3"),
        ({"level": "O2", "policy": Policy.create("O1")}, "policy"),
        ({"custom_white_list": ["sofmax"]}, "softmax"),
    ],
)
def test_contradictions_are_refused_by_name(options: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        mezzo.Precision(**options)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"custom_white_list": "softmax"}, r"\['softmax'\]"),
        ({"policy": "O2"}, "policy='O2'"),
        ({"scaler": 1024.0}, "scaler.*float"),
        ({"scaler": torch.amp.GradScaler("cpu")}, r"mezzo\.amp\.GradScaler, not torch"),
    ],
)
def test_arguments_of_a_wrong_type_are_named(options: dict[str, object], word: str) -> None:
    with pytest.raises(TypeError, match=word):
        mezzo.Precision(**options)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_prepare_refuses_what_is_no_model_or_optimizer(level: str) -> None:
    precision, model = mezzo.Precision(level), make_net()
    for other in ([model, model], adam(model), 3):
        with pytest.raises(TypeError, match=rf"ModuleList.*{type(other).__name__}"):
            precision.prepare(other)
    for other, word in ((3, "int"), ("adam", "str"), (torch.optim.Adam, "class Adam"), ([adam(model), model], "Seq")):
        with pytest.raises(TypeError, match=f"optimizer.*{word}"):
            precision.prepare(model, other)
    with pytest.raises(TypeError, match=r"excluded_layers.*int"):
        mezzo.Precision("O2", excluded_layers=3).prepare(model)
    assert model[0].weight.dtype is torch.float32


def test_train_step_refuses_a_forward_that_returns_the_loss_alone() -> None:
    precision, model = mezzo.Precision("O0"), make_net()
    with pytest.raises(TypeError, match="outputs and the loss"):
        precision.train_step(lambda: mse_loss(model(X), Y), adam(model))  # type: ignore[arg-type, return-value]


def test_step_without_an_optimizer_says_what_to_write() -> None:
    with pytest.raises(TypeError, match=r"precision\.step\(optimizer\)"):
        mezzo.Precision("O2").step()


def test_a_state_continues_with_the_scale() -> None:
    precision = mezzo.Precision("O2", scaler=GradScaler(init_loss_scaling=8.0, incr_every_n_steps=1))
    train(precision, make_net())
    other = mezzo.Precision("O2")
    other.load_state_dict(precision.state_dict())
    assert precision.scaler is not None
    assert other.scaler is not None
    assert other.scaler.get_scale() == precision.scaler.get_scale() == 8.0 * 2**4
    mezzo.Precision("O0").load_state_dict(precision.state_dict())  # of another precision: no effect
    with pytest.raises(ValueError, match="scale"):
        other.load_state_dict({**precision.state_dict(), "scale": -1.0})


def test_a_state_with_delayed_fp8_scales_needs_the_model() -> None:
    """Without a model there is no place for the scales: training would continue with other numbers."""
    fp8 = {"emulate": True, "scaling": "delayed", "min_width": 1, "min_size": 1}
    make = lambda: mezzo.Precision("O3", fp8=fp8, half_layers=())  # noqa: E731
    first, model = make(), nn.Linear(16, 16)
    model, optimizer = first.prepare(model, adam(model))
    for _ in range(2):
        first.train_step(lambda: (None, model(torch.ones(16, 16)).square().mean()), optimizer)
    state = first.state_dict()
    assert list(state["fp8_scales"]) == ["weight"]
    other = make()
    with pytest.raises(RuntimeError, match="prepare"):
        other.load_state_dict(state)
    other.prepare(nn.Linear(16, 16))
    other.load_state_dict(state)
    for role, amaxes in state["fp8_scales"]["weight"].items():
        assert torch.equal(other.state_dict()["fp8_scales"]["weight"][role], amaxes)


def test_a_copy_or_a_pickle_has_the_scale_but_not_the_weights() -> None:
    precision = mezzo.Precision("O2", scaler=GradScaler(init_loss_scaling=8.0, incr_every_n_steps=1))
    train(precision, make_net())
    data = pickle.dumps(precision)
    assert len(data) < len(pickle.dumps(make_net()))
    for other in (copy.deepcopy(precision), pickle.loads(data)):  # noqa: S301
        assert other.state_dict() == precision.state_dict()
        train(other, make_net())


def test_record_and_explain_tell_the_dtypes() -> None:
    # By default the speed of this CPU decides what computes inside, and a busy machine may look slow.
    policy = Policy.create("O2", torch.bfloat16, cpu_compute="native")
    precision, model = mezzo.Precision(policy=policy), make_net()
    precision.prepare(model)
    with precision.record() as stats, precision.autocast():
        model(X)
    assert stats.totals()["addmm"][1] == 2  # both linear layers in bfloat16
    assert "bfloat16" in str(precision.explain(model))
    assert "float32" in str(mezzo.Precision("O0").explain("linear"))


def test_float32_stays_float32_inside_another_region() -> None:
    model = make_net()
    with mezzo.Precision("O1").autocast(), mezzo.Precision("O0").autocast():
        assert model(X).dtype is torch.float32


def test_half_weights_is_a_switch() -> None:
    with pytest.raises(TypeError, match="half_weights='no'"):
        mezzo.Precision("O1", half_weights="no")


def test_numbers_are_scale_and_skipped_steps_of_a_scaled_run() -> None:
    precision = mezzo.Precision("O2", scaler=GradScaler(init_loss_scaling=64.0, decr_every_n_nan_or_inf=1))
    model = make_net()
    model, optimizer = precision.prepare(model, adam(model))
    assert precision.numbers() == {"precision/loss_scale": 64.0, "precision/skipped_steps": 0.0}
    for factor in (1.0, float("inf")):
        with precision.autocast():
            loss = mse_loss(model(X), Y) * factor
        precision.backward(loss)
        precision.step(optimizer)
        optimizer.zero_grad()
    expected = {"precision/loss_scale": 32.0, "precision/skipped_steps": 1.0}
    assert precision.numbers() == precision.numbers(wait=True) == expected


@pytest.mark.parametrize(("level", "dtype"), [("O0", "float16"), ("O2", "bfloat16")])
def test_numbers_without_a_scale_are_those_of_a_recording(level: str, dtype: str) -> None:
    precision = mezzo.Precision(level, dtype)
    model = make_net()
    model, optimizer = precision.prepare(model, adam(model))
    assert precision.numbers() == {}
    with precision.record() as stats:
        precision.train_step(lambda: (None, mse_loss(model(X), Y)), optimizer)
    rows = [row for row in stats.rows if row.phase != "optimizer"]
    half = sum(row.fp16 + row.bf16 for row in rows)
    assert stats.half_share == half / (half + sum(row.fp32 for row in rows))
    assert precision.numbers() == {"precision/half_share": stats.half_share}
    assert stats.half_share == 0 if level == "O0" else 0.3 < stats.half_share < 1  # batch norm is float32


@pytest.mark.gpu
def test_numbers_do_not_wait_for_the_device_and_arrive_later() -> None:
    precision = mezzo.Precision("O2", scaler=GradScaler(init_loss_scaling=64.0, decr_every_n_nan_or_inf=1))
    model = make_net().cuda()
    model, optimizer = precision.prepare(model, adam(model))
    with precision.autocast():
        loss = mse_loss(model(X.cuda()), Y.cuda()) * float("inf")
    precision.backward(loss)
    with no_waiting():
        precision.step(optimizer)
        assert precision.numbers()["precision/loss_scale"] in (32.0, 64.0)
    assert precision.numbers(wait=True) == {"precision/loss_scale": 32.0, "precision/skipped_steps": 1.0}


def test_warnings_name_the_calls_of_precision() -> None:
    """A user of `Precision` never meets the scaler inside it, so its warnings also name Precision's calls."""

    def prepared() -> tuple[nn.Module, torch.optim.Optimizer, mezzo.Precision]:
        net, precision = make_net(), mezzo.Precision("O2")
        return *precision.prepare(net, adam(net)), precision

    net, _, precision = prepared()
    with pytest.warns(UserWarning, match=r"got a float16 loss.*precision\.autocast\(\)"):
        precision.backward(net[0](X.half()).sum())
    net, optimizer, precision = prepared()
    with precision.autocast():
        loss = mse_loss(net(X), Y)
    loss.backward()
    with pytest.warns(UserWarning, match=r"before any scale.*precision\.backward\(loss\)"):
        precision.step(optimizer, max_norm=1.0)
    _, optimizer, precision = prepared()
    with pytest.warns(UserWarning, match=r"found no gradient.*precision\.backward\(loss\)"):
        precision.step(optimizer)


@pytest.mark.parametrize("way", ["step", "compile"])
def test_a_model_that_was_not_prepared_is_named_once(way: str) -> None:
    """Otherwise it trains in float32 weights, at the speed of O1, without a hint."""
    net, precision = make_net(), mezzo.Precision("O2", "bfloat16")
    optimizer = adam(net)

    def train_once() -> None:
        with precision.autocast():
            loss = mse_loss(net(X), Y)
        precision.backward(loss)
        precision.step(optimizer)

    first = train_once if way == "step" else lambda: precision.compile(net, mse_loss, optimizer, backend="eager")
    with pytest.warns(UserWarning, match=r"O2 trains float32 weights.*precision\.prepare"):
        first()
    train_once()  # a warning is an error here


def test_a_model_that_decorate_made_half_needs_no_prepare() -> None:
    net, precision = make_net(), mezzo.Precision("O2", "bfloat16")
    net, optimizer = decorate(net, adam(net), level="O2", dtype="bfloat16")
    with precision.autocast():
        loss = mse_loss(net(X), Y)
    precision.backward(loss)
    precision.step(optimizer)
