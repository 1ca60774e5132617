"""Two runs compared by their history: what broke, what was mended, what became slower, and since when."""

import json
from dataclasses import replace

import pytest
from history_rows import nights, run_row, step_row
from report_runs import REPORT, full_run, record, write_run

from html_page import Page
from mezzo.cli import run as command
from mezzo.tipc.history import HistoryError, compare_runs, write_trend_page
from mezzo.tipc.history._store import add_rows

QUIET = [10.0 + 0.1 * (place % 5) for place in range(20)]


def found(path, before, after):
    comparison = compare_runs(str(before), str(after), path)
    return [(each.what, each.step, each.since and each.since.id) for each in comparison.findings], comparison


def test_what_broke_and_what_was_mended_since_which_commit(tmp_path):
    path = tmp_path / "h.sqlite3"
    statuses = ["passed", "passed", "failed", "skipped", "failed"]
    for number, status in enumerate(statuses):
        run = run_row(number, commit_id=f"{number // 2}" * 40)
        infer = step_row(status=status, reason="exit status 1" if status == "failed" else "")
        export = step_row("export", status="timeout" if number < 4 else "passed", reason="longer than 5 s")
        add_rows(path, run, [infer, export])
    findings, comparison = found(path, 1, 5)
    assert findings == [("broke", "infer-1", 3), ("mended", "export-1", 5)]
    broke, mended = comparison.findings
    assert broke.detail == "failed: exit status 1"
    assert broke.cause == "commit 0000000000 -> 1111111111"
    assert mended.cause == "commit 1111111111 -> 2222222222"
    assert comparison.is_worse
    assert found(path, 1, 2)[0] == []


def test_slower_runs_are_found_with_the_run_that_began_it(tmp_path):
    path = tmp_path / "h.sqlite3"
    nights(path, QUIET)
    for number in range(20, 24):
        add_rows(path, run_row(number, torch="2.12.0"), [step_row(latency_ms=12.0 + 0.01 * number)])
    findings, comparison = found(path, 20, 24)
    assert findings == [("slower", "infer-1", 21)]
    (slower,) = comparison.findings
    assert slower.cause == "torch 2.11.0 -> 2.12.0"
    assert slower.detail.startswith("latency 12.230 ms, +19.9% in time against the median of 20 runs (noise: ")
    assert comparison.is_worse
    assert found(path, 20, 21)[0] == [("maybe slower", "infer-1", 21)]
    assert not found(path, 20, 21)[1].is_worse
    assert found(path, 19, 20)[0] == []
    assert found(path, 24, 20)[0] == findings  # the older run is the one before


def test_faster_and_less_accurate_runs_are_found(tmp_path):
    path = tmp_path / "h.sqlite3"
    for number in range(24):
        late = number >= 20
        step = step_row("train", latency_ms=None, throughput=150.0 if late else 100.0 + number % 3)
        add_rows(path, run_row(number), [replace(step, accuracy=0.5 if late else 0.7, accuracy_name="mIoU")])
    findings, comparison = found(path, 20, 24)
    assert findings == [("less accurate", "train-1", 21), ("faster", "train-1", 21)]
    assert comparison.findings[0].detail.startswith("accuracy mIoU 0.5000, -0.2000 against")
    assert comparison.findings[1].detail.startswith("throughput 150.0 samples/s, -32.7% in time")


@pytest.mark.parametrize(
    "spoil",
    [{"busy": "other processes used 80% of the CPU"}, {"resumed": True}],
)
def test_what_is_no_measurement_is_not_judged(spoil, tmp_path):
    path = tmp_path / "h.sqlite3"
    nights(path, QUIET)
    for number in range(20, 24):
        add_rows(path, run_row(number), [step_row(latency_ms=20.0, **spoil)])
    findings, comparison = found(path, 20, 24)
    assert findings == []
    assert ("the machine was busy in 1 step" in str(comparison.notes)) is ("busy" in spoil)


def test_numbers_that_no_machine_measures_are_left_out(tmp_path):
    path = tmp_path / "h.sqlite3"
    nights(path, [1e-300] * 20)
    for number in range(20, 24):
        add_rows(path, run_row(number), [step_row(latency_ms=1e15)])
    assert found(path, 20, 24)[0] == []


def test_speeds_of_other_machines_are_not_compared(tmp_path):
    path = tmp_path / "h.sqlite3"
    nights(path, QUIET)
    add_rows(path, run_row(30, machine="NVIDIA H200", gpu="NVIDIA H200"), [step_row(latency_ms=1.0)])
    findings, comparison = found(path, 20, 21)
    assert findings == []
    assert "the machines differ" in comparison.notes[0]


