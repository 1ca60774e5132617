"""`mezzo.Model` against loops written by hand: the same losses and weights, bit for bit."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import mezzo
from mezzo import amp
from mezzo.amp.debugging import collect_operator_stats
from mezzo.model.metric import Accuracy, Metric
from mezzo.model.steps import NonFiniteLoss
from model_loops import (
    Logs,
    Losses,
    amp_loop,
    assert_same_weights,
    batches_of,
    make_data,
    make_model,
    make_network,
    mean_over_samples,
    plain_loop,
)

HALF = [("O1", "float16"), ("O2", "float16"), ("O1", "bfloat16"), ("O2", "bfloat16")]
STEPS = [{}, {"window": 3}, {"max_norm": 0.1}, {"window": 2, "max_norm": 0.1}]


def fit(model: mezzo.Model, data: Any, **options: Any) -> tuple[list[float], list[dict[str, float]]]:
    """Return the losses of all batches, and the history."""
    losses = Losses()
    history = model.fit(data, shuffle=False, verbose=0, callbacks=losses, **options)
    return losses.seen, history


# Training


@pytest.mark.parametrize("options", STEPS)
@pytest.mark.parametrize("size", [4, 14, 5])
def test_float32_training_repeats_a_plain_loop(size: int, options: dict[str, Any]) -> None:
    data, network = make_data(), make_network()
    batches = batches_of(data, size)
    expected = plain_loop(network, batches, epochs=3, **options)
    model = make_model(max_norm=options.get("max_norm"))
    losses, history = fit(model, data, batch_size=size, epochs=3, accumulate_grad_batches=options.get("window", 1))
    assert losses == expected
    assert_same_weights(model.network, network)
    count = len(batches)
    for epoch in range(3):
        mean = mean_over_samples(expected[epoch * count : (epoch + 1) * count], batches)
        assert history[epoch] == {"loss": pytest.approx(mean, rel=1e-12), "step": count}


@pytest.mark.parametrize("options", STEPS)
@pytest.mark.parametrize(("level", "dtype"), HALF)
def test_training_in_half_repeats_a_loop_written_by_hand(level: str, dtype: str, options: dict[str, Any]) -> None:
    data, network = make_data(), make_network(norm=True)
    expected = amp_loop(network, batches_of(data, 4), level=level, dtype=dtype, epochs=3, **options)
    model = make_model(
        {"level": level, "dtype": dtype}, network=make_network(norm=True), max_norm=options.get("max_norm")
    )
    losses, _ = fit(model, data, batch_size=4, epochs=3, accumulate_grad_batches=options.get("window", 1))
    assert losses == expected
    assert_same_weights(model.network, network)


def test_a_shuffled_run_repeats_a_plain_loop_over_a_loader_of_the_same_seed() -> None:
    data, network, model = make_data(), make_network(), make_model()
    torch.manual_seed(3)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    expected = [loss for _ in range(3) for loss in plain_loop(network, list(loader), optimizer=optimizer)]
    torch.manual_seed(3)
    losses = Losses()
    model.fit(data, batch_size=4, epochs=3, verbose=0, callbacks=losses)
    assert losses.seen == expected
    assert_same_weights(model.network, network)


def test_overflows_are_skipped_as_a_loop_by_hand_skips_them() -> None:
    data, network = make_data(), make_network(norm=True)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    scaler = amp.GradScaler(init_loss_scaling=2.0**30, decr_every_n_nan_or_inf=1, incr_every_n_steps=3)
    expected = amp_loop(network, batches_of(data, 4), level="O2", epochs=6, scaler=scaler)
    settings = {
        "level": "O2",
        "init_loss_scaling": 2.0**30,
        "decr_every_n_nan_or_inf": 1,
        "incr_every_n_steps": 3,
    }
    model = make_model(settings, network=make_network(norm=True))
    fit(model, data, batch_size=14)
    assert model.scaler is not None
    assert model.scaler.skipped_steps == 1
    for name, value in model.network.state_dict().items():
        assert torch.equal(value, before[name]), name  # running statistics too
    model = make_model(settings, network=make_network(norm=True))
    losses, _ = fit(model, data, batch_size=4, epochs=6)
    assert losses == expected
    assert_same_weights(model.network, network)
    assert model.scaler is not None
    assert model.scaler.state_dict() == scaler.state_dict()
    assert 0 < model.scaler.skipped_steps < 24


@pytest.mark.parametrize("level", [None, "O1", "O2"])
def test_batches_fed_one_by_one_train_as_fit_does(level: str | None) -> None:
    data, fitted, fed = make_data(), make_model(level), make_model(level)
    expected, _ = fit(fitted, data, batch_size=4, accumulate_grad_batches=2)
    losses = [fed.train_batch(x, y, update=i % 2 == 1)[0] for i, (x, y) in enumerate(batches_of(data, 4))]
    assert losses == expected
    assert_same_weights(fed.network, fitted.network)


def test_a_batch_without_update_leaves_weights_and_keeps_gradients() -> None:
    model, network = make_model(), make_network()
    (first, second, *_) = batches_of(make_data(), 4)
    model.train_batch(*first, update=False)
    assert not model.has_updated
    assert_same_weights(model.network, network)
    assert all(param.grad is not None for param in model.parameters())
    model.train_batch(*second)
    assert model.has_updated
    assert all(param.grad is None for param in model.parameters())


def test_fit_forgets_gradients_of_before() -> None:
    data, model, fresh = make_data(), make_model(), make_model()
    model.train_batch(*data[:], update=False)
    fit(model, data, batch_size=4)
    fit(fresh, data, batch_size=4)
    assert_same_weights(model.network, fresh.network)


@settings(max_examples=25, deadline=None)
@given(
    samples=st.integers(1, 12), size=st.integers(1, 6), window=st.integers(1, 5), epochs=st.integers(1, 2),
    drop_last=st.booleans(), clips=st.booleans(),
)  # fmt: skip
def test_any_batch_size_and_window_repeats_the_plain_loop(
    samples: int, size: int, window: int, epochs: int, drop_last: bool, clips: bool
) -> None:
    data, network, model = make_data(samples), make_network(), make_model(max_norm=0.2 if clips else None)
    batches = [batch for batch in batches_of(data, size) if not drop_last or len(batch[1]) == size]
    options = {"batch_size": size, "epochs": epochs, "accumulate_grad_batches": window, "drop_last": drop_last}
    if not batches:
        with pytest.raises(ValueError, match="gave no batch"):
            fit(model, data, **options)
        return
    expected = plain_loop(network, batches, epochs=epochs, window=window, max_norm=0.2 if clips else None)
    losses, _ = fit(model, data, **options)
    assert losses == expected
    assert_same_weights(model.network, network)


@pytest.mark.parametrize(("most", "batches"), [(1, 1), (3, 3), (4, 4), (6, 6), (8, 8), (50, 8)])
def test_num_iters_ends_training_after_so_many_batches_of_all_epochs(most: int, batches: int) -> None:
    data, network, model = make_data(), make_network(), make_model()
    order = batches_of(data, 4) * 2
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    expected = plain_loop(network, order[: min(batches, 4)], window=3, optimizer=optimizer)
    if batches > 4:
        expected += plain_loop(network, order[4:batches], window=3, optimizer=optimizer)
    losses, history = fit(model, data, batch_size=4, epochs=2, num_iters=most, accumulate_grad_batches=3)
    assert losses == expected
    assert_same_weights(model.network, network)
    assert sum(logs["step"] for logs in history) == batches


# Evaluation


def test_the_loss_of_an_evaluation_is_the_mean_over_samples_not_over_batches() -> None:
    data, model = make_data(), make_model(metrics=Accuracy())
    inputs, labels = data[:]
    with torch.no_grad():
        outputs = model.network(inputs)
        each = nn.functional.cross_entropy(outputs.double(), labels, reduction="none")
        right = (outputs.argmax(1) == labels).double().mean().item()
    by_batch = torch.stack([part.mean() for part in each.split(4)]).mean().item()
    assert abs(by_batch - each.mean().item()) > 1e-3  # the data tells one from the other
    result = model.evaluate(data, batch_size=4, verbose=0)
    assert result == {"loss": pytest.approx(each.mean().item(), rel=1e-6), "acc": right, "samples": 14}


@pytest.mark.parametrize(("level", "dtype"), HALF)
def test_an_evaluation_in_half_is_that_of_a_loop_by_hand(level: str, dtype: str) -> None:
    data, network = make_data(), make_network()
    amp.decorate(network, level=level, dtype=dtype)
    losses = []
    with torch.no_grad(), amp.auto_cast(level=level, dtype=dtype):
        network.eval()
        for inputs, labels in batches_of(data, 4):
            losses.append(nn.functional.cross_entropy(network(inputs), labels).item())
    expected = mean_over_samples(losses, batches_of(data, 4))
    model = make_model({"level": level, "dtype": dtype})
    assert model.evaluate(data, batch_size=4, verbose=0)["loss"] == pytest.approx(expected, rel=1e-12)
    assert model.eval_batch(*batches_of(data, 4)[0]) == [losses[0]]
    only = mezzo.Model(make_network(), device="cpu")  # without an optimizer
    only.prepare(loss=nn.CrossEntropyLoss(), amp_configs={"level": level, "dtype": dtype})
    assert only.evaluate(data, batch_size=4, verbose=0) == model.evaluate(data, batch_size=4, verbose=0)
    assert (only.predict(data, batch_size=4, stack_outputs=True, verbose=0)[0] ==
            model.predict(data, batch_size=4, stack_outputs=True, verbose=0)[0]).all()  # fmt: skip


def test_evaluation_uses_running_statistics_and_leaves_them_and_the_mode_alone() -> None:
    model = make_model(network=make_network(norm=True))
    data = make_data()
    fit(model, data, batch_size=7)
    before = {name: value.clone() for name, value in model.network.state_dict().items()}
    one_by_one = model.evaluate(data, batch_size=1, verbose=0)["loss"]  # batch statistics of one sample do not exist
    assert one_by_one == pytest.approx(model.evaluate(data, batch_size=14, verbose=0)["loss"], rel=1e-6)
    model.predict(data, verbose=0)
    assert model.network.training
    for name, value in model.network.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("call", ["predict_batch", "eval_batch", "summary"])
def test_a_part_that_was_in_evaluation_mode_stays_in_it(call: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, (inputs, labels) = make_model(network=make_network(norm=True)), make_data()[:]
    model.network[1].eval()
    if call == "predict_batch":
        model.predict_batch(inputs)
    elif call == "eval_batch":
        model.eval_batch(inputs, labels)
    else:
        model.summary((2, 6))
    assert model.network.training
    assert not model.network[1].training


def test_metrics_start_anew_in_every_epoch_and_every_evaluation() -> None:
    data, seen = make_data(), []

    class Watch(mezzo.model.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Logs) -> None:
            seen.append(logs["acc"])

    network, expected = make_network(), []
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        right = 0
        for inputs, labels in batches_of(data, 4):
            right += int((network(inputs).argmax(1) == labels).sum())  # before the update, as training sees it
            plain_loop(network, [(inputs, labels)], optimizer=optimizer)
        expected.append(right / 14)
    model = make_model(metrics=Accuracy())
    history = model.fit(data, data, batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=Watch())
    assert seen == [logs["acc"] for logs in history] == expected
    after = (model.network(data.tensors[0]).argmax(1) == data.tensors[1]).double().mean().item()
    assert history[-1]["eval_acc"] == after == model.evaluate(data, batch_size=5, verbose=0)["acc"]


# What runs in which precision


def decisions(call: Any) -> tuple[set[str], tuple[int, int]]:
    """Return why the linear layers ran as they did, and how many tanh between them had half and float32 values.

    Where half arithmetic is slow, products compute in float32 between half borders: what they give to tanh is half.
    """
    with collect_operator_stats(print_table=False) as stats:
        call()
    rows = [row for row in stats.rows if row.phase == "forward"]
    tanh = [row for row in rows if row.op == "tanh"]
    reasons = {row.reason for row in rows if row.api_op == "linear"}
    return reasons, (sum(row.fp16 + row.bf16 for row in tanh), sum(row.fp32 for row in tanh))


@pytest.mark.parametrize(("level", "dtype"), HALF)
def test_training_evaluation_and_prediction_multiply_in_half(level: str, dtype: str) -> None:
    model, (inputs, labels) = make_model({"level": level, "dtype": dtype}), make_data()[:]
    for call in (
        lambda: model.train_batch(inputs, labels),
        lambda: model.eval_batch(inputs, labels),
        lambda: model.predict_batch(inputs),
        lambda: model.evaluate(make_data(), batch_size=14, verbose=0),
        lambda: model.predict(make_data(), batch_size=14, verbose=0),
        lambda: model.fit(make_data(), batch_size=14, verbose=0),
    ):
        assert decisions(call) == ({"white list"}, (1, 0))


def test_without_amp_configs_everything_is_float32() -> None:
    model, (inputs, labels) = make_model(), make_data()[:]
    assert decisions(lambda: model.train_batch(inputs, labels)) == ({"no auto_cast"}, (0, 1))
    assert model.scaler is None


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_loss_is_computed_under_the_policy(level: str) -> None:
    """A product inside the loss is half, and so is what a loss of the black list is spared from."""
    dtypes = []

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        dtypes.append((outputs @ outputs.mT).dtype)
        return nn.functional.cross_entropy(outputs, labels)

    model, (inputs, labels) = make_model(level, loss=loss), make_data()[:]
    model.train_batch(inputs, labels)
    model.eval_batch(inputs, labels)
    assert dtypes == [torch.float16] * 2


def test_several_losses_are_added_up_in_float32() -> None:
    def losses(outputs: Tensor, labels: Tensor) -> list[Tensor]:
        one = nn.functional.cross_entropy(outputs, labels)
        return [one, one.detach() * 0 + 2.0**17]  # no number of float16

    for level in (None, "O1", "O2"):
        model, (inputs, labels) = make_model(level, loss=losses), make_data()[:]
        alone = make_model(level).eval_batch(inputs, labels)[0]
        assert model.eval_batch(inputs, labels)[0] == pytest.approx(2.0**17 + alone, rel=1e-7)
        assert model.train_batch(inputs, labels)[0] == pytest.approx(2.0**17 + alone, rel=1e-7)


def test_several_losses_of_many_numbers_are_refused() -> None:
    def losses(outputs: Tensor, labels: Tensor) -> list[Tensor]:
        each = nn.functional.cross_entropy(outputs, labels, reduction="none")
        return [each, each]

    with pytest.raises(ValueError, match=r"^the loss has shape \[14\]: it must be one number; use reduction='mean'$"):
        make_model(loss=losses).train_batch(*make_data()[:])


@pytest.mark.parametrize("count", [0, 2])
def test_losses_of_one_element_are_added_up_and_none_at_all_are_refused(count: int) -> None:
    def losses(outputs: Tensor, labels: Tensor) -> list[Tensor]:
        one = nn.functional.cross_entropy(outputs, labels)
        return [one, one.reshape(1)][:count]

    model, (inputs, labels) = make_model(loss=losses), make_data()[:]
    if not count:
        with pytest.raises(TypeError, match="the loss"):
            model.train_batch(inputs, labels)
        return
    assert model.train_batch(inputs, labels)[0] == 2 * make_model().train_batch(inputs, labels)[0]


def test_a_frozen_batch_norm_stays_frozen_while_the_rest_trains() -> None:
    network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model = make_model(network=network)
    network.train()
    network[1].eval()
    fit(model, make_data(), batch_size=4)
    assert not network[1].training
    assert torch.equal(network[1].running_mean, torch.zeros(8))
    network.eval()  # as a network that comes from a prediction
    fit(model, make_data(), batch_size=4)
    assert network[1].training
    assert not torch.equal(network[1].running_mean, torch.zeros(8))


class Distance(Metric):
    """The mean distance of the first output from a number that no half format holds."""

    def __init__(self) -> None:
        self.dtypes: set[torch.dtype] = set()
        self.reset()

    def name(self) -> str:
        return "distance"

    def reset(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, pred: Tensor, label: Tensor) -> None:
        far = (label.float() * 30001 - pred[:, 0].float()).abs()
        self.dtypes.add(far.dtype)
        self.total, self.count = self.total + float(far.sum()), self.count + len(far)

    def accumulate(self) -> float:
        return self.total / self.count


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_metrics_are_computed_outside_of_the_policy(level: str) -> None:
    metric = Distance()
    model, (inputs, labels) = make_model(level, metrics=metric), make_data()[:]
    model.train_batch(inputs, labels)
    model.eval_batch(inputs, labels)
    model.evaluate(make_data(), batch_size=4, verbose=0)
    assert metric.dtypes == {torch.float32}


class Shifted(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Computes with torch where it reads, as transforms do."""

    def __init__(self) -> None:
        self.dtypes: set[torch.dtype] = set()
        self.allows_grad: set[bool] = set()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        shifted = torch.ones(6) * 70000 - 69999 + index
        self.dtypes.add(shifted.dtype)
        self.allows_grad.add(torch.is_grad_enabled())
        return shifted, index % 3


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_data_set_computes_in_float32_in_an_evaluation(level: str) -> None:
    data = Shifted()
    model = make_model(level)
    model.predict(data, verbose=0)
    model.fit(data, verbose=0)
    assert data.dtypes == {torch.float32}
    result = model.evaluate(data, batch_size=4, verbose=0)
    assert data.dtypes == {torch.float32}
    assert math.isfinite(result["loss"])


