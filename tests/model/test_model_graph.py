"""`Model.prepare(graph=True)`: a captured step trains as the eager one, and all other calls work as before.

The graphs are captured but not compiled here, so that the tests are fast; tests/static compiles.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_model_two_processes import run, same, scenario, weights
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import mezzo
from graph_backends import use_backend
from mezzo.model.metric import Accuracy
from model_loops import assert_same_weights, batches_of, make_data, make_model, make_network

BF16 = {"level": "O2", "dtype": "bfloat16"}
BATCHES = 10


@pytest.fixture(autouse=True)
def captured_only(monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(monkeypatch, "aot_eager")


def train(model: mezzo.Model, batches: int = BATCHES) -> list[Any]:
    return [model.train_batch(x, y) for x, y in batches_of(make_data(4 * batches), 4)]


def assert_close_weights(one: mezzo.Model, other: mezzo.Model, tolerance: float) -> None:
    for mine, theirs in zip(weights(one), weights(other), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


# One rounding of the dtype of a gradient, at ten steps of 0.1 with momentum.
@pytest.mark.parametrize(("level", "tolerance"), [(None, 1e-6), (BF16, 2**-8), ("O2", 2**-11)])
@pytest.mark.parametrize("norm", [False, True])
def test_losses_weights_and_metrics_are_those_of_the_eager_model(level: Any, tolerance: float, norm: bool) -> None:
    eager, graph = (
        make_model(level, network=make_network(norm=norm), metrics=Accuracy(), max_norm=0.5, graph=is_graph)
        for is_graph in (False, True)
    )
    expected, found = train(eager), train(graph)
    assert [loss for (loss,), _ in found] == pytest.approx([loss for (loss,), _ in expected], rel=10 * tolerance)
    assert [values for _, values in found] == [values for _, values in expected]
    assert_close_weights(graph, eager, tolerance)
    assert found[-1][0] != found[0][0]
    assert eager.compiled_step is None
    assert graph.compiled_step is not None
    assert len(graph.compiled_step.graphs) == 1, "nothing was captured, or every batch was"


def test_fit_captures_the_smaller_last_batch_too_and_gives_the_history_of_the_eager_model() -> None:
    histories = []
    for is_graph in (False, True):
        model = make_model(BF16, metrics=Accuracy(), graph=is_graph)
        histories.append(model.fit(make_data(), make_data(7), batch_size=4, epochs=2, shuffle=False, verbose=0))
    assert model.compiled_step is not None
    assert model.compiled_step.num_shapes == 2
    for mine, theirs in zip(*histories, strict=True):
        assert mine == pytest.approx(theirs, rel=2**-8)


def test_evaluation_and_prediction_use_the_weights_of_the_captured_step() -> None:
    graph = make_model(BF16, network=make_network(norm=True), metrics=Accuracy(), graph=True)
    before = graph.evaluate(make_data(), batch_size=4, verbose=0)
    train(graph)
    found = graph.evaluate(make_data(), batch_size=4, verbose=0)
    outputs = graph.predict(make_data(), batch_size=14, stack_outputs=True, verbose=0)[0]
    assert found["loss"] != before["loss"]
    twin = make_model(BF16, network=make_network(norm=True), metrics=Accuracy())
    twin.network.load_state_dict(graph.network.state_dict())
    assert found == twin.evaluate(make_data(), batch_size=4, verbose=0)
    assert np.array_equal(outputs, twin.predict(make_data(), batch_size=14, stack_outputs=True, verbose=0)[0])
    assert graph.network.training
    train(graph)  # and back
    assert graph.compiled_step is not None
    assert graph.compiled_step.num_shapes == 1


@pytest.mark.parametrize("level", [None, "O2"])
def test_a_loaded_model_goes_on_as_the_saved_one(level: Any, tmp_path: Path) -> None:
    first = make_model(level, graph=True)
    train(first)
    first.save(tmp_path / "saved")
    second = make_model(level, network=nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), graph=True)
    train(second, 1)  # loading replaces what a captured step has trained
    second.load(tmp_path / "saved")
    assert train(first) == train(second)
    assert_same_weights(first.network, second.network)


def test_accumulation_is_refused_before_the_first_batch() -> None:
    model = make_model(graph=True)
    with pytest.raises(ValueError, match=r"graph=True trains whole steps.*accumulate_grad_batches"):
        model.fit(make_data(4), batch_size=4, accumulate_grad_batches=2, verbose=0)
    with pytest.raises(ValueError, match=r"graph=True trains whole steps.*update=False"):
        model.train_batch(*make_data(4)[:], update=False)
    assert_same_weights(model.network, make_network())


def test_several_labels_go_to_the_loss() -> None:
    def loss(outputs: Tensor, classes: Tensor, targets: Tensor) -> list[Tensor]:
        return [cross_entropy(outputs, classes), mse_loss(outputs, targets)]

    inputs, classes = make_data(8)[:]
    targets = torch.arange(24.0).view(8, 3) / 24
    losses = []
    for is_graph in (False, True):
        model = make_model(loss=loss, graph=is_graph)
        losses.append([model.train_batch(inputs, [classes, targets])[0] for _ in range(4)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    network = make_network()
    right = sum(float(part.detach()) for part in loss(network(inputs), classes, targets))
    assert losses[1][0] == pytest.approx(right, rel=1e-6)


def test_a_loss_without_labels_is_trained() -> None:
    inputs, _ = make_data(8)[:]
    losses = []
    for is_graph in (False, True):
        model = make_model(loss=lambda outputs: outputs.square().mean(), graph=is_graph)
        losses.append([model.train_batch(inputs)[0] for _ in range(4)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[1][-1] < losses[1][0]


@pytest.mark.parametrize("missing", ["optimizer", "loss"])
def test_a_graph_without_a_training_step_is_refused(missing: str) -> None:
    model = mezzo.Model(make_network(), device="cpu")
    parts = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loss": nn.CrossEntropyLoss()}
    parts[missing] = None
    with pytest.raises(ValueError, match="graph=True captures a training step: give an optimizer and a loss"):
        model.prepare(**parts, graph=True)


def test_preparing_again_without_graph_trains_eagerly() -> None:
    model = make_model(graph=True)
    train(model, 1)
    model.prepare(model.optimizer, nn.CrossEntropyLoss())
    assert model.compiled_step is None
    model.train_batch(*make_data(4)[:], update=False)


@pytest.mark.slow
def test_two_processes_train_as_one_with_twice_the_batch(tmp_path: Path) -> None:
    found = scenario(
        tmp_path,
        "from mezzo.static import _graph; _graph._usable = lambda _: 'aot_eager'; model = make_model(graph=True); "
        "model.fit(make_data(16), batch_size=2, epochs=2, shuffle=False, verbose=0); torch.manual_seed(1000 * rank); "
        "half = make_model('O2', network=nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), graph=True); "
        "logs = half.fit(make_data(16), make_data(7), batch_size=4, epochs=2, verbose=0); "
        "found = {'weights': weights(model), 'half': list(half.network.state_dict().values()), 'logs': logs, "
        "'report': str(model.compiled_step.report())}",
    )
    assert same(*found["weights"])
    for mine, theirs in zip(found["weights"][0], weights(run(1)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)  # the mean of two means, in float32
    assert same(*found["half"])
    assert found["logs"][0] == found["logs"][1]
    assert "the step runs compiled" in found["report"][0]


def test_buffers_of_the_loss_count_only_steps_that_train() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
            self.calls += 1
            return cross_entropy(outputs, labels)

    model = mezzo.Model(make_network(), device="cpu")
    loss = Counting()
    model.prepare(torch.optim.SGD(model.parameters(), lr=0.1), loss, graph=True)
    train(model, 3)
    assert loss.calls.item() == 3
