"""Jobs of a cluster without a cluster: what a worker does, and how steps become arrays."""

import json
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from tipc_plans import plan_of, step

from mezzo.errors import RunError
from mezzo.tipc import LineProgress, MachineInfo, RunnerOptions, load_run
from mezzo.tipc._executor import StepJob
from mezzo.tipc._job_folder import JobFolder, JobOptions
from mezzo.tipc._on_slurm import SlurmExecutor
from mezzo.tipc._record import append_line
from mezzo.tipc._runner import PlanRun, RunRequest, open_run
from mezzo.tipc._stop_request import StopRequest
from mezzo.tipc._worker import MAX_ATTEMPTS, run_job


def folder_of(root, plan, **options):
    hashes = {"config": "c", "code": "d"}
    return JobFolder.create(root / "run", plan, JobOptions(str(root), str(root / "run"), hashes, **options))


def request_of(root, plan, number=0, **options):
    return RunRequest(
        plan=plan,
        root=root,
        folder=root / f"run{number}",
        config=Path("c.txt"),
        config_text="text",
        machine=MachineInfo(0, 4),
        options=RunnerOptions(**options),
    )


def test_a_job_runs_once_however_often_it_is_started(tmp_path):
    plan = plan_of(step("train-1", "echo one >> ran"), step("infer-1", "echo two >> ran", needs=["train-1"]))
    jobs = folder_of(tmp_path, plan)
    first = run_job(str(jobs.path), 0, [])
    assert first.status == "passed"
    assert first.host
    assert run_job(str(jobs.path), 0, []) == first
    assert run_job(str(jobs.path), 1, [first]).status == "passed"
    assert (tmp_path / "ran").read_text() == "one\ntwo\n"


def test_a_job_whose_need_failed_is_skipped_unless_the_run_keeps_going(tmp_path):
    plan = plan_of(step("train-1", "exit 3"), step("infer-1", "echo on", needs=["train-1"]))
    jobs = folder_of(tmp_path, plan)
    failed = run_job(str(jobs.path), 0, [])
    skipped = run_job(str(jobs.path), 1, [failed])
    assert (skipped.status, skipped.reason, skipped.start) == ("skipped", "train-1 failed", "")
    going = folder_of(tmp_path, plan, keep_going=True)
    assert run_job(str(going.path), 1, [failed]).status == "passed"


