"""Runs of plans: statuses, followers, limits, faults, signals, resuming."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tipc_plans import plan_of, run_here, step

from mezzo.errors import MezzoError, RunError
from mezzo.tipc import LineProgress, MachineInfo, load_run
from mezzo.tipc._machine import code_hash
from mezzo.tipc._marks import marked
from mezzo.tipc._process import run_command


def test_what_passes_what_fails_and_what_follows(tmp_path):
    plan = plan_of(
        step("train-1", "echo trained; exit 0"),
        step("export-1", "echo broken >&2; exit 7", needs=["train-1"]),
        step("infer-1", "echo never", needs=["export-1"]),
        step("infer-2", "echo never", needs=["infer-1"]),
        step("train-2", "echo other"),
        step("infer-3", "echo gpu", skip="no GPU"),
    )
    result, records, lines = run_here(tmp_path, plan)
    assert result == 1
    assert {name: (record.status, record.reason) for name, record in records.items()} == {
        "train-1": ("passed", ""),
        "export-1": ("failed", "exit status 7: broken"),
        "infer-1": ("skipped", "export-1 failed"),
        "infer-2": ("skipped", "infer-1 skipped"),
        "train-2": ("passed", ""),
        "infer-3": ("skipped", "no GPU"),
    }
    assert (tmp_path / "out/export-1.log").read_text() == "broken\n"
    assert (tmp_path / "out/results_python.log").read_text().splitlines() == [
        "\x1b[33m Run successfully with command - m - echo trained; exit 0 - \x1b[0m",
        "\x1b[33m Run failed with command - m - echo broken >&2; exit 7 - \x1b[0m",
        "\x1b[33m Run successfully with command - m - echo other - \x1b[0m",
    ]
    run = json.loads((tmp_path / "run/run.json").read_text())
    assert run["result"] == 1
    assert run["end"]
    assert records["export-1"].code == 7
    assert records["export-1"].log == "out/export-1.log"
    assert any("FAILED  export-1" in line and "log: out/export-1.log" in line for line in lines)


def test_keep_going_runs_followers_as_the_scripts_did(tmp_path):
    plan = plan_of(step("train-1", "exit 3"), step("infer-1", "echo on", needs=["train-1"]))
    result, records, _ = run_here(tmp_path, plan, keep_going=True)
    assert result == 1
    assert records["infer-1"].status == "passed"


def test_all_passed_and_nothing_to_do(tmp_path):
    assert run_here(tmp_path / "a", plan_of(step("train-1", "true")))[0] == 0
    assert run_here(tmp_path / "b", plan_of(step("infer-1", "true", skip="no GPU")))[0] == 3


def test_environment_and_folder_of_a_step(tmp_path):
    (tmp_path / "deploy").mkdir()
    plan = plan_of(
        step("train-1", 'echo "$CUDA_VISIBLE_DEVICES"; pwd', env={"CUDA_VISIBLE_DEVICES": "3"}, enter=("deploy",)),
        step("train-2", 'echo "${CUDA_VISIBLE_DEVICES-gone}"', env={"CUDA_VISIBLE_DEVICES": None}),
        step("train-3", "true", enter=("nowhere",)),
    )
    _, records, _ = run_here(tmp_path, plan)
    assert (tmp_path / "out/train-1.log").read_text() == f"3\n{tmp_path}/deploy\n"
    assert records["train-1"].env == {"CUDA_VISIBLE_DEVICES": "3"}
    assert (tmp_path / "out/train-2.log").read_text() == "gone\n"
    assert records["train-3"].reason == f"there is no folder {tmp_path}/nowhere"


def test_a_step_that_hangs_is_ended_with_its_children(tmp_path):
    plan = plan_of(step("train-1", "sleep 611 & sleep 612; wait"), step("train-2", "echo next"))
    start = time.monotonic()
    result, records, _ = run_here(tmp_path, plan, step_limit=0.5)
    assert time.monotonic() - start < 8
    assert result == 1
    assert (records["train-1"].status, records["train-1"].reason) == ("timeout", "longer than 0.5 s")
    assert records["train-2"].status == "passed"
    assert not _running("sleep 611")
    assert not _running("sleep 612")


def test_one_that_ignores_the_request_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("mezzo.tipc._process._GRACE", 0.5)
    plan = plan_of(step("train-1", "trap '' TERM; while true; do sleep 0.2; done"))
    _, records, _ = run_here(tmp_path, plan, step_limit=0.5)
    assert records["train-1"].status == "timeout"
    assert not _running("trap '' TERM")


def test_one_that_crashes_names_its_signal(tmp_path):
    _, records, _ = run_here(tmp_path, plan_of(step("train-1", "kill -SEGV $$")))
    assert records["train-1"].reason == "ended by SIGSEGV"


def test_one_that_forks_into_a_session_of_its_own_leaves_nothing(tmp_path):
    """A launcher that starts its workers in new sessions, and ends before them."""
    plan = plan_of(step("train-1", "setsid sleep 613 > /dev/null 2>&1 < /dev/null & disown; echo started"))
    _, records, _ = run_here(tmp_path, plan)
    assert records["train-1"].status == "passed"
    assert records["train-1"].notices == ("left 1 process running, which were ended",)
    time.sleep(0.2)
    assert not _running("sleep 613")


def test_a_process_that_is_just_starting_a_program_is_found(tmp_path, monkeypatch):
    """Between two programs /proc/PID/environ is empty for a moment."""
    flags = {"10": 0x400000, "11": 0x400000, "12": 0x200000}
    for number, flag in flags.items():
        folder = tmp_path / number
        folder.mkdir()
        (folder / "environ").write_bytes(b"")
        (folder / "stat").write_text(f"{number} (a b) S 1 1 1 0 -1 {flag} 0")

    def sleep(seconds):
        if seconds:  # it has started between two looks
            (tmp_path / "10" / "environ").write_bytes(b"A=1\0MEZZO_TIPC_STEP=mine:1\0")

    monkeypatch.setattr("mezzo.tipc._marks._PROC", tmp_path)
    monkeypatch.setattr("mezzo.tipc._marks.time.sleep", sleep)
    assert marked("mine:") == [10]


def test_one_whose_child_keeps_the_output_open_ends_all_the_same(tmp_path):
    start = time.monotonic()
    _, records, _ = run_here(tmp_path, plan_of(step("train-1", "sleep 614 & echo done")))
    assert records["train-1"].status == "passed"
    assert time.monotonic() - start < 4


def test_a_full_disk_for_logs_is_a_failure_that_says_so(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/train-1.log").symlink_to("/dev/full")
    _, records, _ = run_here(tmp_path, plan_of(step("train-1", "for i in $(seq 9999); do echo $i; done")))
    assert records["train-1"].status == "failed"
    assert records["train-1"].reason == "its log could not be written: No space left on device"
    assert records["train-1"].code == 0  # it was not disturbed


def test_a_full_disk_for_the_records_is_said_and_the_run_goes_on(tmp_path, monkeypatch):

    def full(path, line):
        raise RunError(
            f"{path}: cannot be written: No space left on device; check space and permissions, then try again"
        )

    monkeypatch.setattr("mezzo.tipc._runner.append_line", full)
    lines = []
    result, _, _ = run_here(
        tmp_path, plan_of(step("train-1", "true"), step("train-2", "true")), LineProgress(lines.append)
    )
    assert result == 0
    assert sum("No space left on device" in line for line in lines) == 2


def test_the_whole_run_has_a_limit_too(tmp_path):
    plan = plan_of(step("train-1", "sleep 615"), step("train-2", "true"))
    result, records, _ = run_here(tmp_path, plan, total_limit=0.5)
    assert result == 1
    assert records["train-1"].status == "interrupted"
    assert records["train-2"].reason == records["train-1"].reason == "the run's 0.5 s are over"


def test_independent_steps_run_side_by_side_and_status_lines_keep_their_order(tmp_path):
    """Each waits until the other has begun: they only end if they run together."""
    meet = "touch {0}; for i in $(seq 200); do [ -e {1} ] && exit 0; sleep 0.02; done; exit 1"
    labels = {"device": "cpu", "threads": "1"}
    plan = plan_of(
        step("train-1", "true"),
        step("infer-1", meet.format("a", "b") + "; sleep 0.3", needs=["train-1"], labels=labels),
        step("infer-2", meet.format("b", "a"), needs=["train-1"], labels=labels),
    )
    result, _, _ = run_here(tmp_path, plan, jobs=2)
    assert result == 0
    lines = (tmp_path / "out/results_python.log").read_text().splitlines()
    assert ["touch a" in lines[1], "touch b" in lines[2]] == [True, True]


def test_steps_on_one_card_take_turns(tmp_path):
    alone = "mkdir busy || exit 9; sleep 0.2; rmdir busy"
    plan = plan_of(
        *(step(f"infer-{i}", alone, env={"CUDA_VISIBLE_DEVICES": "0"}, labels={"device": "gpu"}) for i in range(3))
    )
    assert run_here(tmp_path, plan, machine=MachineInfo(1, 8, {}, {}), jobs=3)[0] == 0


def test_resuming_skips_what_passed_and_nothing_else(tmp_path):
    count = "echo x >> count-{0}; exit {1}"
    plan = plan_of(step("train-1", count.format(1, 0)), step("train-2", count.format(2, 5)))
    run_here(tmp_path, plan)
    result, records, _ = run_here(tmp_path, plan, resume=True)
    assert result == 1
    assert records["train-1"].resumed
    assert not records["train-2"].resumed
    assert (tmp_path / "count-1").read_text() == "x\n"
    assert (tmp_path / "count-2").read_text() == "x\nx\n"
    (tmp_path / "changed.py").write_text("1")  # the code
    _, records, _ = run_here(tmp_path, plan, resume=True)
    assert not records["train-1"].resumed


def test_resuming_runs_again_what_follows_a_step_that_ran_again(tmp_path):
    """The training's folder is gone: its export is there still, of weights that are not."""
    train = step("train-1", "mkdir -p save; touch save/w", checkpoint="save/w")
    export = step("export-1", "echo x >> exported", needs=["train-1"])
    plan = plan_of(train, export)
    run_here(tmp_path, plan)
    shutil.rmtree(tmp_path / "save")
    _, records, _ = run_here(tmp_path, plan, resume=True)
    assert [record.resumed for record in records.values()] == [False, False]
    assert (tmp_path / "exported").read_text() == "x\nx\n"
    (tmp_path / "out/export-1.log").unlink()
    _, records, _ = run_here(tmp_path, plan, resume=True)
    assert [record.resumed for record in records.values()] == [True, False]


