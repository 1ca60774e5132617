"""What a person sees: exact lines, and a bar on a terminal."""

import io
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Any

import pytest
from torch import Tensor

import mezzo
from mezzo.model.callbacks import CallbackList, ProgBarLogger
from mezzo.model.metric import Accuracy, Metric
from model_loops import batches_of, make_data, make_model


def told(text: str) -> str:
    """Return what was printed, times replaced."""
    return re.sub(r"\d+ ms/step", "T ms/step", text)


def numbers() -> tuple[list[str], dict[str, float], list[dict[str, float]]]:
    """Return the batch lines of a run, those of an evaluation before it, and its history."""
    quiet, lines = make_model(metrics=Accuracy()), []

    class Lines(mezzo.model.callbacks.Callback):
        def on_train_batch_end(self, step: int, logs: Any) -> None:
            lines.append(f"loss: {logs['loss']:.4f} - acc: {logs['acc']:.4f}")

    before = quiet.evaluate(make_data(), batch_size=4, verbose=0)
    history = quiet.fit(make_data(), make_data(), batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=Lines())
    return lines, before, history


EXPECTED = """\
Epoch 1/2
step 2/4 - {0}
step 4/4 - {1}
4 steps - {2} - T ms/step
Eval samples: 14 - {3}
Epoch 2/2
step 2/4 - {4}
step 4/4 - {5}
4 steps - {6} - T ms/step
Eval samples: 14 - {7}
"""


@pytest.mark.parametrize("verbose", [1, 2])
def test_without_a_terminal_there_are_lines(verbose: int, capsys: pytest.CaptureFixture[str]) -> None:
    lines, before, history = numbers()
    assert capsys.readouterr().out == ""  # verbose=0
    model = make_model(metrics=Accuracy())
    model.evaluate(make_data(), batch_size=4, verbose=verbose)
    assert capsys.readouterr().out == (
        f"Evaluation\nEval samples: 14 - loss: {before['loss']:.4f} - acc: {before['acc']:.4f}\n"
    )
    model.fit(make_data(), make_data(), batch_size=4, epochs=2, shuffle=False, verbose=verbose, log_freq=2)
    whole = [
        f"loss: {logs[f'{kind}loss']:.4f} - acc: {logs[f'{kind}acc']:.4f}" for logs in history for kind in ("", "eval_")
    ]
    captured = capsys.readouterr()
    assert told(captured.out) == EXPECTED.format(lines[1], lines[3], *whole[:2], lines[5], lines[7], *whole[2:])
    assert captured.err == ""
    model.predict(make_data(), batch_size=4, verbose=verbose)
    assert capsys.readouterr().out == "Predicted samples: 14\n"