def test_a_job_uses_the_cards_that_the_cluster_has_granted(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,7")
    plan = plan_of(step("train-1", "echo $CUDA_VISIBLE_DEVICES", env={"CUDA_VISIBLE_DEVICES": "0,1"}))
    record = run_job(str(folder_of(tmp_path, plan).path), 0, [])
    assert (tmp_path / "out/train-1.log").read_text() == "5,6\n"
    assert record.env == {"CUDA_VISIBLE_DEVICES": "0,1"}, "the record has the plan's own, which resuming compares"


def test_a_job_has_the_environment_of_the_runner_and_the_cards_of_its_worker(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # as Ray sets it
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    plan = plan_of(step("train-1", 'echo "${OMP_NUM_THREADS-none} $CUDA_VISIBLE_DEVICES $OF_RUNNER"'))
    runner = {"PATH": "/usr/bin:/bin", "OF_RUNNER": "yes", "CUDA_VISIBLE_DEVICES": "0"}
    assert run_job(str(folder_of(tmp_path, plan).path), 0, [], env=runner).status == "passed"
    assert (tmp_path / "out/train-1.log").read_text() == "none 5 yes\n"


def test_a_job_is_tried_three_times(tmp_path):
    jobs = folder_of(tmp_path, plan_of(step("train-1", "touch ran")))
    for attempt in range(MAX_ATTEMPTS):
        assert jobs.note_start(0, "2026-11-18T12:00:00+00:00") == attempt + 1
    record = run_job(str(jobs.path), 0, [])
    assert (record.status, record.reason) == ("failed", "its worker was lost 3 times")
    assert not (tmp_path / "ran").exists()


def test_a_job_ends_when_its_run_is_given_up_and_leaves_no_record(tmp_path):
    jobs = folder_of(tmp_path, plan_of(step("train-1", "sleep 621")))

    def stop():
        if jobs.is_valid:
            jobs.retire()
        return ""

    start = time.monotonic()
    assert run_job(str(jobs.path), 0, [], stop) is None
    assert time.monotonic() - start < 8
    assert not list((tmp_path / "run/jobs").rglob("*.record.json"))
    with pytest.raises(RunError, match="given up"):
        run_job(str(jobs.path), 0, [])


def test_a_step_that_the_cluster_ends_together_with_its_worker_is_no_failure(tmp_path):
    """Slurm sends SIGTERM to all processes of a job; the command may end before the worker has seen its own signal."""
    jobs = folder_of(tmp_path, plan_of(step("train-1", "kill -TERM $$"), step("train-2", "kill -TERM $$")))
    end = time.monotonic() + 0.3
    assert run_job(str(jobs.path), 0, [], lambda: "interrupted by SIGTERM" if time.monotonic() > end else "") is None
    assert run_job(str(jobs.path), 1, []).reason == "ended by SIGTERM"


def test_records_that_workers_left_after_their_runner_was_killed_are_taken_over(tmp_path):
    plan = plan_of(step("train-1", "echo one >> ran"), step("infer-1", "true", needs=["train-1"]))
    stop = StopRequest(None)
    request = request_of(tmp_path, plan, resume=True)
    with open_run(request, LineProgress(lambda line: None), stop) as run:
        hashes = run.runner.hashes
        jobs = JobFolder.create(request.folder, plan, JobOptions(str(tmp_path), str(request.folder), hashes))
        record = run_job(str(jobs.path), 0, [])  # and the runner is killed
    assert load_run(request.folder).records == ()
    with open_run(request, LineProgress(lambda line: None), stop) as run:
        assert not jobs.is_valid, "its other workers end"
        assert run.earlier == {record.hashes["command"]: record}


def test_processes_of_a_killed_worker_are_ended_by_its_watcher(tmp_path):
    script = """
        import os, subprocess, time
        from mezzo.tipc._marks import guard_this_process
        guard_this_process()
        child = subprocess.Popen(["sleep", "622"], start_new_session=True)
        with open("part", "w") as file:
            file.write(str(child.pid))
        os.rename("part", "begun")
        time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], cwd=tmp_path) as worker:
        try:
            _wait(lambda: (tmp_path / "begun").exists())
            child = int((tmp_path / "begun").read_text())
            assert _is_running(child)
        finally:
            worker.send_signal(signal.SIGKILL)
    _wait(lambda: not _is_running(child))


def _wait(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def _is_running(pid):
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def test_a_disk_that_becomes_full_within_a_line_leaves_no_part_of_it(tmp_path):
    path = tmp_path / "steps.jsonl"
    append_line(path, "x" * 59)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(RunError, match="cannot be written"):
            append_line(path, "y" * 59)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    append_line(path, "z")
    assert path.read_text() == "x" * 59 + "\nz\n"


def test_steps_of_many_runs_become_few_arrays(tmp_path):
    plan = plan_of(
        step("train-1", "true"),
        step("export-1", "true", needs=["train-1"]),
        step("infer-1", "true", needs=["export-1"], labels={"device": "cpu", "threads": "2"}),
        step("infer-2", "true", needs=["export-1"], labels={"device": "cpu", "threads": "2"}),
        step("infer-3", "true", needs=["export-1"], env={"CUDA_VISIBLE_DEVICES": "0,1"}),
    )
    executor = SlurmExecutor(tmp_path, cores=4, memory_mb=512, max_tasks=3)
    jobs = []
    for number in range(5):
        request = request_of(tmp_path, plan, number, step_limit=100.0)
        run = PlanRun(request, LineProgress(), StopRequest(None), {})
        jobs += [StepJob(run, each, each.needs) for each in plan.steps]
    commands = executor.preview(jobs)
    assert len(commands) == 10, "five steps, in two lots of at most three runs"
    found = [dict(word.lstrip("-").split("=", 1) for word in command.split() if "=" in word) for command in commands]
    assert [each["array"] for each in found] == ["0-2"] * 5 + ["0-1"] * 5
    assert [each["cpus-per-task"] for each in found[:5]] == ["4", "4", "2", "2", "1"]
    assert found[4]["gres"] == "gpu:2"
    assert [each.get("dependency") for each in found[:5]] == [None, "aftercorr:1", *["aftercorr:2"] * 3]
    assert found[6]["dependency"] == "aftercorr:6"
    assert {each["mem"] for each in found} == {"512M"}
    assert {each["time"] for each in found} == {"4"}, "our own limit is shorter than Slurm's"


def test_a_damaged_record_names_its_file(tmp_path):
    jobs = folder_of(tmp_path, plan_of(step("train-1", "true")))
    (jobs.path / "000.record.json").write_text(json.dumps({"step": 1}))
    with pytest.raises(ValueError, match=r"000\.record\.json"):
        jobs.record(0)


def test_only_folders_of_jobs_are_retired_and_removed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "papers").mkdir(parents=True)
    (elsewhere / "note.txt").write_text("mine")
    (tmp_path / "run0").mkdir()
    (tmp_path / "run0/jobs").symlink_to(elsewhere)
    with open_run(request_of(tmp_path, plan_of(step("train-1", "true"))), LineProgress(), StopRequest(None)):
        pass
    assert sorted(path.name for path in elsewhere.iterdir()) == ["note.txt", "papers"]
    (tmp_path / "run1/jobs").mkdir(parents=True)
    (tmp_path / "run1/jobs/.nfs0001").write_text("left by a network file system")
    with open_run(request_of(tmp_path, plan_of(step("train-1", "true")), 1), LineProgress(), StopRequest(None)):
        assert not (tmp_path / "run1/jobs").exists()
