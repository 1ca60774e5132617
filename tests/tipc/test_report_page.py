import json
import os
import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_runs import HOSTILE, full_run, info, losses, record, write_run

from html_page import Page
from mezzo.errors import MezzoError
from mezzo.tipc import RecordedRun, load_run, merge_reports, page_text, write_reports


def page_of(*runs: RecordedRun, path: Path = Path("report.html")) -> Page:
    return Page(page_text(runs, path))


def run_of(*records, directory: Path = Path("none"), **values) -> RecordedRun:
    return RecordedRun(directory=directory, info=info(**values), records=records)


@pytest.fixture
def page(tmp_path) -> Page:
    return page_of(load_run(full_run(tmp_path / "run")), path=tmp_path / "report.html")


def words(text: str) -> str:
    return " ".join(text.split())


def test_headline_counts_and_judges(page):
    assert words(page.texts["verdict"]) == "Failed: 1 failed, 1 timeout, 6 passed, 2 skipped, 10 steps in all"
    assert "verdict failed" in [values.get("class") for _, values in page.elements]


def test_failures_come_first_with_anchors_and_reasons(page):
    names = [values["id"] for values in page.all("section")]
    assert names[0] == "failures"
    told = words(page.texts["failures"])
    assert "infer-3 device cpu, batch 1, threads 6, precision fp16: exit status 1" in told
    assert "export-2 devices 0,1, trainer norm_train: longer than 600 s" in told


def test_matrix_has_a_row_a_training_and_a_column_a_stage(page):
    text = words(page.texts["matrix"])
    columns = "model, mode, training prepare train eval export CPU infer fp32 CPU infer fp16 GPU infer fp32"
    assert words(columns) in re.sub(r"(?<=[a-z0-9])(?=(?:prepare|train|eval|export|CPU|GPU))", " ", text)
    assert text.count("trainer amp_train") == 1
    assert text.count("trainer norm_train") == 1
    assert "✓ 1 passed, 1 skipped" in text
    assert "✗ failed exit status 1" in text
    assert "○ skipped no GPU in this machine" in text
    assert "! timeout longer than 600 s" in text


def test_every_link_of_the_page_has_its_target(page):
    ids = {values["id"] for _, values in page.elements if "id" in values}
    inner = [values["href"] for values in page.all("a") if values["href"].startswith("#")]
    assert len(inner) > 20
    assert {each[1:] for each in inner} <= ids


def test_links_lead_to_the_logs(page, tmp_path):
    links = [values["href"] for values in page.all("a", **{"class": "log"})]
    assert len(links) == 7
    assert all((tmp_path / unquote(each)).is_file() for each in links)


def test_details_of_a_step_tell_command_environment_times_and_the_end_of_the_log(page):
    text = words(page.texts["run1-step7"])
    for part in ("exit status 1", "python3 infer.py --config lite.yml", "OMP_NUM_THREADS=6", "needs", "export-1"):
        assert part in text
    assert "(verdict of the shell script: passed)" in text
    assert "RuntimeError: <img src=x onerror=alert(1)> no half on this CPU" in text
    assert "two CPU processes take the place of GPUs 0,1" in page.texts["run1-step9"]
    assert "hash of config c0ffee" in words(page.texts["run1-step2"]).replace("configc0ffee", "config c0ffee")


def test_tables_of_the_documents(page):
    text = words(page.texts["support"])
    assert "mixed precision ✓ passed" in text
    assert "full precision ✓ passed two CPU processes take the place of GPUs 0,1" in text
    assert "many machines" not in text
    assert "fp16 ✗ failed" in text
    assert re.search(r"no GPU in this machine\D*1$", text), "batch size 1 passed, 2 did not"


def test_several_machines_have_a_column_of_their_own():
    labels = {"devices": "192.168.0.1,192.168.0.2;0,1", "trainer": "pact_train"}
    text = words(page_of(run_of(record("train-1", labels=labels))).texts["support"])
    assert "many machines" in text
    assert text.endswith("pact_train ✓ passed")


def test_loss_of_amp_is_drawn_against_fp32_and_bad_values_are_told(page):
    text = words(page.texts["loss"])
    assert "lite: AMP against FP32" in text
    assert "AMP: lite lite_train_lite_infer: train-1" in text
    assert "last loss 0.2900, 1 not finite" in text
    assert [values["class"] for values in page.all("polyline")] == ["amp0", "fp320"]