def test_of_an_earlier_record_only_the_outcome_is_taken_over(tmp_path):
    plan = plan_of(step("train-1", "echo one"))
    run_here(tmp_path, plan)
    path = tmp_path / "run/steps.jsonl"
    earlier = json.loads(path.read_text())
    path.write_text(json.dumps({**earlier, "command": "x --save_dir=/", "argv": ["x"], "cwd": "/"}) + "\n")
    _, records, _ = run_here(tmp_path, plan, resume=True)
    found = records["train-1"]
    assert found.resumed
    assert (found.command, found.argv, found.cwd) == ("echo one", ("echo", "one"), str(tmp_path))


def test_a_resumed_run_that_is_ended_loses_nothing_of_the_runs_before(tmp_path):
    """The first run passed all; the second is ended at its first step; the third takes over the rest of the first."""
    begun = plan_of(step("train-1", "sleep 0.1"), step("train-2", "echo x >> two"))
    run_here(tmp_path, begun)
    ended = plan_of(step("train-1", "sleep 9"), step("train-2", "echo x >> two"))
    stopped = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    stopped.start()
    assert run_here(tmp_path, ended, resume=True)[0] == 130
    result, records, _ = run_here(tmp_path, begun, resume=True)
    assert result == 0
    assert [record.resumed for record in records.values()] == [True, True]
    assert (tmp_path / "two").read_text() == "x\n"
    assert not (tmp_path / "run/steps.before.jsonl").exists()


