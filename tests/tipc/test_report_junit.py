from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from hypothesis import given
from hypothesis import strategies as st
from report_runs import HOSTILE, full_run, info, record

from mezzo.files import plain
from mezzo.tipc import RecordedRun, junit_xml, load_run


def parsed(*runs: RecordedRun) -> Element:
    return ElementTree.fromstring(junit_xml(runs).encode())


def case(root: Element, name: str) -> Element:
    return next(each for each in root.iter("testcase") if (each.get("name") or "").startswith(name))


def test_a_suite_a_run_with_its_counts(tmp_path):
    root = parsed(load_run(full_run(tmp_path / "a")), load_run(full_run(tmp_path / "b")))
    counts = [
        (each.get("tests"), each.get("failures"), each.get("errors"), each.get("skipped")) for each in [root, *root]
    ]
    assert counts == [("20", "2", "2", "4"), ("10", "1", "1", "2"), ("10", "1", "1", "2")]
    assert root[0].get("name") == "lite lite_train_lite_infer"
    assert root[0].get("timestamp") == "2024-01-01T00:00:00+00:00"
    assert float(root[0].get("time", "")) == sum(float(each.get("time", "")) for each in root[0].iter("testcase"))


def test_a_failure_tells_reason_command_and_the_end_of_its_log(tmp_path):
    root = parsed(load_run(full_run(tmp_path)))
    failed = case(root, "infer-3")
    (failure,) = failed.findall("failure")
    assert (failure.get("message"), failure.get("type")) == ("exit status 1", "failed")
    assert "python3 infer.py --config lite.yml" in (failure.text or "")
    output = failed.findtext("system-out") or ""
    assert output.startswith("$ python3 infer.py")
    assert "Traceback\nRuntimeError: <img src=x onerror=alert(1)> no half" in output


def test_other_verdicts(tmp_path):
    root = parsed(load_run(full_run(tmp_path)))
    assert [each.tag for each in case(root, "train-1")] == ["system-out"]
    assert case(root, "infer-4").find("skipped").get("message") == "no GPU in this machine"
    assert case(root, "infer-2").find("skipped").get("message") == "skipped"
    late = case(root, "export-2").find("error")
    assert (late.get("message"), late.get("type")) == ("longer than 600 s", "timeout")
    stopped = parsed(RecordedRun(directory=tmp_path, info=info(), records=(record("train-1", "interrupted"),)))
    assert case(stopped, "train-1").find("error").get("type") == "interrupted"


def test_notices_and_notes_are_told(tmp_path):
    steps = (record("train-1", notices=("CPU instead of GPU",)),)
    root = parsed(RecordedRun(directory=tmp_path, info=info(notices=("slow disk",)), records=steps, notes=("cut off",)))
    assert "note: CPU instead of GPU" in (case(root, "train-1").findtext("system-out") or "")
    assert root[0].findtext("system-out") == "cut off\nslow disk"


def test_no_run_and_no_step_are_valid(tmp_path):
    assert parsed().get("tests") == "0"
    assert parsed(RecordedRun(directory=tmp_path, info=info(start=""), records=()))[0].get("tests") == "0"


def test_hostile_text_stays_text(tmp_path):
    path = tmp_path / "a.log"
    path.write_bytes(HOSTILE.encode(errors="surrogatepass"))
    step = record(
        "train-1", "failed", reason=HOSTILE, command=HOSTILE, labels={"x": HOSTILE}, cwd=str(tmp_path), log="a.log"
    )
    root = parsed(
        RecordedRun(directory=tmp_path, info=info(model=HOSTILE, versions={HOSTILE: HOSTILE}), records=(step,))
    )
    assert {each.tag for each in root.iter()} <= set(
        "testsuites testsuite properties property testcase failure system-out".split()
    )
    assert case(root, "train-1").find("failure").get("message") == plain(HOSTILE)
    assert "<script>alert(1)</script>" in (case(root, "train-1").findtext("system-out") or "")


TEXT = st.text(st.characters(codec=None))  # surrogates, too


@given(reason=TEXT, command=TEXT, name=TEXT, notice=TEXT, status=st.sampled_from(["failed", "skipped", "timeout"]))
def test_any_text_makes_xml_that_parses_and_says_the_same(reason, command, name, notice, status):
    step = replace(record(), status=status, reason=reason, command=command, labels={name: name}, notices=(notice,))
    run = RecordedRun(directory=Path("none"), info=info(model=name, start=name), records=(step,), notes=(notice,))
    root = parsed(run)
    verdict = root.find("testsuite/testcase")[0]
    assert verdict.get("message") == plain(reason or status)
    assert root[0].get("name") == plain(f"{name} lite_train_lite_infer")