def test_latency_operators_notices_and_versions(page):
    assert "4.000" in page.texts["latency"]
    assert "24.250" in page.texts["latency"]
    assert "75.0 %" in page.texts["operators"]
    assert "two CPU processes take the place of GPUs 0,1" in page.texts["notices"]
    for part in (
        "Made-up 9000",
        "2.11",
        "c0ffee",
        "fp16 with mkldnn: the shell script leaves it out",
        "configs/lite.txt",
    ):
        assert part in page.texts["runs"]
    assert "2 min 10 s" in page.texts["durations"]


def test_certificate_is_shown_and_its_failures_count(tmp_path):
    checks = [
        {"name": "loss", "passed": True, "measured": 0.0125, "limit": 0.05, "text": "close"},
        {"name": "share", "passed": False, "measured": 0.75, "limit": 0.9, "text": "too few products in half"},
        {"name": "gpu", "passed": None, "text": "no GPU"},
    ]
    (write_run(tmp_path, [record()]) / "certificate.json").write_text(json.dumps({"checks": checks}))
    page = page_of(load_run(tmp_path))
    assert words(page.texts["verdict"]) == "Failed: 1 passed, 1 step in all; certificate: 1 of 3 checks failed"
    assert "share: too few products in half" in words(page.texts["failures"])
    assert "not checked" in page.texts["certificate"]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (run_of(record(), result=0), "Passed: 1 passed, 1 step in all"),
        (run_of(record(), result=None), "Not finished: 1 passed, 1 step in all"),
        (run_of(record(), result=2), "Failed: 1 passed, 1 step in all"),
        (run_of(record(status="skipped")), "Skipped: 1 skipped, 1 step in all"),
        (run_of(record(status="interrupted"), result=None), "Failed: 1 interrupted, 1 step in all"),
        (run_of(), "Nothing was run: 0 steps in all"),
    ],
)
def test_verdicts(run, expected):
    assert words(page_of(run).texts["verdict"]) == expected


def test_page_of_no_run_is_a_page():
    assert "Nothing was run" in page_of().texts["verdict"]


def test_nothing_is_loaded_and_only_its_own_script_may_run(page):
    (policy,) = [values["content"] for values in page.all("meta") if "http-equiv" in values]
    assert policy.startswith("default-src 'none'; ")
    assert "script-src 'sha256-" in policy
    assert len(page.all("script")) == 1
    assert not [tag for tag, _ in page.elements if tag in ("link", "img", "iframe", "object", "base", "form")]
    attributes = {name for _, values in page.elements for name in values}
    assert not {name for name in attributes if name.startswith("on") or name in ("src", "srcset", "action")}
    assert not [values for values in page.all("a") if ":" in values["href"]]


def test_a_step_of_a_cluster_names_its_node(tmp_path):
    page = page_of(run_of(record(host="<b>node-7"), record("infer-1")))
    assert "<b>node-7" in page.texts["run1-step1"]
    assert "node" not in page.texts["run1-step2"]


def test_hostile_text_stays_text(tmp_path):
    labels = {"trainer": HOSTILE, "devices": HOSTILE}
    name = 'javascript:alert(1)"><script>.log'
    (tmp_path / name).write_bytes(HOSTILE.encode(errors="surrogatepass"))
    step = record(
        "train-1", "failed", reason=HOSTILE, command=HOSTILE, labels=labels, notices=(HOSTILE,), env={HOSTILE: HOSTILE},
        needs=(HOSTILE,), hashes={HOSTILE: HOSTILE}, cwd=str(tmp_path), log=name, model=HOSTILE, start=HOSTILE, code=1,
    )  # fmt: skip
    infer = replace(
        step, step="infer-1", kind="infer", labels={"device": HOSTILE, "precision": HOSTILE, "batch": HOSTILE}
    )
    texts = {"machine": {HOSTILE: HOSTILE}, "skipped_combinations": (HOSTILE,), "config": HOSTILE, "mode": HOSTILE}
    page = page_of(run_of(step, infer, directory=tmp_path, model=HOSTILE, **texts), path=tmp_path / "report.html")
    assert len(page.all("script")) == 1
    assert not [values for values in page.all("a") if ":" in values["href"]]
    assert "<script>alert(1)</script>" in page.texts["run1-step1"]
    assert "${{ 7 * 7 }} {% raw %}" in page.texts["run1-step1"]
    assert "\x1b" not in page.texts["run1-step1"]
    assert (tmp_path / unquote(page.all("a", **{"class": "log"})[0]["href"])).is_file()


