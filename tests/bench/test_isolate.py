"""Calls in processes of their own: results, reports, failures, and the budget."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from mezzo.bench._isolate import IsolatedCall, OverBudget, call_isolated
from mezzo.errors import RunError


def count(last: int, progress: Any) -> tuple[int, int]:
    print("noise")  # must not come out of stdout
    for number in range(last):
        progress("counted", number + 1, last)
    return last, os.getpid()


def sleep(path: str, progress: Any) -> None:
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)


def report_then_sleep(seconds: float, progress: Any) -> str:
    progress("built", 1, 1)
    time.sleep(seconds)
    return "done"


def report_then_write(path: str, progress: Any) -> str:
    progress("built", 1, 1)
    Path(path).write_text("measured")
    return "done"


def fail(progress: Any) -> None:
    raise KeyError("a\nb")


def vanish(progress: Any) -> None:
    os._exit(7)


def test_a_result_comes_from_another_process_with_its_reports(capfd: pytest.CaptureFixture[str]) -> None:
    reports: list[tuple[Any, ...]] = []
    last, process = call_isolated(count, 2, progress=lambda *report: reports.append(report))
    assert last == 2
    assert process != os.getpid()
    assert reports == [("counted", 1, 2), ("counted", 2, 2)]
    assert capfd.readouterr().out == ""


def test_what_sleeps_longer_than_its_budget_is_killed(tmp_path: Path) -> None:
    with pytest.raises(OverBudget, match=r"over the budget of 0\.5 s"):
        call_isolated(sleep, str(tmp_path / "pid"), budget_s=0.5)
    process = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_the_budget_ends_with_the_first_report() -> None:
    assert call_isolated(report_then_sleep, 1.5, budget_s=1.0) == "done"


def test_an_exception_and_a_sudden_end_are_errors_with_a_line() -> None:
    with pytest.raises(RunError, match="KeyError"):
        call_isolated(fail)
    with pytest.raises(RunError, match="the process ended with exit code 7"):
        call_isolated(vanish)


def test_a_held_call_stays_in_its_first_report_until_its_result_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "measured"
    reports: list[tuple[Any, ...]] = []
    with IsolatedCall(report_then_write, str(path), is_held=True) as call:
        call.wait_for_report()
        time.sleep(0.3)
        assert not path.exists()
        assert call.result(lambda *report: reports.append(report)) == "done"
    assert path.read_text() == "measured"
    assert reports == [("built", 1, 1)]


def test_a_held_call_that_fails_or_never_reports_is_an_error() -> None:
    with IsolatedCall(fail, is_held=True) as call, pytest.raises(RunError, match="KeyError"):
        call.wait_for_report()
    with IsolatedCall(os.getpid, is_held=True) as call, pytest.raises(RunError):
        call.wait_for_report()
