import itertools
import time

import pytest
import torch

from mezzo.record import Timing, drift_note, time_calls, unsteady_note

CPU = torch.device("cpu")


def test_warmup_calls_run_but_are_not_timed(monkeypatch):
    # the clock is read twice a call: calls last 1, 2, 3, ... seconds
    readings = itertools.chain.from_iterable((0.0, float(length)) for length in itertools.count(1))
    monkeypatch.setattr(time, "perf_counter", lambda: next(readings))
    calls, after = [], []
    timing = time_calls(
        lambda: calls.append(1), calls=3, warmup_calls=2, device=CPU, after_call=lambda: after.append(len(calls))
    )
    assert timing.times_s == (3.0, 4.0, 5.0)
    assert len(calls) == 5
    assert after == [1, 2, 3, 4, 5]


def test_cuda_is_waited_for_before_and_after_each_call(monkeypatch):
    events = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append("wait"))
    time_calls(lambda: events.append("call"), calls=2, warmup_calls=0, device=torch.device("cuda"))
    assert events == ["wait", "call", "wait"] * 2


def test_median_ignores_one_disturbed_call():
    assert Timing((1.0, 1.0, 100.0)).median_s == 1.0
    assert Timing((1.0, 2.0, 3.0, 4.0, 5.0)).spread_s == 3.0  # quartiles 1.5 and 4.5, exclusive method
    assert Timing((1.0,)).spread_s == 0.0


def test_unsteady_times_are_called_unreliable():
    steady, busy = Timing((1.0, 1.0, 1.01, 1.0)), Timing((0.04, 0.4, 0.05, 0.7))
    note = unsteady_note({"float32": steady, "AMP-O1": busy})
    assert note.startswith("The step times of AMP-O1 vary by more than 25%")
    assert unsteady_note({"float32": steady, "AMP-O2": steady}) == ""


@pytest.mark.parametrize(("again_s", "note"), [(1.2, ""), (0.81, ""), (3.0, "3.0x apart"), (0.5, "2.0x apart")])
def test_a_machine_that_became_slower_or_faster_is_told(again_s, note):
    said = drift_note("float32", Timing((1.0, 1.0)), Timing((again_s,)))
    assert note in said
    assert bool(said) == bool(note)


def test_no_calls_are_an_error():
    with pytest.raises(ValueError, match="calls=0: must be at least 1"):
        time_calls(lambda: None, calls=0, warmup_calls=1, device=CPU)
