import dataclasses
import json
import os
import re

import pytest
from report_runs import info, record, write_run

from mezzo.tipc import RECORDS, RUN, RunFolderError, find_runs, load_run, merge_reports


def test_a_run_is_read_back(tmp_path):
    records = (record("train-1"), record("eval-1", "failed", reason="exit status 1"))
    run = load_run(write_run(tmp_path, records))
    assert (run.info, run.records, run.checks, run.notes) == (info(), records, (), ())


def test_the_last_record_of_a_step_wins_at_the_place_of_the_first(tmp_path):
    records = [record("train-1", "interrupted"), record("eval-1", "skipped"), record("train-1", resumed=True)]
    run = load_run(write_run(tmp_path, records))
    assert [(each.step, each.status) for each in run.records] == [("train-1", "passed"), ("eval-1", "skipped")]


@pytest.mark.parametrize("cut", [1, 20, 40, -1])
def test_a_last_record_that_is_cut_off_is_noted(tmp_path, cut):
    path = write_run(tmp_path, [record("train-1")]) / RECORDS
    path.write_bytes(path.read_bytes() + record("eval-1").line().encode()[:cut])
    run = load_run(tmp_path)
    assert [each.step for each in run.records] == ["train-1"]
    assert run.notes == ("steps.jsonl, line 2: the record is cut off and left out; the runner was killed",)


def test_a_last_record_cut_within_a_character_is_noted(tmp_path):
    path = write_run(tmp_path, []) / RECORDS
    path.write_bytes('{"step": "é'.encode()[:-1])
    assert load_run(tmp_path).notes


def test_a_whole_last_record_needs_no_newline(tmp_path):
    path = write_run(tmp_path, [record("train-1")]) / RECORDS
    path.write_bytes(path.read_bytes().rstrip())
    assert len(load_run(tmp_path).records) == 1
    assert load_run(tmp_path).notes == ()


def changed(**values: object) -> str:
    return json.dumps({**json.loads(record().line()), **values})


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"step": ', "not JSON"),
        ("{}", "step, kind, model, mode, labels, command, status"),
        (changed(status="great"), "'great'"),
        (changed(step=3), "'step' is 3"),
        (changed(labels=[]), "'labels'"),
        (changed(labels={"batch": 1}), "'labels'"),
        (changed(notices=[1]), "'notices'"),
        (changed(code="1"), "'code' is '1'"),
        (changed(seconds="long"), "'seconds' is 'long'"),
        (changed(seconds=float("nan")), "NaN"),
        (changed(seconds=-1), "'seconds' is -1"),
        (changed(seconds=1e300), "'seconds' is 1e+300"),
        (changed(seconds=10**400), "number 1000"),
        ("[" * 200_000, "200 levels"),
        (changed(resumed=3), "'resumed' is 3"),
        (changed(old_verdict=3), "'old_verdict' is 3"),
    ],
)
def test_a_damaged_record_is_named_by_file_and_line(tmp_path, line, fault):
    path = write_run(tmp_path, [record("train-1")]) / RECORDS
    path.write_text(f"{path.read_text()}{line}\n{record('eval-1').line()}\n")
    with pytest.raises(ValueError, match=f"{re.escape(f'{path}, line 2: ')}.*{re.escape(fault)}"):
        load_run(tmp_path)


def test_a_record_that_is_not_utf_8(tmp_path):
    path = write_run(tmp_path, []) / RECORDS
    path.write_bytes(b'{"step": "\xff"}\n')
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 1: not UTF-8: invalid start byte at byte 10")):
        load_run(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON: "),
        ("{}", "a run needs "),
        (info(model=3).text(), "'model' is 3"),
        (info(machine=["x"]).text(), "'machine' is ['x']"),
        (info(versions={"cuda": None}).text(), "'versions' is "),
        (info(result="0").text(), "'result' is '0'"),
        (info().text().replace('"notices": []', '"notices": 3'), "'notices' is 3"),
        (b"\xff", "not UTF-8: invalid start byte at byte 0"),
    ],
)
def test_a_damaged_run_file_is_named(tmp_path, text, message):
    path = write_run(tmp_path, []) / RUN
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")):
        load_run(tmp_path)


@pytest.mark.parametrize("name", [RUN, RECORDS])
def test_a_missing_file_is_named(tmp_path, name):
    path = write_run(tmp_path, []) / name
    path.unlink()
    with pytest.raises(
        ValueError, match=re.escape(f"{path}: missing; a run's directory holds run.json and steps.jsonl")
    ):
        load_run(tmp_path)


@pytest.mark.parametrize("name", [RUN, RECORDS])
def test_what_cannot_be_read_is_named(tmp_path, name):
    path = write_run(tmp_path, []) / name
    path.unlink()
    path.mkdir()
    with pytest.raises(ValueError, match=re.escape(f"{path}: is a folder, not a file")):
        load_run(tmp_path)