def test_an_export_whose_files_are_gone_is_run_again(tmp_path):
    command = "mkdir -p output/e; touch output/e/deploy.yaml; echo --save_dir output/e"
    plan = replace(plan_of(step("export-1", command)), profile="mezzo")
    run_here(tmp_path, plan)
    assert run_here(tmp_path, plan, resume=True)[1]["export-1"].resumed
    (tmp_path / "output/e/deploy.yaml").unlink()
    assert not run_here(tmp_path, plan, resume=True)[1]["export-1"].resumed


def test_weights_under_the_other_name_are_taken_also_after_resuming(tmp_path):
    train = step("train-1", "mkdir -p s/iter_5; touch s/iter_5/w", checkpoint="./s/best/w", fallback="iter_5/w")
    plan = plan_of(
        train, step("export-1", "test -e ./s/best/w", needs=["train-1"]), step("infer-1", "false", needs=["export-1"])
    )
    _, records, _ = run_here(tmp_path, plan)
    assert records["export-1"].status == "passed"
    assert records["export-1"].command == "test -e ./s/iter_5/w"
    assert "test -e ./s/iter_5/w" in (tmp_path / "out/results_python.log").read_text()
    _, records, _ = run_here(tmp_path, plan, resume=True)
    assert records["export-1"].resumed