def test_too_few_runs_are_told(tmp_path):
    path = tmp_path / "h.sqlite3"
    nights(path, [10.0, 20.0])
    findings, comparison = found(path, 1, 2)
    assert findings == []
    assert "1 step without 10 earlier measurements" in comparison.notes[0]


def test_steps_that_are_gone_new_or_no_longer_run(tmp_path):
    path = tmp_path / "h.sqlite3"
    add_rows(path, run_row(0), [step_row("eval"), step_row("export")])
    add_rows(path, run_row(1), [step_row("export", status="skipped", reason="no GPU"), step_row("infer")])
    findings, _ = found(path, 1, 2)
    assert findings == [("not run", "export-1", None), ("gone", "eval-1", None), ("new", "infer-1", None)]


def test_folders_are_compared_with_and_without_a_history(tmp_path, capsys):
    path = tmp_path / "h.sqlite3"
    first = full_run(tmp_path / "one")
    second = full_run(tmp_path / "two")
    text = (second / "run.json").read_text().replace("2024-01-01T00:00:00", "2024-01-02T00:00:00")
    (second / "run.json").write_text(text)
    lines = (second / "steps.jsonl").read_text().replace('"status": "failed"', '"status": "passed"')
    (second / "steps.jsonl").write_text(lines)
    findings, _ = found(path, first, second)
    assert ("mended", "infer-3") in [each[:2] for each in findings]
    assert not path.exists()
    assert command(["tipc", "history", "--add", str(tmp_path), "--history", str(path), "--step", "infer"]) == 0
    assert "infer-3" in capsys.readouterr().out
    assert found(path, first, second)[1].before.id == 1  # known by the history now
    assert found(path, 1, second)[0] == found(path, first, 2)[0]
    assert command(["tipc", "compare", "2", str(first), "--json", "--history", str(path)]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["is_worse"] is False
    assert content["before"]["id"] == 1


def test_the_exit_status_says_whether_it_is_worse(tmp_path, capsys):
    path = tmp_path / "h.sqlite3"
    add_rows(path, run_row(0), [step_row()])
    add_rows(path, run_row(1, mezzo="0.3.0"), [step_row(status="failed", reason="exit status 1")])
    assert command(["tipc", "compare", "1", "2", "--history", str(path)]) == 1
    said = capsys.readouterr().out
    assert "| broke" in said
    assert "mezzo 0.2.0 -> 0.3.0" in said
    add_rows(path, run_row(2, mezzo="0.3.0"), [step_row(status="failed", reason="exit status 1")])
    assert command(["tipc", "compare", "2", "3", "--history", str(path)]) == 0
    assert "No difference beyond noise in 1 step." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("1", "99"), "no run 99; it has the runs 1 to 2"),
        (("1", "nowhere"), "neither a folder nor the id of a run"),
        (("1", "1"), "are the same run"),
        (("1", "2"), "of different networks"),
        (("1", "99999999999999999999999999"), "no run"),
    ],
)
def test_bad_input_is_one_line(words, said, tmp_path, capsys):
    path = tmp_path / "h.sqlite3"
    add_rows(path, run_row(0), [step_row()])
    add_rows(path, run_row(1, network="other"), [step_row(network="other")])
    assert command(["tipc", "compare", *words, "--history", str(path)]) == 2
    found = capsys.readouterr().err
    assert said in found
    assert found.count("\n") == 1


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"run\.json"):
        compare_runs(str(tmp_path), str(tmp_path), tmp_path / "h.sqlite3")
    folder = write_run(tmp_path / "run", [record("infer-1", log="a.log")], {"a.log": REPORT}, start="yesterday")
    with pytest.raises(ValueError, match="'yesterday' is not a time"):
        compare_runs(str(folder), str(folder), tmp_path / "h.sqlite3")
    with pytest.raises(HistoryError):
        compare_runs("1", "2", tmp_path / "h.sqlite3")


@pytest.mark.parametrize(
    ("statuses", "what", "broken_since"),
    [
        (["passed", "passed", "interrupted"], [("not run", "infer-1", None)], None),
        (["interrupted", "interrupted", "passed"], [], None),
        (["passed", "failed", "interrupted"], [("not run", "infer-1", None)], 2),
        (["passed", "interrupted", "failed"], [("broke", "infer-1", 3)], 3),
    ],
)
def test_a_step_that_was_interrupted_has_no_verdict(statuses, what, broken_since, tmp_path):
    path = tmp_path / "h.sqlite3"
    for number, status in enumerate(statuses):
        add_rows(path, run_row(number), [step_row(status=status, reason="why")])
    assert found(path, 1, 3)[0] == what
    rows = Page(write_trend_page(path, tmp_path / "t.html").read_text())
    broken = [] if broken_since is None else [f"run {broken_since}"]
    assert [
        word for word in (f"run {number}" for number in (1, 2, 3)) if word in rows.texts.get("broken", "")
    ] == broken
