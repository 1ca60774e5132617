"""When callbacks are called, what they are told, and what happens when one of them fails."""

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mezzo
from mezzo.model.callbacks import Callback, CallbackList, LateLogs
from mezzo.model.metric import Accuracy
from model_loops import Logs, assert_same_weights, batches_of, make_data, make_model, make_network

METHODS = [
    f"on_{what}_{when}"
    for what in ("train", "eval", "predict", "epoch", "train_batch", "eval_batch", "predict_batch")
    for when in ("begin", "end")
] + ["close"]


class Recorder(Callback):
    """Writes down every call; its logs too, if asked."""

    def __init__(self, *, reads: bool = False) -> None:
        self.calls: list[str] = []
        self.logs: list[dict[str, Any]] = []
        self.reads = reads

    def __getattribute__(self, name: str) -> Any:
        if name not in METHODS:
            return super().__getattribute__(name)

        def note(*arguments: Any) -> None:
            *number, logs = arguments or ({},)
            self.calls.append(" ".join([name.removeprefix("on_"), *map(str, number)]))
            if self.reads:
                self.logs.append(dict(logs))

        return note


def batches(kind: str, count: int) -> list[str]:
    """Return the calls around so many batches."""
    return [f"{kind}_batch_{when} {step}" for step in range(count) for when in ("begin", "end")]


def test_two_epochs_with_evaluations_are_told_in_this_order() -> None:
    recorder = Recorder()
    make_model().fit(make_data(4), make_data(3), batch_size=2, epochs=2, verbose=0, callbacks=recorder)
    epoch = [*batches("train", 2)]
    evaluation = ["eval_begin", *batches("eval", 2), "eval_end"]
    assert recorder.calls == [
        "train_begin",
        "epoch_begin 0", *epoch, "epoch_end 0", *evaluation,
        "epoch_begin 1", *epoch, "epoch_end 1", *evaluation,
        "train_end",
        "close",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "where",
    [name for name in METHODS if "predict" not in name],
)
def test_callbacks_hear_in_the_order_in_which_they_are_given(where: str) -> None:
    heard: list[str] = []
    callbacks = []
    for name in ("first", "second"):
        callback = Callback()
        setattr(callback, where, lambda *_, name=name: heard.append(name))
        callbacks.append(callback)
    make_model().fit(make_data(2), make_data(2), batch_size=2, verbose=0, callbacks=callbacks)
    assert heard == ["first", "second"]


def test_evaluations_and_predictions_are_told() -> None:
    model, recorder = make_model(), Recorder()
    model.evaluate(make_data(3), batch_size=2, verbose=0, callbacks=[recorder])
    assert recorder.calls == ["eval_begin", *batches("eval", 2), "eval_end", "close"]
    recorder.calls.clear()
    model.predict(make_data(3), batch_size=2, verbose=0, callbacks=(recorder,))
    assert recorder.calls == ["predict_begin", *batches("predict", 2), "predict_end", "close"]


@pytest.mark.parametrize(("every", "epochs"), [(1, [0, 1, 2, 3, 4]), (2, [1, 3, 4]), (3, [2, 4]), (9, [4])])
def test_evaluations_come_every_so_many_epochs_and_after_the_last(every: int, epochs: list[int]) -> None:
    recorder = Recorder()
    history = make_model().fit(
        make_data(4), make_data(3), batch_size=4, epochs=5, eval_freq=every, verbose=0, callbacks=recorder
    )
    starts = [i for i, call in enumerate(recorder.calls) if call == "eval_begin"]
    assert [int(recorder.calls[i - 1].removeprefix("epoch_end ")) for i in starts] == epochs
    assert [number for number, logs in enumerate(history) if "eval_loss" in logs] == epochs


def test_callbacks_know_model_and_parameters() -> None:
    recorder, model = Recorder(), make_model(metrics=Accuracy((1, 2)))
    model.fit(make_data(), batch_size=4, epochs=2, verbose=0, callbacks=recorder, save_dir=None)
    assert recorder.model is model
    assert recorder.params == {
        "epochs": 2,
        "steps": 4,
        "batch_size": 4,
        "verbose": 0,
        "metrics": ["loss", "acc_top1", "acc_top2"],
        "save_dir": None,
        "evaluates": False,
    }
    model.fit(iter(batches_of(make_data(), 4)), verbose=0, callbacks=recorder)
    assert recorder.params["steps"] is None