def test_callbacks_of_an_evaluation_run_outside_of_the_policy() -> None:
    seen = set()

    class Adds(mezzo.model.callbacks.Callback):
        def on_eval_batch_begin(self, step: int, logs: Logs) -> None:
            seen.add((torch.ones(2) + 1.5).dtype)

        def on_eval_batch_end(self, step: int, logs: Logs) -> None:
            seen.add((torch.ones(2) + 1.5).dtype)

    make_model("O2").evaluate(make_data(), verbose=0, callbacks=Adds())
    assert seen == {torch.float32}


# Preparing more than once


@pytest.mark.parametrize("level", [None, "O1", "O2"])
def test_preparing_again_goes_on_where_training_was(level: str | None) -> None:
    data, once, twice = make_data(), make_model(level, network=make_network(norm=True)), None
    fit(once, data, batch_size=4, epochs=2)
    twice = make_model(level, network=make_network(norm=True))
    fit(twice, data, batch_size=4)
    scale = None if twice.scaler is None else twice.scaler.state_dict()
    twice.prepare(twice.optimizer, nn.CrossEntropyLoss(), Accuracy(), level)
    if scale is not None:  # prepare makes a new scaler: its scale is the first one again
        assert twice.scaler is not None
        assert twice.scaler.get_scale() == scale["scale"] == 2.0**15
    fit(twice, data, batch_size=4)
    assert_same_weights(twice.network, once.network)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_optimizer_that_comes_later_finds_the_float32_weights(level: str) -> None:
    data, late, direct = make_data(), mezzo.Model(make_network(), device="cpu"), make_model(level)
    late.prepare(loss=nn.CrossEntropyLoss(), amp_configs=level)
    late.evaluate(data, verbose=0)
    optimizer = torch.optim.SGD(late.parameters(), lr=0.1, momentum=0.9)
    late.prepare(optimizer, nn.CrossEntropyLoss(), amp_configs=level)
    assert fit(late, data, batch_size=4) == fit(direct, data, batch_size=4)
    assert_same_weights(late.network, direct.network)


