"""`GLOG_v=5` shows the operators of the first training step of `mezzo.Model`, backward and update included, once."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mezzo import Model
from mezzo.amp._operator_log import OF_REGION, OF_STEP, operator_log
from mezzo.amp.debugging import collect_operator_stats

INPUTS, LABELS = torch.ones(4, 8), torch.tensor([0, 1, 0, 1])
DATA = TensorDataset(INPUTS, LABELS)


@pytest.fixture(autouse=True)
def new_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has trained nothing yet; `GLOG_v` is 5."""
    monkeypatch.setenv("GLOG_v", "5")
    operator_log.reset()
    yield
    monkeypatch.undo()
    operator_log.reset()


@pytest.fixture
def model() -> Model:
    made = Model(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), device="cpu")
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    made.prepare(optimizer, nn.CrossEntropyLoss(), amp_configs={"level": "O2", "dtype": "bfloat16"})
    return made


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    return lambda: capsys.readouterr().out


def fit(model: Model) -> None:
    model.fit(DATA, batch_size=2, epochs=2, verbose=0)


def train_batches(model: Model) -> None:
    for _ in range(2):
        model.train_batch(INPUTS, LABELS)


def names(text: str) -> set[str]:
    return {line.split("|")[0].strip() for line in text.splitlines() if line.startswith("  ") and "|" in line}


@pytest.mark.parametrize("train", [fit, train_batches])
def test_first_training_step_is_printed_once_with_its_backward_and_update(
    train: Callable[[Model], None], model: Model, printed: Callable[[], str]
) -> None:
    train(model)
    text = printed()
    assert text.startswith(f"{OF_STEP}\n<")
    assert text.count("op list") == 1
    assert OF_REGION not in text
    assert {"addmm", "relu", "threshold_backward", "_fused_sgd_"} <= names(text)
    relu = next(line for line in text.splitlines() if line.startswith("  relu"))
    assert [int(count) for count in relu.split("|")[1:]] == [0, 1, 0, 0]


def test_nothing_is_printed_without_the_variable(
    model: Model, printed: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOG_v")
    fit(model)
    assert printed() == ""


def test_training_in_float32_is_shown_too(printed: Callable[[], str]) -> None:
    model = Model(nn.Linear(8, 2), device="cpu")
    model.prepare(torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    train_batches(model)
    assert printed().count("op list") == 1


def test_evaluation_before_the_training_does_not_take_the_place_of_the_first_step(
    model: Model, printed: Callable[[], str]
) -> None:
    model.evaluate(DATA, batch_size=2, verbose=0)
    model.predict_batch(INPUTS)
    assert printed() == ""
    fit(model)
    assert "threshold_backward" in names(printed())


def test_step_that_raises_is_not_printed_and_the_next_is(model: Model, printed: Callable[[], str]) -> None:
    with pytest.raises(RuntimeError, match="shape"):
        model.train_batch(torch.ones(4, 3), LABELS)
    assert printed() == ""
    train_batches(model)
    assert printed().count("op list") == 1


def test_statistics_of_the_user_take_the_place_of_the_table(model: Model, printed: Callable[[], str]) -> None:
    with collect_operator_stats():
        fit(model)
    text = printed()
    assert text.count("op list") == 1
    assert OF_STEP not in text