def test_steps_are_those_that_will_be_taken() -> None:
    recorder, model = Recorder(reads=True), make_model()
    model.fit(make_data(), batch_size=2, num_iters=3, verbose=0, callbacks=recorder)
    assert recorder.params["steps"] == 3
    recorder.logs.clear()
    model.evaluate(make_data(), batch_size=2, num_iters=2, verbose=0, callbacks=recorder)
    assert recorder.logs[0] == {"steps": 2}


def test_logs_hold_loss_metrics_and_counts() -> None:
    recorder, model = Recorder(reads=True), make_model(metrics=Accuracy())
    data = make_data(6)
    inputs, labels = data[:]
    losses = [make_model().eval_batch(x, y)[0] for x, y in batches_of(data, 4)[:1]]
    history = model.fit(data, data, batch_size=4, shuffle=False, verbose=0, callbacks=recorder)
    by_call = dict(zip(recorder.calls, recorder.logs, strict=True))
    right = (make_network()(inputs[:4]).argmax(1) == labels[:4]).double().mean().item()
    assert by_call["train_batch_end 0"] == {"loss": losses[0], "acc": right, "step": 1, "batch_size": 4}
    assert by_call["train_batch_end 1"].keys() == {"loss", "acc", "step", "batch_size"}
    assert by_call["train_batch_end 1"]["batch_size"] == 2
    assert by_call["train_batch_end 1"]["acc"] == by_call["epoch_end 0"]["acc"]  # since the epoch began
    assert by_call["epoch_end 0"].keys() == {"loss", "acc", "step"}
    assert by_call["eval_begin"] == {"steps": 2}
    assert by_call["eval_end"].keys() == {"loss", "acc", "samples"}
    assert by_call["eval_end"]["samples"] == 6
    assert by_call["train_end"] == history[-1]
    assert history[-1].keys() == {"loss", "acc", "step", "eval_loss", "eval_acc"}


def test_logs_of_an_evaluations_batch_hold_its_loss_too() -> None:
    recorder, (inputs, labels) = Recorder(reads=True), make_data()[:]
    make_model(metrics=Accuracy()).evaluate(make_data(), batch_size=14, verbose=0, callbacks=recorder)
    expected = make_model().eval_batch(inputs, labels)[0]
    assert recorder.logs[recorder.calls.index("eval_batch_end 0")]["loss"] == expected


def test_logs_that_nobody_looked_at_in_time_are_refused() -> None:
    class Keeps(Callback):
        def __init__(self) -> None:
            self.kept: list[Logs] = []

        def on_train_batch_end(self, step: int, logs: Logs) -> None:
            self.kept.append(logs)

    late = Keeps()
    make_model(metrics=Accuracy()).fit(make_data(), batch_size=2, shuffle=False, verbose=0, callbacks=late)
    with pytest.raises(RuntimeError, match=r"earlier batch"):
        dict(late.kept[0])


@pytest.mark.parametrize("call", ["evaluate", "eval_batch"])
def test_a_callback_may_evaluate_in_the_middle_of_an_epoch(call: str) -> None:
    class Evaluates(Callback):
        def on_train_batch_end(self, step: int, logs: Logs) -> None:
            if step == 1:
                model.evaluate(make_data(), verbose=0) if call == "evaluate" else model.eval_batch(*make_data()[:])

    expected = make_model(metrics=Accuracy()).fit(make_data(), batch_size=4, shuffle=False, verbose=0)
    model = make_model(metrics=Accuracy())
    assert model.fit(make_data(), batch_size=4, shuffle=False, verbose=0, callbacks=Evaluates()) == expected


# Who does not look does not wait


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every call by which the host asks for a tensor's value."""
    seen: list[str] = []
    for name in ("item", "tolist", "cpu", "__float__", "__bool__", "numpy"):
        original = getattr(Tensor, name)

        def counted(self: Tensor, *arguments: Any, _name: str = name, _original: Any = original, **more: Any) -> Any:
            seen.append(_name)
            return _original(self, *arguments, **more)

        monkeypatch.setattr(Tensor, name, counted)
    return seen


