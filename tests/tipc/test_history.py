"""Runs are added to the history, and listed: `mezzo tipc run`, `matrix` and `history`."""

import csv
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from history_rows import nights, run_row, step_row
from report_runs import REPORT, info, losses, record, write_run
from tipc_plans import MODE, write_repository

from html_page import Page
from mezzo.cli import run as command
from mezzo.tipc import RunInfo
from mezzo.tipc.history import DEFAULT, Filter, add_run, list_steps, write_trend_page
from mezzo.tipc.history._store import add_rows, read_content


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A repository with a text whose commands are small scripts, at one commit."""
    monkeypatch.chdir(tmp_path)
    write_repository(tmp_path)
    (tmp_path / "deploy/python/infer.py").write_text(f"print('''{REPORT}''')")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for words in (["init", "-q"], ["add", "c.txt"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    return tmp_path


RUN = ["tipc", "run", "c.txt", MODE, "--profile", "seg"]


def test_each_run_is_added_with_its_numbers_and_versions(here, capsys):
    assert command(RUN) == 0
    assert "history: run 1 in " in capsys.readouterr().out
    (here / "tools/export.py").write_text("raise SystemExit(4)")
    assert command(RUN) == 1
    content = read_content(here / DEFAULT)
    first, second = content.runs.values()
    assert (first.network, first.mode, first.config, first.verdict, first.result) == ("net", MODE, "c", "passed", 0)
    assert (second.verdict, second.result) == ("failed", 1)
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert first.commit_id == head
    info = RunInfo.parse((Path(first.folder) / "run.json").read_text())
    assert (first.torch, first.mezzo) == (info.versions["torch"], info.versions["mezzo"])
    assert first.code != second.code
    steps = {step.step: step for run, step in list_steps(here / DEFAULT, Filter(), 0)[0] if run.id == 1}
    infer = steps["infer-1"]
    assert (infer.status, infer.latency_ms, infer.throughput) == ("passed", 19.5, pytest.approx(2000 / 19.5))
    assert (infer.series.device, infer.series.precision) == ("cpu", "fp32")
    assert (steps["train-1"].series.precision, steps["train-1"].seconds > 0) == ("O1 fp16", True)


@pytest.mark.parametrize("how", ["option", "variable"])
def test_the_history_can_be_elsewhere_or_off(how, here, monkeypatch, capsys):
    def history(value: str) -> list[str]:
        if how == "option":
            return [*RUN, "--history", value]
        monkeypatch.setenv("MEZZO_HISTORY", value)
        return RUN

    assert command(history("off")) == 0
    assert not (here / DEFAULT).exists()
    elsewhere = here / "new folder" / "nightly.sqlite3"
    assert command(history(str(elsewhere))) == 0
    assert len(read_content(elsewhere).runs) == 1
    assert not (here / DEFAULT).exists()
    assert command(["tipc", "history", "--history", "off"]) == 2
    assert "--history FILE" in capsys.readouterr().err


def test_a_history_that_cannot_be_used_is_said_before_anything_runs(here, capsys):
    (here / DEFAULT).parent.mkdir(parents=True)
    (here / DEFAULT).write_text("mine")
    assert command(RUN) == 2
    assert "not an SQLite file" in capsys.readouterr().err
    assert (here / DEFAULT).read_text() == "mine"
    assert not list(here.rglob("steps.jsonl"))


def test_a_history_that_breaks_during_a_run_does_not_change_its_result(here, capsys):
    script = f"open({str(here / DEFAULT)!r}, 'w').write('broken')"
    (here / "deploy/python/infer.py").write_text(script)
    assert command(RUN) == 0
    said = capsys.readouterr().out
    assert "the run is complete; 'mezzo tipc history --add " in said
    (here / DEFAULT).unlink()
    assert command(["tipc", "history", "--add", "test_tipc/output"]) == 0
    assert "train-1" in capsys.readouterr().out


def test_names_that_are_not_utf_8_are_added_listed_and_filtered(tmp_path, capsys):
    folder = tmp_path / os.fsdecode(b"bad \xff name")
    folder.mkdir()
    hostile = "lone \ud800"
    labels, load = {hostile: hostile}, {"others": "0.9", "load": hostile, "cores": "2"}
    made = record(reason=hostile, labels=labels, load=load, host=hostile)
    (folder / "steps.jsonl").write_text(json.dumps(asdict(made)) + "\n")
    (folder / "run.json").write_text(json.dumps(asdict(info(model=hostile, versions=labels))))
    path = tmp_path / "history.sqlite3"
    assert add_run(path, folder).is_new
    assert command(["tipc", "history", "--history", str(path), "--format", "csv"]) == 0
    assert "bad \\xff name" in capsys.readouterr().out
    assert command(["tipc", "history", "--history", str(path), "--network", "\udcff"]) == 3
    assert write_trend_page(path, tmp_path / "t.html", Filter(network="\udcff")).is_file()


def test_a_matrix_adds_all_its_runs(here, capsys):
    (here / "d.txt").write_text((here / "c.txt").read_text().replace("model_name:net", "model_name:other"))
    command(["tipc", "matrix", "c.txt", "d.txt", "--history", "all.sqlite3"])
    assert [run.network for run in read_content(here / "all.sqlite3").runs.values()] == ["net", "other"]


def test_numbers_come_from_the_logs_of_passed_steps(tmp_path):
    speeds = "\n".join(
        f"[TRAIN] epoch: 1, iter: {n}/5, loss: 0.5, lr: 0.1, ips: {n}0.0 samples/sec" for n in range(1, 6)
    )
    scores = "\n[EVAL] #Images: 4 mIoU: 0.5123 Acc: 0.9 Kappa: 0.1\n"
    steps = [
        record(
            "train-1", log="t.log", command="x.py --precision bf16 --amp_level O2", load={"others": "0.9", "cores": "2"}
        ),
        record("train-2", "failed", log="t.log"),
        record("eval-1", log="e.log"),
        record("infer-1", log="i.log", labels={"device": "GPU", "precision": "FP16"}),
        record("infer-2", log="i.log", labels={"device": "GPU", "precision": "FP16"}),
    ]
    logs = {
        "t.log": losses(0.9, 0.5) + speeds + scores,
        "e.log": "[Eval] top1: 0.25000, top5: 0.75000\n",
        "i.log": REPORT,
    }
    machine = {"GPUs": "Made-up 1, Made-up 1", "processor": "p", "cores": "8"}
    write_run(tmp_path / "run", steps, logs, machine=machine)
    add_run(tmp_path / "h.sqlite3", tmp_path / "run")
    found = {step.step: (run, step) for run, step in list_steps(tmp_path / "h.sqlite3", Filter(), 0)[0]}
    run, train = found["train-1"]
    assert (run.machine, run.gpu) == ("Made-up 1, Made-up 1", "Made-up 1, Made-up 1")
    assert (train.throughput, train.accuracy_name, train.accuracy) == (35.0, "mIoU", 0.5123)
    assert (train.series.device, train.series.precision) == ("gpu", "O2 bf16")
    assert train.busy.startswith("other processes used 90% of the CPU")
    failed = found["train-2"][1]
    assert (failed.status, failed.throughput, failed.accuracy) == ("failed", None, None)
    assert (found["eval-1"][1].accuracy_name, found["eval-1"][1].accuracy) == ("top-1", 0.25)
    assert found["infer-1"][1].series.precision == "fp16"
    assert [found[name][1].series.place for name in ("infer-1", "infer-2")] == [0, 1]  # two steps with the same labels


def filled(tmp_path) -> Path:
    path = tmp_path / "h.sqlite3"
    for number in range(3):
        add_rows(path, run_row(number), [step_row(), step_row("train", latency_ms=None)])
    add_rows(path, run_row(3, network="other", gpu="NVIDIA H200"), [step_row(network="other", reason="=1+1\x1b[31m")])
    return path


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ([], 7),
        (["--network", "net"], 6),
        (["--network", "NET", "--step", "train"], 3),
        (["--step", "infer-1"], 4),
        (["--device", "cpu", "--precision", "fp32"], 7),
        (["--limit", "2"], 2),
        (["--limit", "0"], 7),
    ],
)
def test_the_list_is_filtered_the_newest_first(words, count, tmp_path, capsys):
    path = filled(tmp_path)
    assert command(["tipc", "history", "--history", str(path), "--format", "json", *words]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == count
    assert [row["started"] for row in rows] == sorted((row["started"] for row in rows), reverse=True)


def test_the_forms_of_the_list(tmp_path, capsys):
    path = filled(tmp_path)
    words = ["tipc", "history", "--history", str(path)]
    assert command([*words, "--limit", "1"]) == 0
    head, row, rest = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["run", "started", "network", "step"]
    assert row.split()[:4] == ["4", "2026-01-04", "00:00", "other"]
    assert rest.startswith("6 older steps are not shown")
    assert command([*words, "--format", "csv"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert len(rows) == 7
    assert rows[0]["reason"].startswith("'=1+1")  # no formula for a spreadsheet
    assert "\x1b" not in rows[0]["reason"]
    assert rows[1]["latency_ms"] == "10.0"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--format", "xml"], 2, "table, csv, json"),
        (["--limit", "-1"], 2, "--limit -1"),
        (["--network", "nobody"], 3, "no step of the history"),
        (["--add", "nowhere"], 2, "no such directory"),
    ],
)
def test_bad_options_are_one_line(words, code, said, tmp_path, capsys):
    assert command(["tipc", "history", "--history", str(filled(tmp_path)), *words]) == code
    found = capsys.readouterr().err
    assert said in found
    assert found.count("\n") == 1


def test_the_trend_page_shows_what_is_broken_and_what_became_slower(tmp_path):
    path = tmp_path / "h.sqlite3"
    nights(path, [10.0 + 0.1 * (place % 5) for place in range(20)])
    for number in range(20, 26):
        train = step_row("train", latency_ms=None, status="failed" if number > 22 else "passed", reason="exit status 1")
        add_rows(path, run_row(number, commit_id="b" * 40), [step_row(latency_ms=13.0), train])
    text = write_trend_page(path, tmp_path / "trend.html").read_text()
    page = Page(text)
    broken, changes = page.texts["broken"], page.texts["changes"]
    assert "failed: exit status 1" in broken
    assert "run 24" in broken
    assert "slower" in changes
    assert "commit aaaaaaaaaa -> bbbbbbbbbb" in changes
    assert "run 21" in changes
    assert "latency 13.000 ms, +27.5% in time against the 20 runs before" in changes
    assert page.texts["verdict"].startswith("1 broken, 1 changes")
    assert len([each for each in page.all("tr") if each.get("data-item") == "main"]) == 2


def test_a_step_that_a_network_no_longer_has_is_not_broken(tmp_path):
    path = tmp_path / "h.sqlite3"
    add_rows(path, run_row(0), [step_row("eval", status="failed", reason="exit status 1"), step_row()])
    page = Page(write_trend_page(path, tmp_path / "trend.html").read_text())
    assert "eval-1" in page.texts["broken"]
    add_rows(path, run_row(1), [step_row()])
    page = Page(write_trend_page(path, tmp_path / "trend.html").read_text())
    assert "broken" not in page.texts
    assert "eval-1" in page.texts["steps"]


def test_a_trend_page_of_hostile_names_is_only_text(tmp_path):
    path = tmp_path / "h.sqlite3"
    attack = "<script>alert(1)</script>\"'{{ 7 * 7 }}"
    run = run_row(1, network=attack, machine=attack, commit_id=attack, torch=attack)
    add_rows(path, run, [step_row(network=attack, step=attack, status="failed", reason=attack)])
    page = Page(write_trend_page(path, tmp_path / "trend.html").read_text())
    assert len(page.all("script")) == 1
    assert attack in page.texts["broken"]


def test_the_trend_page_in_a_browser(browser, tmp_path):
    path = tmp_path / "h.sqlite3"
    nights(path, [10.0 + 0.1 * (place % 5) for place in range(20)])
    add_rows(path, run_row(30, network="other"), [step_row(network="other", status="failed", reason="exit status 1")])
    page = write_trend_page(path, tmp_path / "trend.html")
    browser.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
    browser.open(page.as_uri())
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    shown = "document.getElementById('shown').textContent"
    assert browser.evaluate(shown) == "2 of 2 steps shown"
    browser.press("f")
    assert browser.evaluate(shown) == "1 of 2 steps shown"
    browser.press("Escape", "/", *"net")
    assert browser.evaluate(shown) == "1 of 2 steps shown"
    assert browser.requests() == [page.as_uri()]
    assert browser.complaints() == []


def test_reading_a_history_does_not_import_torch(tmp_path):
    path = filled(tmp_path)
    code = (
        "import sys; from mezzo.cli import run;"
        f"codes = [run(['tipc', 'history', '--history', {str(path)!r}, *more]) for more in ([], ['--page', 'trend.html'])];"
        f"codes.append(run(['tipc', 'compare', '1', '2', '--history', {str(path)!r}]));"
        "print(codes, [name for name in ('torch', 'cv2', 'numpy') if name in sys.modules])"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0] []"
    assert time.perf_counter() - start < 10  # a third of a second on an idle machine; torch alone takes one or two