def test_float32_training_may_go_on_in_half() -> None:
    data, model, network = make_data(), make_model(), make_network()
    batches = batches_of(data, 4)
    fit(model, data, batch_size=4)
    model.prepare(model.optimizer, nn.CrossEntropyLoss(), amp_configs="O2")
    losses, _ = fit(model, data, batch_size=4)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    plain_loop(network, batches, optimizer=optimizer)
    expected = plain_loop(network, batches, optimizer=optimizer)
    assert losses == pytest.approx(expected, abs=2e-3)  # 11 bits in values below 3
    assert losses != expected


@pytest.mark.parametrize(("first", "then"), [("O1", "O2"), ("O2", None), ("O2", {"level": "O2", "dtype": "bfloat16"})])
def test_another_precision_of_a_network_with_half_weights_is_refused(first: str, then: Any) -> None:
    model = make_model(first)
    before = {name: value.clone() for name, value in model.network.state_dict().items()}
    with pytest.raises(
        RuntimeError,
        match=rf"^the network's weights are in fp16 {first}, but amp_configs asks for (fp32|fp16 O2|bf16 O2): "
        r"prepare a Model of another network, such as amp.float32_copy\(model.network\)$",
    ):
        model.prepare(model.optimizer, nn.CrossEntropyLoss(), amp_configs=then)
    for name, value in model.network.state_dict().items():
        assert torch.equal(value, before[name])
    again = make_model(then, network=amp.float32_copy(model.network))
    fit(again, make_data(), batch_size=4)