def test_a_log_is_found_by_its_documented_name(tmp_path):
    (tmp_path / "known").mkdir()
    (tmp_path / "known/a.log").write_text("of another run")
    run_here(tmp_path, plan_of(step("train-1", "echo new", known_as=("known/a.log",))))
    assert (tmp_path / "known/a.log").is_symlink()
    assert (tmp_path / "known/a.log").read_text() == "new\n"


def test_the_script_s_own_verdict_is_kept_beside_ours(tmp_path):
    plan = plan_of(
        step("train-1", "mkdir s; touch s/train.log; exit 1", judged_by="s/train.log"),
        step("train-2", "true", judged_by="s/none*.log"),
        step("train-3", "true"),
    )
    _, records, _ = run_here(tmp_path, plan)
    assert [(record.status, record.old_verdict) for record in records.values()] == [
        ("failed", True),
        ("passed", False),
        ("passed", None),
    ]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("embedded null byte"), "could not be run: embedded null byte"),
        (OSError(7, "Argument list too long"), "could not be run: Argument list too long"),
        (RuntimeError("a defect"), "the runner itself failed, see its error output"),
    ],
)
def test_whatever_happens_to_a_step_leaves_a_record(error, reason, tmp_path, monkeypatch):
    def broken(*arguments, **options):
        raise error

    monkeypatch.setattr("mezzo.tipc._step_run.run_command", broken)
    result, records, _ = run_here(tmp_path, plan_of(step("train-1", "true")))
    for thread in set(threading.enumerate()) - {threading.current_thread()}:
        if "_work" in thread.name:  # otherwise its exception may be reported in the next test
            thread.join(10)
    assert result == 1
    assert records["train-1"].reason == reason


def test_output_that_nobody_reads_any_more_stops_nothing(tmp_path):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb", buffering=0) as echo:
        ended = run_command("seq 99999", env=dict(os.environ), cwd=tmp_path, log=tmp_path / "log", echo=echo)
    assert ended.code == 0
    assert (tmp_path / "log").read_text().endswith("99999\n")