def test_nothing_is_printed_with_verbose_0(capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model()
    model.fit(make_data(), make_data(), epochs=2, verbose=0, log_freq=1)
    model.evaluate(make_data(), verbose=0)
    model.predict(make_data(), verbose=0)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_without_a_length_there_is_no_total(capsys: pytest.CaptureFixture[str]) -> None:
    make_model().fit(iter(batches_of(make_data(), 7)), log_freq=1)
    assert re.search(r"^step 2 - loss: \d\.\d{4}$", capsys.readouterr().out, re.MULTILINE)


def test_numbers_are_shown_and_counts_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    logs = {"loss": 1, "acc": 0.123456, "step": 3, "samples": 7, "batch_size": 2, "name": "x", "many": [1.0]}
    bar = ProgBarLogger()
    bar.set_model(make_model())
    bar.on_eval_end(logs)
    assert capsys.readouterr().out == "Eval samples: 7 - loss: 1.0000 - acc: 0.1235\n"


def test_an_evaluation_without_numbers_has_no_dash(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgBarLogger()
    run = CallbackList([bar], make_model(), {})
    run.end("eval", {"samples": 14})
    assert capsys.readouterr().out == "Eval samples: 14\n"


def test_ones_own_bar_takes_the_place_of_the_usual_one(capsys: pytest.CaptureFixture[str]) -> None:
    make_model().fit(make_data(), batch_size=7, callbacks=ProgBarLogger(log_freq=1, verbose=2))
    assert len(re.findall("^Epoch 1/1$", capsys.readouterr().out, re.MULTILINE)) == 1


@pytest.mark.parametrize("value", [0, -3])
def test_a_frequency_below_one_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match=rf"^log_freq={value}: must be at least 1$"):
        ProgBarLogger(value)


def test_an_unknown_verbosity_is_refused_by_the_callback() -> None:
    with pytest.raises(ValueError, match=r"^verbose=5: must be 0 \(nothing\), 1 \(a bar\) or 2 \(lines\)$"):
        ProgBarLogger(verbose=5)


# On a terminal


class Terminal(io.StringIO):
    """Takes control characters, and says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    return Terminal()


def plain(screen: Terminal) -> str:
    """Return what a screen was sent, without colours and movements of the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", screen.getvalue())


def cursor_is_shown(screen: Terminal) -> bool:
    """Return whether the cursor was put back after it was hidden."""
    return screen.getvalue().rfind("\x1b[?25h") >= screen.getvalue().rfind("\x1b[?25l")


def test_a_terminal_shows_a_bar_which_goes_away(terminal: Terminal) -> None:
    model = make_model(metrics=Accuracy())
    with redirect_stdout(terminal):
        model.fit(make_data(), make_data(), batch_size=4, shuffle=False, verbose=1, log_freq=2)
        model.predict(make_data(), batch_size=4)
    text = plain(terminal)
    assert "training" in text
    assert "evaluating" in text
    assert "predicting" in text
    assert "4/4" in text
    assert "step 2/4" not in text  # no lines beside a bar
    lines = told(text).splitlines()
    assert "Epoch 1/1" in lines[0]
    assert any(re.search(r"4 steps - loss: [\d.]+ - acc: [\d.]+ - T ms/step$", line) for line in lines)
    assert re.search(r"Predicted samples: 14$", text, re.MULTILINE)
    assert cursor_is_shown(terminal)


def test_the_bar_shows_the_numbers_of_the_last_look(terminal: Terminal) -> None:
    lines, _, _ = numbers()
    with redirect_stdout(terminal):
        make_model(metrics=Accuracy()).fit(make_data(), batch_size=4, shuffle=False, verbose=1, log_freq=4)
    assert lines[3] in plain(terminal)
    assert lines[2] not in plain(terminal)


def test_lines_stay_lines_on_a_terminal_with_verbose_2(terminal: Terminal) -> None:
    with redirect_stdout(terminal):
        make_model().fit(make_data(), batch_size=7, verbose=2, log_freq=1)
    assert "\x1b" not in terminal.getvalue()
    assert "step 2/2 - loss" in terminal.getvalue()


@pytest.mark.parametrize("error", [ArithmeticError(), KeyboardInterrupt()])
@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_a_run_that_fails_takes_its_bar_away(call: str, error: BaseException, terminal: Terminal) -> None:
    def broken() -> Iterator[Any]:
        yield from batches_of(make_data(), 4)[:2]
        raise error

    with redirect_stdout(terminal):
        with pytest.raises(type(error)):
            getattr(make_model(), call)(broken(), verbose=1)
        assert sys.stdout is terminal  # rich puts its own in place while a bar is up
    assert "\x1b[?25l" in terminal.getvalue()
    assert cursor_is_shown(terminal)


def test_a_bar_is_used_again(terminal: Terminal) -> None:
    bar, model = ProgBarLogger(1, 1), make_model()
    with redirect_stdout(terminal):
        for _ in range(2):
            model.evaluate(make_data(), batch_size=4, verbose=0, callbacks=bar)
    assert plain(terminal).count("Evaluation\n") == 2


class Bracketed(Metric):
    """A metric of one class."""

    def name(self) -> str:
        return "iou[car]"

    def reset(self) -> None:
        pass

    def update(self, pred: Tensor, label: Tensor) -> None:
        pass

    def accumulate(self) -> float:
        return 0.5


def test_names_with_brackets_are_shown_as_they_are(terminal: Terminal) -> None:
    with redirect_stdout(terminal):
        make_model(metrics=Bracketed()).fit(make_data(), batch_size=7, verbose=1, log_freq=1)
    shown = [line for line in plain(terminal).splitlines() if "training" in line]
    assert any("iou[car]: 0.5000" in line for line in shown)