def marks(waits: list[str], batches: int, **options: Any) -> list[int]:
    """Return how many waits there were when each batch was done."""
    counts: list[int] = []

    class Watch(Callback):
        def on_train_batch_end(self, step: int, logs: Logs) -> None:
            counts.append(len(waits))

    data = [(x[0], y[0]) for x, y in batches_of(make_data(), 1)]
    model = make_model(metrics=Accuracy(), **options)
    model.fit((data * 9)[:batches], batch_size=1, shuffle=False, verbose=2, log_freq=100, callbacks=Watch())
    return counts


@pytest.mark.parametrize("level", [None, {"dtype": "bfloat16"}, {"level": "O2", "dtype": "bfloat16"}])
def test_no_batch_waits_for_the_device_but_every_tenth(
    level: Any, waits: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    counts = marks(waits, 25, amp_configs=level)
    assert [after - before for before, after in pairwise(counts)] == [
        1 if number % 10 == 0 else 0 for number in range(1, 25)
    ]  # every ten batches one look whether the loss is finite


def test_logs_are_read_once_by_whoever_looks_first() -> None:
    reads = []

    def read() -> dict[str, Any]:
        reads.append(1)
        return {"loss": 2.0, "acc": 0.5}

    logs = LateLogs(read)
    assert reads == []
    assert (logs["loss"], logs.get("acc"), logs.get("other", 7), "acc" in logs, len(logs)) == (2.0, 0.5, 7, True, 2)
    assert {**logs} == dict(logs) == {"loss": 2.0, "acc": 0.5}
    assert repr(logs) == "{'loss': 2.0, 'acc': 0.5}"
    assert reads == [1]


def test_the_printed_lines_look_at_the_numbers_only_when_they_are_due(
    waits: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looked: list[int] = []
    known = LateLogs._known

    def counted(self: LateLogs) -> dict[str, Any]:
        looked.append(1)
        return known(self)

    monkeypatch.setattr(LateLogs, "_known", counted)
    make_model().fit(make_data(), batch_size=2, verbose=2, log_freq=100)
    make_model().fit(make_data(), batch_size=2, verbose=0, log_freq=1)
    assert looked == []
    make_model().fit(make_data(), batch_size=2, verbose=2, log_freq=3)
    assert looked


# An end before the end


@pytest.mark.parametrize("where", ["on_epoch_begin", "on_train_batch_end", "on_epoch_end", "on_eval_end"])
def test_stop_training_ends_after_the_epoch_and_its_evaluation(where: str) -> None:
    model, recorder = make_model(), Recorder()

    def stop(self: Callback, *arguments: Any) -> None:
        model.stop_training = True

    stopper = type("Stopper", (Callback,), {where: stop})()
    history = model.fit(
        make_data(4), make_data(3), batch_size=2, epochs=5, eval_freq=5, verbose=0, callbacks=[stopper, recorder]
    )
    if where == "on_eval_end":  # there is no evaluation before the last epoch
        assert len(history) == 5
        return
    assert len(history) == 1
    evaluation = ["eval_begin", *batches("eval", 2), "eval_end"]
    assert recorder.calls == [
        "train_begin", "epoch_begin 0", *batches("train", 2), "epoch_end 0", *evaluation, "train_end", "close",
    ]  # fmt: skip
    assert len(model.fit(make_data(4), epochs=2, verbose=0)) == 2  # the next training starts anew


class Failing(Callback):
    """Raises in one of its methods."""

    def __init__(self, where: str, error: BaseException) -> None:
        def fail(*arguments: Any) -> None:
            raise error

        setattr(self, where, fail)


TRAINING = [name for name in METHODS if "predict" not in name and name != "close"]


@pytest.mark.parametrize("error", [ArithmeticError("out of order"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", TRAINING)
def test_a_callback_that_fails_ends_the_run_and_all_are_closed(
    where: str, error: BaseException, tmp_path: Path
) -> None:
    model, recorder = make_model(), Recorder()
    with pytest.raises(type(error)):
        model.fit(
            make_data(4), make_data(3), batch_size=2, verbose=0, save_dir=tmp_path, save_freq=5,
            callbacks=[Failing(where, error), recorder],
        )  # fmt: skip
    assert recorder.calls[-1] == "close"
    assert recorder.calls.count("close") == 1
    if where != "on_train_end":  # there all of the training was done
        assert not (tmp_path / "final").exists()
    model.fit(make_data(4), batch_size=2, verbose=0)


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_evaluations_and_predictions_that_fail_close_their_callbacks_too(call: str) -> None:
    model, recorder = make_model(), Recorder()
    kind = call.removesuffix("uate")
    with pytest.raises(ArithmeticError):
        getattr(model, call)(
            make_data(), verbose=0, callbacks=[Failing(f"on_{kind}_batch_end", ArithmeticError()), recorder]
        )
    assert recorder.calls[-1] == "close"
    assert model.network.training


@pytest.mark.parametrize("error", [ArithmeticError("bad file"), KeyboardInterrupt()])
def test_data_that_fails_ends_the_run_and_writes_no_final(error: BaseException, tmp_path: Path) -> None:
    def broken() -> Iterator[Any]:
        yield from batches_of(make_data(), 4)[:2]
        raise error

    recorder = Recorder()
    with pytest.raises(type(error)):
        make_model().fit(broken(), verbose=0, save_dir=tmp_path, callbacks=recorder)
    assert recorder.calls[-1] == "close"
    assert "train_end" not in recorder.calls
    assert not (tmp_path / "final").exists()


def test_an_evaluation_that_fails_leaves_the_network_in_training_and_no_region_open() -> None:
    def broken() -> Iterator[Any]:
        yield from batches_of(make_data(), 4)[:1]
        raise ArithmeticError

    model = make_model("O2")
    with pytest.raises(ArithmeticError):
        model.evaluate(broken(), verbose=0)
    assert model.network.training
    assert torch.is_grad_enabled()
    assert (torch.ones(2) @ torch.ones(2)).dtype is torch.float32


def test_a_loss_that_is_not_finite_writes_no_final_and_closes(tmp_path: Path) -> None:
    recorder = Recorder()
    data = torch.utils.data.TensorDataset(make_data().tensors[0] * math.nan, make_data().tensors[1])
    with pytest.raises(mezzo.model.steps.NonFiniteLoss):
        make_model().fit(data, batch_size=4, verbose=0, save_dir=tmp_path, callbacks=recorder)
    assert recorder.calls[-1] == "close"
    assert "epoch_end 0" not in recorder.calls
    assert list(tmp_path.iterdir()) == []


def test_one_that_fails_to_close_does_not_keep_others_open() -> None:
    recorder = Recorder()
    with pytest.raises(OSError, match="disk"):
        make_model().fit(make_data(), verbose=0, callbacks=[Failing("close", OSError("disk")), recorder])
    assert recorder.calls[-1] == "close"


def test_an_error_while_closing_does_not_hide_what_ended_the_run() -> None:
    fails = Failing("close", OSError("disk"))
    with pytest.raises(ArithmeticError):
        make_model().fit(
            make_data(), verbose=0, callbacks=[fails, Failing("on_epoch_end", ArithmeticError("the reason"))]
        )


# The list


@pytest.mark.parametrize("given", ["bar", [3], Callback, [Recorder(), None]])
@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_what_is_no_callback_is_refused_before_anything_runs(call: str, given: Any) -> None:
    model = make_model()
    with pytest.raises(
        TypeError,
        match=r"^callbacks: a (str|int|type|NoneType) must be an instance of mezzo.model.callbacks.Callback",
    ):
        getattr(model, call)(make_data(), verbose=0, callbacks=given)
    assert_same_weights(model.network, make_network())


def test_a_callback_has_all_methods_and_they_do_nothing() -> None:
    callback, model = Callback(), make_model()
    told = CallbackList([callback], model, {"epochs": 1})
    assert callback.model is model
    assert callback.params == {"epochs": 1}
    for mode in ("train", "eval", "predict"):
        told.begin(mode)  # type: ignore[arg-type]
        told.begin_batch(mode, 0)  # type: ignore[arg-type]
        told.end_batch(mode, 0, {})  # type: ignore[arg-type]
        told.end(mode)  # type: ignore[arg-type]
    told.begin_epoch(0)
    told.end_epoch(0, {})
    told.close()