@settings(max_examples=25)
@given(st.text(st.characters(codec=None)))
def test_any_text_makes_a_page_that_nests_and_can_be_written(text):
    step = record("train-1", "failed", reason=text, command=text, labels={"trainer": text}, notices=(text,), model=text)
    whole = page_text([run_of(step, model=text, machine={text: text})], Path("report.html"))
    assert len(Page(whole).all("script")) == 1
    whole.encode()


def test_many_runs_make_one_page(tmp_path):
    for name in ("a", "b"):
        full_run(tmp_path / name)
    assert merge_reports([tmp_path / "a", tmp_path], tmp_path / "all") == (
        tmp_path / "all" / "report.xml",
        tmp_path / "all" / "report.html",
    )
    page = Page((tmp_path / "all" / "report.html").read_text())
    assert "Failed: 2 failed, 2 timeout" in words(page.texts["verdict"])
    links = [values["href"] for values in page.all("a", **{"class": "log"})]
    assert len(links) == 14
    assert all((tmp_path / "all" / unquote(each)).is_file() for each in links)
    assert page.texts["matrix"].count("trainer amp_train") == 2


def test_the_page_of_many_runs_may_have_a_name_of_its_own(tmp_path):
    full_run(tmp_path / "a")
    junit, page = merge_reports([tmp_path], tmp_path / "deep" / "nightly.html")
    assert (junit.name, page.name) == ("nightly.xml", "nightly.html")
    assert junit.is_file()
    assert page.is_file()


def test_reports_of_a_run_lie_beside_it(tmp_path):
    directory = full_run(tmp_path / "run")
    assert write_reports(directory) == (directory / "report.xml", directory / "report.html")
    links = [values["href"] for values in Page((directory / "report.html").read_text()).all("a", **{"class": "log"})]
    assert "infer-3.log" in links


def test_links_hold_where_the_page_is_reached_over_a_symbolic_link(tmp_path):
    full_run(tmp_path / "far" / "run")
    os.symlink(tmp_path / "far" / "run", tmp_path / "near")
    write_reports(tmp_path / "near")
    links = [
        each["href"] for each in Page((tmp_path / "near" / "report.html").read_text()).all("a", **{"class": "log"})
    ]
    assert "infer-3.log" in links


def test_inference_without_training_has_a_row_of_its_own_for_each_model():
    steps = [
        record("export-1", labels={"model": "first"}),
        record("infer-1", needs=("export-1",), labels={"device": "cpu", "precision": "fp32"}),
        record("infer-2", labels={"device": "gpu"}),
    ]
    text = words(page_of(run_of(record("prepare-1"), *steps)).texts["matrix"])
    assert "model first" in text
    assert text.count("lite_train_lite_infer") == 2
    assert "GPU infer" in text


def test_charts_of_many_steps_say_what_they_leave_out(tmp_path):
    steps = [record(f"train-{each}", cwd=str(tmp_path), log="a.log") for each in range(42)]
    page = page_of(load_run(write_run(tmp_path, steps, {"a.log": losses(1, 2)})))
    assert "The 40 longest; 2 shorter steps are not drawn." in page.texts["durations"]
    assert "38 more trainings are not drawn." in page.texts["loss"]


def test_a_missing_log_is_told(tmp_path):
    text = words(page_of(run_of(record("train-1", log="gone.log"))).texts["run1-step1"])
    assert text.endswith("gone.log is not in the folder of the run")


def test_missing_jinja2_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MezzoError, match=re.escape("needs jinja2: pip install 'mezzo[report]'")):
        write_reports(full_run(tmp_path))


def test_a_page_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MezzoError, match="cannot be written"):
        merge_reports([full_run(tmp_path / "run")], tmp_path / "file")