def test_the_code_s_hash_knows_sources_not_results(tmp_path):
    (tmp_path / "a.py").write_text("1")
    first = code_hash(tmp_path)
    for name in ("output/x.py", "data/x.yml", ".git/x.py", "venv/lib/x.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("2")
    (tmp_path / "venv/pyvenv.cfg").write_text("")
    assert code_hash(tmp_path) == first
    (tmp_path / "b.yml").write_text("3")
    assert code_hash(tmp_path) != first


SCRIPT = """
    import sys
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from tipc_plans import plan_of, run_here, step
    steps = step("train-1", "echo one >> ran"), step("train-2", "touch begun; sleep {seconds}"), step("train-3", "echo 3")
    plan = plan_of(*steps)
    sys.exit(run_here(Path("."), plan, resume={resume})[0])
"""


def _runner(folder, seconds, resume=False):
    text = textwrap.dedent(SCRIPT.format(tests=str(Path(__file__).parent), seconds=seconds, resume=resume))
    return subprocess.Popen([sys.executable, "-c", text], cwd=folder, stdout=subprocess.DEVNULL)


def _wait_for(path):
    for _ in range(500):
        if path.exists():
            return
        time.sleep(0.02)
    pytest.fail(f"{path} never came")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_leaves_a_complete_record_and_no_orphan(number, code, tmp_path):
    process = _runner(tmp_path, 616)
    _wait_for(tmp_path / "begun")
    process.send_signal(number)
    assert process.wait(20) == code
    run = load_run(tmp_path / "run")
    assert [record.status for record in run.records] == ["passed", "interrupted", "skipped"]
    assert run.records[1].reason == f"interrupted by {number.name}"
    assert run.info.result == code
    assert run.info.end
    assert not _running("sleep 616")


def test_a_killed_runner_is_resumed(tmp_path):
    process = _runner(tmp_path, 617)
    _wait_for(tmp_path / "begun")
    process.kill()
    process.wait()
    assert _running("sleep 617")  # nobody could end it: the runner is gone
    with (tmp_path / "run/steps.jsonl").open("a") as file:
        file.write('{"step": "train-2", "ki')  # killed while writing
    assert _runner(tmp_path, 0, resume=True).wait(20) == 0
    assert not _running("sleep 617")  # the next one has
    assert (tmp_path / "ran").read_text() == "one\n"  # not run again
    lines = (tmp_path / "run/steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["resumed"] for line in lines] == [True, False, False]


def test_two_runners_do_not_share_a_folder(tmp_path):
    process = _runner(tmp_path, 618)
    _wait_for(tmp_path / "begun")
    with pytest.raises(RunError, match=r"run: a certification .process \d+ .*wait for its end"):
        run_here(tmp_path, plan_of(step("train-1", "true")))
    process.terminate()
    assert process.wait(60) == 143


def test_a_command_of_another_environment_is_not_taken_for_ours(tmp_path):
    ended = run_command("true", env={"PATH": os.environ["PATH"]}, cwd=tmp_path, log=tmp_path / "log")
    assert ended.code == 0
    assert marked("no such token") == []


def _running(command):
    """Return the processes whose command line holds a text."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if command in line and "pytest" not in line and b") Z " not in (folder / "stat").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def test_the_records_are_complete_if_the_folder_is_removed_during_a_run(tmp_path):
    plan = plan_of(step("train-1", "true"), step("infer-1", "rm -rf run"), step("infer-2", "true"))
    result, records, lines = run_here(tmp_path, plan)
    assert (result, list(records)) == (0, ["train-1", "infer-1", "infer-2"])
    assert [line for line in lines if "steps.jsonl" in line], "and the user is told"


def test_records_of_an_interrupted_resumed_run_may_hold_any_character(tmp_path):
    plan = plan_of(step("train-1", "echo 'a\u2028b\x85c' >> ran"))
    run_here(tmp_path, plan)
    os.replace(tmp_path / "run/steps.jsonl", tmp_path / "run/steps.before.jsonl")
    _, records, _ = run_here(tmp_path, plan, resume=True)
    assert records["train-1"].resumed
    (tmp_path / "run/steps.before.jsonl").write_text("no record\n")
    with pytest.raises(MezzoError, match=r"steps\.before\.jsonl"):
        run_here(tmp_path, plan, resume=True)


def test_a_step_that_prints_without_end_does_not_fill_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("mezzo.tipc._process.MAX_LOG_BYTES", 10_000)
    monkeypatch.setattr("mezzo.tipc._process.TAIL_BYTES", 1000)
    command = "echo first; head -c 100000000 /dev/zero | tr '\\0' x; echo; echo last line"
    ended = run_command(command, env=dict(os.environ), cwd=tmp_path, log=tmp_path / "a.log")
    text = (tmp_path / "a.log").read_text()
    assert (ended.code, ended.log_error) == (0, "")
    assert text.startswith("first\nxxx")
    assert text.endswith("xxx\nlast line\n")
    left_out = int(re.search(r"\n\[\.\.\. (\d+) bytes are left out here \.\.\.\]\n", text)[1])
    assert left_out + len(text) - len(f"\n[... {left_out} bytes are left out here ...]\n") == 100_000_017
    assert len(text) < 12_000