def test_another_model_of_a_network_with_half_weights_is_refused_too() -> None:
    network = make_model("O2").network
    with pytest.raises(RuntimeError, match="weights are in fp16 O2, but amp_configs asks for fp32"):
        make_model(None, network=network)


# A loss that is no number


@pytest.mark.parametrize("amp_configs", [None, {"dtype": "bfloat16"}])
@pytest.mark.parametrize(("bad", "stops_after"), [(0, 4), (6, 10), (9, 10), (12, 14)])
def test_a_loss_that_is_not_finite_ends_training_soon_and_names_the_batch(
    amp_configs: Any, bad: int, stops_after: int
) -> None:
    inputs, labels = make_data()[:]
    inputs[bad] = math.nan
    size = 1 if bad else 4
    model, losses = make_model(amp_configs), Losses()
    with pytest.raises(
        NonFiniteLoss,
        match=rf"^the loss is not finite in batch {bad // size + 1} of epoch 1; lower the learning rate, or look at the "
        r"batch$",
    ):
        model.fit(TensorDataset(inputs, labels), batch_size=size, shuffle=False, verbose=0, callbacks=losses)
    assert len(losses.seen) == stops_after


def test_a_later_epoch_is_named_too() -> None:
    class Breaks(mezzo.model.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
            if epoch == 1:
                with torch.no_grad():
                    model.network[0].weight.fill_(math.inf)

    model = make_model()
    with pytest.raises(NonFiniteLoss, match="in batch 1 of epoch 2;"):
        model.fit(make_data(), batch_size=4, epochs=3, verbose=0, callbacks=Breaks())


def test_with_a_loss_scale_a_bad_batch_is_skipped() -> None:
    inputs, labels = make_data()[:]
    inputs[5] = math.nan
    model = make_model("O1")
    model.fit(TensorDataset(inputs, labels), batch_size=2, shuffle=False, verbose=0)
    assert model.scaler is not None
    assert model.scaler.skipped_steps == 1
    assert all(bool(value.isfinite().all()) for value in model.network.state_dict().values())


def test_with_a_fixed_loss_scale_a_loss_that_is_not_finite_ends_training() -> None:
    inputs, labels = make_data()[:]
    model = make_model({"use_dynamic_loss_scaling": False})
    with pytest.raises(NonFiniteLoss, match="the loss is not finite in batch 1 of epoch 1"):
        model.fit(TensorDataset(inputs * math.nan, labels), epochs=2, verbose=0)


def test_a_loss_with_one_element_is_a_number() -> None:
    model = make_model(loss=lambda outputs, labels: nn.functional.cross_entropy(outputs, labels).reshape(1))
    assert fit(model, make_data(), batch_size=4) == fit(make_model(), make_data(), batch_size=4)
