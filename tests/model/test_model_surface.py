"""What `mezzo.Model` returns, prints and refuses, call by call."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mezzo
from mezzo.devices import DeviceError
from mezzo.model.metric import Accuracy, Metric
from mezzo.static import InputSpec
from model_loops import assert_same_weights, make_data, make_model, make_network


def test_the_class_and_the_callbacks_are_offered_by_the_package() -> None:
    import mezzo.model.callbacks
    import mezzo.vision.train

    assert mezzo.Model is mezzo.model.Model
    assert set(mezzo.__all__) >= {"Model", "callbacks"}
    names = {"ProgBarLogger", "ModelCheckpoint", "EarlyStopping", "LRScheduler", "ReduceLROnPlateau", "TensorBoard"}
    assert names <= set(mezzo.model.callbacks.__all__)
    with pytest.raises(AttributeError, match=r"^module 'mezzo' has no attribute 'Modell'$"):
        _ = mezzo.Modell  # type: ignore[attr-defined]


# Construction


@pytest.mark.parametrize("network", [None, "resnet", nn.Linear])
def test_what_is_no_network_is_refused(network: Any) -> None:
    with pytest.raises(TypeError, match=rf"^network is a {type(network).__name__}: must be a torch.nn.Module$"):
        mezzo.Model(network)


@pytest.mark.parametrize("inputs", [[(None, 4)], "x", [InputSpec([1]), torch.ones(1)]])
def test_inputs_must_be_specs(inputs: Any) -> None:
    with pytest.raises(TypeError, match=r"^inputs: a (tuple|str|Tensor|NoneType) must be a mezzo.static.InputSpec$"):
        mezzo.Model(nn.Linear(1, 1), inputs, device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error() -> None:
    with pytest.raises(DeviceError, match="this machine has no CUDA device"):
        mezzo.Model(nn.Linear(1, 1), device="gpu")


def test_an_unknown_device_is_told_in_the_words_of_the_call() -> None:
    with pytest.raises(DeviceError, match=r"^device='tpu': .*gpu:N"):
        mezzo.Model(nn.Linear(1, 1), device="tpu")


def test_parameters_are_those_of_the_network_for_an_optimizer() -> None:
    model = mezzo.Model(make_network(), device="cpu")
    assert all(one is other for one, other in zip(model.parameters(), model.network.parameters(), strict=True))
    assert model.optimizer is None
    assert model.scaler is None


# prepare


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"optimizer": "sgd"}, TypeError, r"^optimizer is a str: must be a torch.optim.Optimizer$"),
        ({"optimizer": torch.optim.SGD}, TypeError, r"^optimizer is a type: must be a torch.optim.Optimizer$"),
        ({"loss": 3}, TypeError, r"^loss is a int: must be a torch.nn.Module or a function$"),
        ({"metrics": "acc"}, TypeError, r"^metrics: a str must be a mezzo.model.metric.Metric$"),
        ({"metrics": [Accuracy(), Accuracy]}, TypeError, r"^metrics: a ABCMeta must be a mezzo.model.metric.Metric$"),
        ({"max_norm": -0.5}, ValueError, r"^max_norm=-0.5: must be 0 or more$"),
        ({"max_norm": float("nan")}, ValueError, r"^max_norm=nan: must be 0 or more$"),
        ({"amp_configs": "O4"}, ValueError, r"^amp_configs: unknown level 'O4'"),
        ({"amp_configs": 1}, TypeError, r"^amp_configs is a int"),
    ],
)
def test_prepare_checks_everything_before_anything_changes(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    model = make_model(metrics=Accuracy())
    optimizer = model.optimizer
    with pytest.raises(error, match=text):
        model.prepare(**{"optimizer": optimizer, "loss": nn.MSELoss(), "amp_configs": "O2", **options})
    assert model.optimizer is optimizer
    assert all(param.dtype is torch.float32 for param in model.parameters())
    assert model.evaluate(make_data(), verbose=0).keys() == {"loss", "acc", "samples"}  # as it was prepared before


def test_a_refused_loss_does_not_decorate() -> None:
    model = mezzo.Model(make_network(), device="cpu")
    with pytest.raises(TypeError, match="loss is a int"):
        model.prepare(loss=3, amp_configs="O2")  # type: ignore[arg-type]
    assert all(param.dtype is torch.float32 for param in model.parameters())


@pytest.mark.parametrize("level", [None, "O2"])
def test_an_optimizer_of_another_network_is_refused(level: str | None) -> None:
    model = mezzo.Model(make_network(), device="cpu")
    with pytest.raises(ValueError, match="optimizer"):
        model.prepare(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), nn.CrossEntropyLoss(), amp_configs=level)


@pytest.mark.parametrize("metrics", [[Accuracy(), Accuracy()], [Accuracy(name="loss")]])
def test_two_numbers_of_one_name_are_refused(metrics: list[Metric]) -> None:
    with pytest.raises(ValueError, match="name"):
        make_model(metrics=metrics)


def test_a_loss_with_parameters_is_moved_and_called() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(2.0))

        def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
            return self.weight * nn.functional.cross_entropy(outputs, labels)

    inputs, labels = make_data()[:]
    assert make_model(loss=Weighted()).eval_batch(inputs, labels) == [2 * make_model().eval_batch(inputs, labels)[0]]


# What is missing


@pytest.mark.parametrize(
    ("call", "given", "text"),
    [
        ("train_batch", {}, r"^train_batch\(\) needs an optimizer: call prepare\(optimizer=...\) first$"),
        ("train_batch", {"optimizer": True}, r"^train_batch\(\) needs a loss: call prepare\(loss=...\) first$"),
        ("fit", {}, r"^fit\(\) needs an optimizer: call prepare\(optimizer=...\) first$"),
        ("fit", {"optimizer": True}, r"^fit\(\) needs a loss: call prepare\(loss=...\) first$"),
        ("eval_batch", {}, r"^eval_batch\(\) needs a loss: call prepare\(loss=...\) first$"),
    ],
)
def test_calls_say_what_prepare_was_not_given(call: str, given: dict[str, bool], text: str) -> None:
    model = mezzo.Model(make_network(), device="cpu")
    if given:
        model.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    arguments = (make_data(),) if call == "fit" else make_data()[:]
    with pytest.raises(RuntimeError, match=text):
        getattr(model, call)(*arguments)


def test_an_evaluation_needs_prepare() -> None:
    with pytest.raises(RuntimeError, match=r"^evaluate\(\) needs a loss or metrics: call prepare\(...\) first$"):
        mezzo.Model(make_network(), device="cpu").evaluate(make_data())


def test_an_evaluation_needs_a_loss_or_metrics() -> None:
    model = mezzo.Model(make_network(), device="cpu")
    model.prepare()
    with pytest.raises(RuntimeError, match="needs a loss or metrics"):
        model.evaluate(make_data(), verbose=0)


def test_metrics_are_enough_for_an_evaluation() -> None:
    model = mezzo.Model(make_network(), device="cpu")
    model.prepare(metrics=Accuracy())
    assert model.evaluate(make_data(), batch_size=4, verbose=0).keys() == {"acc", "samples"}


def test_metrics_are_enough_for_the_evaluation_of_a_batch() -> None:
    model, whole = mezzo.Model(make_network(), device="cpu"), make_model(metrics=Accuracy())
    model.prepare(metrics=Accuracy())
    assert model.eval_batch(*make_data()[:]) == ([], whole.eval_batch(*make_data()[:])[1])


def test_prediction_needs_no_prepare() -> None:
    inputs = make_data().tensors[0]
    (outputs,) = mezzo.Model(make_network(), device="cpu").predict_batch(inputs)
    with torch.no_grad():
        np.testing.assert_array_equal(outputs, make_network()(inputs).numpy())


@pytest.mark.parametrize(
    "name", ["epochs", "eval_freq", "accumulate_grad_batches", "num_iters", "log_freq", "save_freq"]
)
@pytest.mark.parametrize("value", [0, -1])
def test_counts_below_one_are_refused_before_training(name: str, value: int) -> None:
    model = make_model()
    with pytest.raises(ValueError, match=rf"^{name}={value}: must be at least 1$"):
        model.fit(make_data(), verbose=0, **{name: value})
    assert_same_weights(model.network, make_network())


def test_counts_of_an_evaluation_are_checked_too() -> None:
    with pytest.raises(ValueError, match=r"^num_iters=0: must be at least 1$"):
        make_model().evaluate(make_data(), num_iters=0)
    with pytest.raises(ValueError, match=r"^log_freq=0: must be at least 1$"):
        make_model().evaluate(make_data(), log_freq=0)


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("verbose", [3, -1, "yes"])
def test_an_unknown_verbosity_is_refused(call: str, verbose: Any) -> None:
    with pytest.raises(ValueError, match=rf"^verbose={verbose!r}: must be 0 \(nothing\), 1 \(a bar\) or 2 \(lines\)$"):
        getattr(make_model(), call)(make_data(), verbose=verbose)


# What comes back


def test_a_batch_gives_a_loss_and_behind_it_the_metrics() -> None:
    inputs, labels = make_data()[:]
    with torch.no_grad():
        outputs = make_network()(inputs)
    loss = nn.functional.cross_entropy(outputs, labels).item()
    best = outputs.topk(2).indices == labels[:, None]
    top = [best[:, 0].double().mean().item(), best.any(1).double().mean().item()]
    assert make_model().train_batch(inputs, labels) == [loss]
    assert make_model().eval_batch(inputs, labels) == [loss]
    model = make_model(metrics=[Accuracy(), Accuracy((1, 2), name="best")])
    assert model.eval_batch(inputs, labels) == ([loss], [top[0], top])
    assert model.train_batch(inputs, labels) == ([loss], [top[0], top])


def test_metrics_of_batches_are_those_of_the_batch_alone() -> None:
    model, (inputs, labels) = make_model(metrics=Accuracy()), make_data()[:]
    for part in (slice(0, 3), slice(3, 10)):
        right = (model.network(inputs[part]).argmax(1) == labels[part]).double().mean().item()
        assert model.eval_batch(inputs[part], labels[part])[1] == [right]


def test_half_outputs_become_float32_arrays_of_the_same_values() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> list[Tensor]:
            logits = self.layer(x)
            return [logits, logits.argmax(1)]

    for level, dtype in (("O1", "float16"), ("O2", "bfloat16")):
        model = make_model({"level": level, "dtype": dtype}, network=Both(), loss=lambda *_: None)
        logits, classes = model.predict_batch(make_data().tensors[0])
        assert logits.dtype == np.float32
        assert classes.dtype == np.int64
        half = torch.tensor(logits).to(getattr(torch, dtype))
        np.testing.assert_array_equal(half.float().numpy(), logits)  # nothing that half does not hold


def test_outputs_come_by_batch_or_stacked() -> None:
    model = make_model()
    by_batch = model.predict(make_data(), batch_size=4, verbose=0)
    stacked = model.predict(make_data(), batch_size=4, verbose=0, stack_outputs=True)
    assert [len(by_batch), [part.shape for part in by_batch[0]]] == [1, [(4, 3), (4, 3), (4, 3), (2, 3)]]
    np.testing.assert_array_equal(np.concatenate(by_batch[0]), stacked[0])


def test_outputs_that_are_no_tensors_are_refused() -> None:
    class Named(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return {"logits": super().forward(x)}

    def loss(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs["logits"], labels)

    model = make_model(network=Named(6, 3), loss=loss)
    model.fit(make_data(), batch_size=4, verbose=0)  # its loss knows what to do with them
    with pytest.raises(
        TypeError, match=r"^the network returned a dict: predict\(\) needs tensors, or a list or tuple of them$"
    ):
        model.predict_batch(make_data().tensors[0])


@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
def test_a_loss_of_many_numbers_is_refused(call: str) -> None:
    model = make_model(loss=nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(ValueError, match=r"^the loss has shape \[14\]: it must be one number; use reduction='mean'$"):
        getattr(model, call)(*make_data()[:])
    assert_same_weights(model.network, make_network())


@pytest.mark.parametrize("value", [1.5, None])
def test_a_loss_that_is_no_tensor_is_refused(value: Any) -> None:
    model = make_model(loss=lambda outputs, labels: value)
    with pytest.raises(TypeError, match=r"the loss is a (float|NoneType)"):
        model.train_batch(*make_data()[:])


# summary

TABLE = """\
layer  kind         output  parameters
--------------------------------------
0      Linear       [5, 8]          56
1      BatchNorm1d  [5, 8]          16
2      Tanh         [5, 8]           0
3      Linear       [5, 3]          27
--------------------------------------
total 99, trained 43
"""


def summarized(model: mezzo.Model, capsys: pytest.CaptureFixture[str], **options: Any) -> list[str]:
    """Return the lines of a summary without runs of blanks."""
    model.summary(**options)
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_a_summary_has_layers_shapes_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    network = make_network(norm=True)
    for param in network[0].parameters():
        param.requires_grad_(False)
    model = mezzo.Model(network, device="cpu")
    assert model.summary((5, 6)) == {"total_params": 99, "trainable_params": 43}
    assert capsys.readouterr().out == TABLE
    assert network.training
    assert torch.equal(network[1].running_mean, torch.zeros(8))


def test_a_summary_takes_shapes_from_where_they_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    model = mezzo.Model(make_network(), device="cpu")
    assert "0 Linear - 56" in summarized(model, capsys)
    model.predict_batch(make_data().tensors[0])
    assert "0 Linear [2, 8] 56" in summarized(model, capsys)
    assert "2 Linear [7, 3] 27" in summarized(model, capsys, input_size=(7, 6))
    told = mezzo.Model(nn.Embedding(4, 3), InputSpec([None, 5], "int64"), device="cpu")
    assert "(network) Embedding [2, 5, 3] 12" in summarized(told, capsys)
    assert "(network) Embedding [1, 3] 12" in summarized(told, capsys, input_size=(1,), dtype="int64")


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_summary_of_half_weights_runs_under_the_policy(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(level)
    assert "2 Linear [4, 3] 27" in summarized(model, capsys, input_size=(4, 6))
    assert model.summary() == {"total_params": 83, "trainable_params": 83}


def test_weights_that_are_used_twice_count_once(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    model = mezzo.Model(nn.Sequential(first, second), device="cpu")
    assert model.summary()["total_params"] == 9
    assert capsys.readouterr().out.endswith("total 9, trained 9\n")