def test_checks_of_a_certificate(tmp_path):
    check = {"name": "loss", "passed": True, "measured": 0.123456789, "limit": [1, 2], "text": "close"}
    (write_run(tmp_path, []) / "certificate.json").write_text(json.dumps({"checks": [check, {"name": "gpu"}]}))
    first, second = (dataclasses.astuple(each) for each in load_run(tmp_path).checks)
    assert first == ("loss", True, "0.123457", "[1, 2]", "close")
    assert second == ("gpu", None, "", "", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON: Expecting property name"),
        ("[]", "a certificate needs a list of checks"),
        ('{"checks": [{}]}', "a check needs a name"),
        ('{"checks": [{"name": "x", "passed": 1}]}', "check 'x': passed is 1, neither true, false nor null"),
    ],
)
def test_a_damaged_certificate_is_named(tmp_path, text, message):
    path = write_run(tmp_path, []) / "certificate.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")):
        load_run(tmp_path)


def test_runs_are_found_below_directories_each_once(tmp_path):
    places = [write_run(tmp_path / name, []) for name in ("b/lite", "a/lite", "a")]
    assert find_runs([tmp_path, tmp_path / "a", os.path.relpath(tmp_path)]) == sorted(places)


def test_where_there_is_no_run(tmp_path):
    looked = re.escape(f"{tmp_path}: no run in it; looked for files named steps.jsonl here and in all folders below")
    with pytest.raises(ValueError, match=looked):
        find_runs([tmp_path])
    with pytest.raises(
        ValueError, match=re.escape(f"{tmp_path / 'none'}: no such directory; give directories of runs")
    ):
        find_runs([tmp_path / "none"])
    with pytest.raises(ValueError, match="no directory given; give directories with runs"):
        find_runs([])


def test_a_log_is_found_where_it_was_recorded_and_after_the_directory_has_moved(tmp_path):
    work = tmp_path / "work"
    steps = [
        record("train-1", cwd=str(work), log="out/lite/deep/train.log"),
        record("eval-1", cwd=str(work), log="elsewhere.log"),
        record("export-1", cwd=str(work), log="out/lite/none.log"),
        record("infer-1"),
        record("infer-2", cwd=str(work), log="out/lite/" + "x" * 5000),
    ]
    here = write_run(work / "out" / "lite", steps)
    (here / "deep").mkdir()
    for path in (here / "deep" / "train.log", here / "train.log", work / "elsewhere.log"):
        path.write_text("")
    run = load_run(here)
    expected = [here / "deep" / "train.log", None, None, None, None]
    assert [run.log_of(each) for each in run.records] == expected

    moved = tmp_path / "artefacts" / "lite"
    moved.parent.mkdir()
    (work / "out" / "lite").rename(moved)
    run = load_run(moved)
    assert run.log_of(run.records[0]) == moved / "deep" / "train.log"

    renamed = moved.rename(tmp_path / "other")
    run = load_run(renamed)
    assert run.log_of(run.records[0]) == renamed / "train.log"


def test_a_log_outside_of_the_run_is_not_read(tmp_path):
    secret = tmp_path / "home" / "key"
    secret.parent.mkdir()
    secret.write_text("PRIVATE")
    places = {
        "absolute": ("/", str(secret)),
        "its folder": (str(secret.parent), "key"),
        "upwards": (str(tmp_path / "run"), "../home/key"),
        "link": (str(tmp_path / "run"), "link.log"),
        "below a link": (str(tmp_path / "run"), "folder/key"),
        "pipe": (str(tmp_path / "run"), "pipe.log"),
        "zero": (str(tmp_path / "run"), "a\0b"),
    }
    steps = [record(f"train-{name}", "failed", cwd=cwd, log=log) for name, (cwd, log) in places.items()]
    here = write_run(tmp_path / "run", steps)
    (here / "link.log").symlink_to(secret)
    (here / "folder").symlink_to(secret.parent)
    os.mkfifo(here / "pipe.log")
    run = load_run(here)
    assert [run.log_of(each) for each in run.records] == [None] * len(places)
    junit, page = merge_reports([here], tmp_path / "report")
    for written in (junit.read_text(), page.read_text()):
        assert "PRIVATE" not in written
        assert written.count("is not in the folder of the run") == len(places)
        assert str(secret) in written  # named, not read


@pytest.mark.parametrize("name", [RUN, RECORDS, "certificate.json"])
def test_a_pipe_in_a_run_folder_is_refused_at_once(tmp_path, name):
    write_run(tmp_path, [record("train-1")])
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(RunFolderError, match=f"{name}: is a named pipe"):
        load_run(tmp_path)
