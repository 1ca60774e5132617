"""Checkpoints and TensorBoard files that training writes by itself."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import mezzo
from mezzo.errors import MezzoError
from mezzo.model.callbacks import Callback, LRScheduler, ModelCheckpoint, TensorBoard
from mezzo.model.metric import Accuracy, Metric
from model_loops import (
    Logs,
    Losses,
    assert_same_weights,
    batches_of,
    make_data,
    make_model,
)


def names(folder: Path) -> list[str]:
    """Return what lies in a folder."""
    return sorted(path.name for path in folder.iterdir())


# Checkpoints


@pytest.mark.parametrize(
    ("every", "expected"), [(1, ["0", "1", "2", "3", "final"]), (2, ["1", "3", "final"]), (9, ["final"])]
)
def test_checkpoints_are_named_after_their_epochs(every: int, expected: list[str], tmp_path: Path) -> None:
    make_model().fit(make_data(), batch_size=7, epochs=4, verbose=0, save_dir=tmp_path / "run", save_freq=every)
    assert names(tmp_path / "run") == expected


@pytest.mark.parametrize("level", [None, "O2"])
def test_every_checkpoint_is_the_model_after_its_epoch(level: str | None, tmp_path: Path) -> None:
    model = make_model(level)
    model.fit(make_data(), batch_size=4, epochs=3, shuffle=False, verbose=0, save_dir=str(tmp_path))
    for name, epochs in (("0", 1), ("1", 2), ("2", 3), ("final", 3)):
        expected, loaded = make_model(level), make_model(level)
        expected.fit(make_data(), batch_size=4, epochs=epochs, shuffle=False, verbose=0)
        loaded.load(tmp_path / name)
        assert_same_weights(loaded.network, expected.network)


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_model().fit(make_data(), make_data(), batch_size=7, verbose=0)
    assert names(tmp_path) == []


def test_a_checkpoint_callback_has_a_folder_of_its_own(tmp_path: Path) -> None:
    make_model().fit(make_data(), batch_size=7, epochs=4, verbose=0, callbacks=ModelCheckpoint(3, tmp_path / "own"))
    assert names(tmp_path) == ["own"]
    assert names(tmp_path / "own") == ["2", "final"]


def test_ones_own_checkpoint_callback_takes_the_place_of_the_usual_one(tmp_path: Path) -> None:
    make_model().fit(
        make_data(), batch_size=7, epochs=4, verbose=0, save_dir=tmp_path, callbacks=ModelCheckpoint(save_freq=2)
    )
    assert names(tmp_path) == ["1", "3", "final"]


def test_an_early_end_writes_final_too(tmp_path: Path) -> None:
    make_model().fit(make_data(), batch_size=4, epochs=4, num_iters=6, verbose=0, save_dir=tmp_path)
    assert names(tmp_path) == ["0", "1", "final"]


def test_a_run_that_fails_keeps_what_it_had(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
            if epoch == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_model().fit(make_data(), batch_size=7, epochs=4, verbose=0, save_dir=tmp_path, callbacks=Fails())
    assert names(tmp_path) == ["0", "1"]
    make_model().load(tmp_path / "1")


def test_a_second_run_replaces_checkpoints_of_the_same_name(tmp_path: Path) -> None:
    model = make_model()
    for _ in range(2):
        model.fit(make_data(), batch_size=7, verbose=0, save_dir=tmp_path)
    assert names(tmp_path) == ["0", "final"]
    loaded = make_model()
    loaded.load(tmp_path / "0")
    assert_same_weights(loaded.network, model.network)


@pytest.mark.parametrize("value", [0, -1])
def test_a_save_frequency_below_one_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match=rf"^save_freq={value}: must be at least 1$"):
        ModelCheckpoint(value)


def test_a_checkpoint_after_an_epoch_has_the_rate_of_the_next_one(tmp_path: Path) -> None:
    model = make_model()
    scheduler = torch.optim.lr_scheduler.StepLR(model.optimizer, 1, 0.5)  # type: ignore[arg-type]
    model.fit(
        make_data(), batch_size=7, epochs=2, verbose=0, save_dir=tmp_path,
        callbacks=LRScheduler(scheduler, by_step=False, by_epoch=True),
    )  # fmt: skip
    loaded = make_model()
    loaded.load(tmp_path / "0")
    assert loaded.optimizer is not None
    assert loaded.optimizer.param_groups[0]["lr"] == 0.05


def test_final_holds_what_callbacks_do_to_the_weights_at_the_end(tmp_path: Path) -> None:
    """As an average of the weights does, which is put in place when training ends."""

    class Average(Callback):
        def on_train_end(self, logs: Logs) -> None:
            with torch.no_grad():
                model.network[0].weight.fill_(0.5)

    model, loaded = make_model(), make_model()
    model.fit(make_data(), batch_size=7, verbose=0, save_dir=tmp_path, callbacks=Average())
    loaded.load(tmp_path / "final")
    assert_same_weights(loaded.network, model.network)


# TensorBoard


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what a folder of TensorBoard files holds: steps and values by name."""
    read = EventAccumulator(str(folder))
    read.Reload()
    return {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def single(values: list[float]) -> list[float]:
    """Return numbers as TensorBoard keeps them: float32."""
    return torch.tensor(values, dtype=torch.float32).tolist()


def test_points_of_training_and_evaluation_are_read_back(tmp_path: Path) -> None:
    model, losses = make_model({"incr_every_n_steps": 2}, metrics=Accuracy()), Losses()
    history = model.fit(
        make_data(), make_data(), batch_size=4, epochs=2, shuffle=False, verbose=0,
        callbacks=[TensorBoard(tmp_path / "tb", log_freq=3), losses],
    )  # fmt: skip
    found = points(tmp_path / "tb")
    assert set(found) == {"train/loss", "train/acc", "train/lr", "train/loss_scale", "eval/loss", "eval/acc"}
    assert found["train/loss"] == list(zip([3, 6], single([losses.seen[2], losses.seen[5]]), strict=True))
    assert found["train/lr"] == list(zip([3, 6], single([0.1, 0.1]), strict=True))
    assert found["train/loss_scale"] == [(3, 2.0**16), (6, 2.0**18)]
    assert found["eval/loss"] == list(zip([4, 8], single([logs["eval_loss"] for logs in history]), strict=True))
    assert found["eval/acc"] == list(zip([4, 8], single([logs["eval_acc"] for logs in history]), strict=True))


def test_a_second_training_goes_on_counting(tmp_path: Path) -> None:
    model, board = make_model(), TensorBoard(tmp_path, log_freq=4)
    for _ in range(2):
        model.fit(make_data(), batch_size=4, verbose=0, callbacks=board)
    assert [step for step, _ in points(tmp_path)["train/loss"]] == [4, 8]
    assert "train/loss_scale" not in points(tmp_path)


def test_an_evaluation_alone_is_written_too(tmp_path: Path) -> None:
    result = make_model().evaluate(make_data(), verbose=0, callbacks=TensorBoard(tmp_path))
    assert points(tmp_path) == {"eval/loss": [(0, single([result["loss"]])[0])]}


@pytest.mark.parametrize("error", [ArithmeticError(), KeyboardInterrupt()])
def test_a_run_that_fails_closes_its_file_and_keeps_its_points(error: BaseException, tmp_path: Path) -> None:
    def broken() -> Iterator[Any]:
        yield from batches_of(make_data(), 4)
        raise error

    board = TensorBoard(tmp_path, log_freq=1)
    with pytest.raises(type(error)):
        make_model().fit(broken(), verbose=0, callbacks=board)
    assert board._writer is None
    assert [step for step, _ in points(tmp_path)["train/loss"]] == [1, 2, 3]  # the fourth waited for a fifth


def test_nothing_is_written_before_there_is_something(tmp_path: Path) -> None:
    make_model().fit(make_data(), batch_size=7, verbose=0, callbacks=TensorBoard(tmp_path / "tb", log_freq=100))
    assert not (tmp_path / "tb").exists()


class Counter(Metric):
    """A whole number."""

    def name(self) -> str:
        return "count"

    def reset(self) -> None:
        self.value = 0

    def update(self, pred: torch.Tensor, label: torch.Tensor) -> None:
        self.value += len(label)

    def accumulate(self) -> float:
        return self.value


def test_whole_numbers_are_written_too(tmp_path: Path) -> None:
    make_model(metrics=Counter()).evaluate(make_data(), verbose=0, callbacks=TensorBoard(tmp_path))
    assert points(tmp_path)["eval/count"] == [(0, 14.0)]


def test_a_log_frequency_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^log_freq=0: must be at least 1$"):
        TensorBoard(tmp_path, 0)


def test_a_missing_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MezzoError, match=r"tensorboard.*mezzo\[vision\]"):
        mezzo.model.callbacks.TensorBoard(tmp_path)
