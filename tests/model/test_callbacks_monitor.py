"""Callbacks that watch a number: against sequences worked out by hand."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mezzo
from mezzo.model.callbacks import Callback, CallbackList, EarlyStopping, ReduceLROnPlateau
from mezzo.model.metric import Accuracy
from model_loops import Logs, assert_same_weights, make_data, make_model


def stopped_at(values: list[float], name: str = "loss", **options: Any) -> int | None:
    """Return the evaluation, counted from 1, after which training was to stop."""
    model = make_model()
    callback = EarlyStopping(verbose=0, **options)
    run = CallbackList([callback], model, {"save_dir": None})
    run.begin("train")
    for number, value in enumerate(values):
        run.begin_epoch(number)
        run.end("eval", {name: value, "samples": 3})
        if model.stop_training:
            return number + 1
    return None


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        ([3, 2, 1], {}, None),
        ([3, 2, 2], {}, 3),  # as good is not better
        ([1, 2], {}, 2),
        ([1, 2, 2, 2], {"patience": 2}, 4),
        ([1, 2, 2, 0.5, 2, 2, 2], {"patience": 2}, 7),  # a gain starts anew
        ([1, 2, 3], {"mode": "max"}, None),
        ([1, 2, 1], {"mode": "max"}, 3),
        ([3, 2.9, 2.8, 2.7], {"min_delta": 0.15}, 2),
        ([3, 2.8, 2.6, 2.4], {"min_delta": 0.15}, None),
        ([3, 2.9, 2.8, 2.6], {"min_delta": 0.15, "patience": 1}, None),  # 2.8 is 0.2 better than the best, 3
        ([3, 2.8, 2.6], {"min_delta": -0.15}, None),  # its sign does not matter
        ([1.0, 0.9], {"baseline": 0.5}, 1),
        ([1.0, 0.4, 0.3], {"baseline": 0.5, "patience": 1}, None),
        ([0.4, 0.6], {"baseline": 0.5, "mode": "max", "patience": 1}, None),
        ([math.nan, math.nan], {}, 1),
        ([1.0, math.nan, 0.5], {"patience": 1}, None),
        ([math.inf, 1.0], {}, 1),
    ],
)
def test_training_stops_where_patience_ends(values: list[float], options: dict[str, Any], expected: int | None) -> None:
    assert stopped_at(values, **options) == expected


@pytest.mark.parametrize(
    ("name", "grows"),
    [("loss", False), ("acc", True), ("acc_top5", True), ("mean_iou", True), ("auc", True), ("mae", False),
     ("precision", True), ("recall", True)],
)  # fmt: skip
def test_auto_knows_which_way_is_better(name: str, grows: bool) -> None:
    assert stopped_at([1, 2], name, monitor=name) == (None if grows else 2)
    assert stopped_at([2, 1], name, monitor=name) == (2 if grows else None)


@pytest.mark.parametrize("name", ["dice_loss", "iou_loss"])
def test_auto_knows_that_losses_fall(name: str) -> None:
    assert stopped_at([2, 1], name, monitor=name) is None


def scripted(values: list[float]) -> Any:
    """Return a metric that gives these numbers, one an evaluation."""

    class Script(mezzo.model.metric.Metric):
        def __init__(self) -> None:
            self.left = list(values)
            self.counts = False

        def name(self) -> str:
            return "score"

        def reset(self) -> None:
            self.counts = False

        def update(self, *arguments: Any) -> None:
            self.counts = not model.network.training

        def accumulate(self) -> float:
            return self.left.pop(0) if self.counts else 0.0

    network = nn.Linear(6, 3)
    model = mezzo.Model(network, device="cpu")
    model.prepare(torch.optim.SGD(model.parameters(), lr=1.0), nn.CrossEntropyLoss(), Script())
    return model


def test_a_run_stops_and_says_so_and_keeps_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, kept = scripted([0.5, 0.75, 0.625, 0.25, 0.125]), {}

    class Keeps(Callback):
        def on_eval_end(self, logs: Logs) -> None:
            if logs["score"] == 0.75:
                kept.update({name: value.clone() for name, value in model.network.state_dict().items()})

    history = model.fit(
        make_data(), make_data(), batch_size=4, epochs=9, verbose=0, save_dir=tmp_path, save_freq=100,
        callbacks=[EarlyStopping("score", "max", patience=1), Keeps()],
    )  # fmt: skip
    assert [logs["eval_score"] for logs in history] == [0.5, 0.75, 0.625, 0.25]
    assert capsys.readouterr().out == "Epoch 4: stopped early, best score 0.7500\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best_model", "final"]
    again = mezzo.Model(nn.Linear(6, 3), device="cpu")
    again.load(tmp_path / "best_model")
    for name, value in again.network.state_dict().items():
        assert torch.equal(value, kept[name])
    assert not torch.equal(model.network.weight, kept["weight"])


def test_the_best_is_not_kept_where_it_is_not_wanted_or_has_no_place(tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_size": 4, "epochs": 2, "verbose": 0, "save_freq": 9}
    make_model().fit(
        make_data(), make_data(), save_dir=tmp_path, callbacks=EarlyStopping(save_best_model=False), **options
    )
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    make_model().fit(make_data(), make_data(), callbacks=EarlyStopping(), **options)


def test_a_second_training_starts_with_new_patience_and_no_best() -> None:
    stopper = EarlyStopping(patience=0, verbose=0)
    for _ in range(2):
        model = make_model()
        run = CallbackList([stopper], model, {"save_dir": None})
        run.begin("train")
        run.end("eval", {"loss": 5.0})
        assert not model.stop_training
        run.end("train")
        run.close()


def test_evaluations_outside_of_training_do_not_count() -> None:
    model, stopper = make_model(), EarlyStopping(patience=0, verbose=0)
    for _ in range(3):
        model.evaluate(make_data(), verbose=0, callbacks=stopper)
    assert not model.stop_training


def test_evaluations_after_a_failed_run_do_not_count() -> None:
    class Fails(Callback):
        def on_epoch_end(self, epoch: int, logs: Logs) -> None:
            raise ArithmeticError

    model, stopper = make_model(), EarlyStopping(patience=0, verbose=0)
    with pytest.raises(ArithmeticError):
        model.fit(make_data(), make_data(), batch_size=7, verbose=0, callbacks=[stopper, Fails()])
    for _ in range(3):
        model.evaluate(make_data(), batch_size=7, verbose=0, callbacks=stopper)
    assert not model.stop_training


@pytest.mark.parametrize("callback", [EarlyStopping(), ReduceLROnPlateau()])
def test_watching_evaluations_that_do_not_come_is_told(callback: Callback) -> None:
    with pytest.warns(UserWarning, match="eval"):
        make_model().fit(make_data(), batch_size=7, verbose=0, callbacks=callback)


@pytest.mark.parametrize("kind", [EarlyStopping, ReduceLROnPlateau])
def test_a_number_that_no_evaluation_has_is_told(kind: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^monitor: unknown number 'ac'; did you mean 'acc'\? allowed: loss, acc, samples$"
    ):
        make_model(metrics=Accuracy()).fit(make_data(), make_data(), verbose=0, callbacks=kind("ac"))


@pytest.mark.parametrize("kind", [EarlyStopping, ReduceLROnPlateau])
def test_bad_settings_are_refused_on_construction(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"^unknown mode 'mean'; .*allowed: auto, min, max$"):
        kind(mode="mean")
    with pytest.raises(ValueError, match=r"^patience=-1: must be 0 or more$"):
        kind(patience=-1)


# The learning rate


def rates(values: list[float], lr: float = 1.0, **options: Any) -> list[float]:
    """Return the learning rate after each evaluation."""
    model = make_model()
    assert model.optimizer is not None
    group = model.optimizer.param_groups[0]
    group["lr"] = lr
    run = CallbackList([ReduceLROnPlateau(verbose=0, **options)], model, {})
    run.begin("train")
    seen = []
    for value in values:
        run.end("eval", {"loss": value})
        seen.append(group["lr"])
    return seen


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        # Gains, then a plateau: the second evaluation without a gain lowers, and so does every second one after it.
        ([4, 3, 3, 3, 3, 3], {"patience": 2}, [1, 1, 1, 0.5, 0.5, 0.25]),
        ([4, 4, 4, 4], {"patience": 1}, [1, 0.5, 0.25, 0.125]),
        ([4, 5, 3, 4, 4], {"patience": 2}, [1, 1, 1, 1, 0.5]),  # a gain in between starts anew
        # After a change, two evaluations do not count.
        ([4, 4, 4, 4, 4, 4], {"patience": 1, "cooldown": 2}, [1, 0.5, 0.5, 0.5, 0.25, 0.25]),
        ([4, 4, 3, 3, 3], {"patience": 1, "cooldown": 1}, [1, 0.5, 0.5, 0.25, 0.25]),
        ([4, 3.9, 3.8, 3.7], {"patience": 2, "min_delta": 0.5}, [1, 1, 0.5, 0.5]),
        ([1, 2, 3], {"patience": 1, "mode": "max"}, [1, 1, 1]),
        ([4, 4, 4, 4], {"patience": 1, "min_lr": 0.3}, [1, 0.5, 0.3, 0.3]),
        ([4, math.nan, math.nan], {"patience": 1}, [1, 0.5, 0.25]),
    ],
)
def test_the_rate_falls_on_plateaus(values: list[float], options: dict[str, Any], expected: list[float]) -> None:
    assert rates(values, factor=0.5, **{"min_delta": 0.0, **options}) == expected


@pytest.mark.parametrize(("patience", "cooldown"), [(1, 0), (2, 0), (3, 1), (2, 3)])
def test_the_rate_is_that_of_torchs_own_scheduler(patience: int, cooldown: int) -> None:
    """Torch counts patience from 0: it lowers after one evaluation more."""
    source = torch.Generator().manual_seed(4)
    values = [1 / (1 + i) ** 0.2 + torch.rand((), generator=source).item() * 0.2 for i in range(60)]
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=patience - 1, threshold=0.01, threshold_mode="abs", cooldown=cooldown, eps=0
    )
    expected = []
    for value in values:
        scheduler.step(value)
        expected.append(optimizer.param_groups[0]["lr"])
    assert expected[-1] < 0.1
    assert rates(values, factor=0.5, patience=patience, cooldown=cooldown, min_delta=0.01) == expected


def test_a_rate_is_never_raised() -> None:
    assert rates([4, 4, 4], lr=1e-4, patience=1, min_lr=1e-3) == [1e-4, 1e-4, 1e-4]


def test_all_groups_fall_and_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    model = scripted([1.0, 0.5, 0.25])
    first, second = model.parameters()
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": 0.5}], lr=0.1)
    model.prepare(optimizer, nn.CrossEntropyLoss(), model._prepared.metrics)
    model.fit(
        make_data(), make_data(), batch_size=4, epochs=3, verbose=0,
        callbacks=ReduceLROnPlateau("score", mode="max", patience=2),
    )  # fmt: skip
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.01, 0.05])
    assert capsys.readouterr().out == "score no longer improves: learning rate 0.01, 0.05\n"


def test_a_rate_that_stays_is_not_announced(capsys: pytest.CaptureFixture[str]) -> None:
    run = CallbackList([ReduceLROnPlateau(patience=1, min_lr=0.1)], make_model(), {})
    run.begin("train")
    for _ in range(4):
        run.end("eval", {"loss": 1.0})
    assert capsys.readouterr().out == ""


def test_plain_evaluations_do_not_lower_the_rate() -> None:
    model = make_model()
    callback = ReduceLROnPlateau(patience=1, verbose=0)
    for _ in range(3):
        model.evaluate(make_data(), verbose=0, callbacks=callback)
    assert model.optimizer is not None
    assert model.optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("factor", [0, 1, 1.5, -0.1, math.nan])
def test_a_factor_that_does_not_lower_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match=rf"^factor={factor}: must be between 0 and 1$"):
        ReduceLROnPlateau(factor=factor)


def test_lowered_rates_train_as_a_plain_loop_with_them_does() -> None:
    data, model = make_data(), scripted([1.0, 0.5, 0.25, 0.125])
    network = copy.deepcopy(model.network)
    model.fit(
        data, data, batch_size=14, epochs=4, shuffle=False, verbose=0,
        callbacks=ReduceLROnPlateau("score", mode="max", factor=0.25, patience=1, verbose=0),
    )  # fmt: skip
    for lr in (1.0, 1.0, 0.25, 0.0625):
        nn.functional.cross_entropy(network(data.tensors[0]), data.tensors[1]).backward()
        torch.optim.SGD(network.parameters(), lr=lr).step()
        network.zero_grad()
    assert_same_weights(model.network, network)
