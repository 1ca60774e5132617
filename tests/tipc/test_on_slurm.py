"""Runs on a real Slurm of one node; `make test-slurm` starts it (tools/slurm_here.py)."""

import os
import shutil
import signal
import subprocess

import pytest
from synthetic import (
    NUM_STEPS,
    end,
    end_started,
    give_orders,
    matrix,
    outcome,
    run_matrix,
    sleepers,
    statuses,
    times_run,
    verdicts,
    wait_for,
    write_networks,
)

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def _slurm():
    if "SLURM_CONF" not in os.environ or shutil.which("sbatch") is None:
        pytest.skip("no Slurm here: run `make test-slurm`")
    yield
    end_started()


def slurm(*words):
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def test_the_steps_of_all_networks_end_as_on_this_machine_and_run_once(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    for root in (here, there):
        root.mkdir()
        write_networks(root, 3)
        give_orders(root, {"net001 train": "exit 3", "net002 infer 1 1": "exit 1"})
    assert run_matrix(here)[0] == 1
    status, output = run_matrix(there, "--on", "slurm")
    assert status == 1, output
    assert outcome(there) == outcome(here)
    assert verdicts(there) == verdicts(here)
    assert times_run(there) == times_run(here)
    assert set(times_run(there).values()) == {1}
    assert statuses(there, "net001")["train-1"] == ("failed", "exit status 3: train of net001 in")
    assert statuses(there, "net001")["export-1"] == ("skipped", "train-1 failed")
    assert not list(there.glob("test_tipc/output/mezzo-*")), "tables and outputs of jobs are removed"
    assert not list(there.glob("test_tipc/output/net*/*/net*/jobs"))
    assert slurm("squeue", "-h") == ""


def test_our_own_time_limit_holds_inside_a_job(tmp_path):
    write_networks(tmp_path, 1)
    give_orders(tmp_path, {"net000 train": "sleep 701"})
    status, output = run_matrix(tmp_path, "--on", "slurm", "--step-limit", "2")
    assert status == 1, output
    assert statuses(tmp_path, "net000")["train-1"] == ("timeout", "longer than 2 s")
    assert statuses(tmp_path, "net000")["export-1"] == ("skipped", "train-1 timeout")
    assert not sleepers("701"), "a process in a session of its own has ended, too"


def test_slurms_time_limit_is_a_timeout_and_what_needs_the_step_is_skipped(tmp_path):
    write_networks(tmp_path, 2)
    give_orders(tmp_path, {"net000 train": "sleep 702"})
    status, output = run_matrix(tmp_path, "--on", "slurm", env={"SBATCH_PARTITION": "minute"})
    assert status == 1, output
    found = statuses(tmp_path, "net000")
    assert found["train-1"][0] == "timeout", output
    assert found["train-1"][1].startswith("Slurm ended it at the job's time limit")
    assert found["export-1"] == ("skipped", "train-1 timeout")
    assert {status for status, _ in statuses(tmp_path, "net001").values()} == {"passed"}
    assert not sleepers("702")


def test_more_memory_than_the_step_has_is_a_failure_that_says_so(tmp_path):
    write_networks(tmp_path, 1)
    give_orders(tmp_path, {"net000 train": "memory 600"})
    status, output = run_matrix(tmp_path, "--on", "slurm", "--step-memory", "200M")
    assert status == 1, output
    found = statuses(tmp_path, "net000")
    assert found["train-1"][0] == "failed"
    assert found["train-1"][1].startswith("Slurm ended it: it used more memory than the job has")
    assert found["export-1"] == ("skipped", "train-1 failed")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_runner_that_is_ended_is_resumed_and_repeats_nothing_that_passed(tmp_path, number):
    calm, root = tmp_path / "calm", tmp_path / "root"
    for folder in (calm, root):
        folder.mkdir()
        write_networks(folder, 2)
    assert run_matrix(calm)[0] == 0
    give_orders(root, {"net001 infer 2 1": "sleep 703"})
    process = matrix(root, "--on", "slurm")
    wait_for(lambda: times_run(root)["net001 infer 2 1"])
    status, output = end(process, number)
    assert status == (130 if number == signal.SIGINT else -signal.SIGKILL), output
    if number == signal.SIGINT:
        assert slurm("squeue", "-h") == "", "its jobs are cancelled"
        assert not sleepers("703")
    give_orders(root, {})
    status, output = run_matrix(root, "--on", "slurm", "--resume")
    assert status == 0, output
    assert not sleepers("703")
    assert slurm("squeue", "-h") == ""
    assert outcome(root) == outcome(calm)
    assert verdicts(root) == verdicts(calm)
    again = {name: count for name, count in times_run(root).items() if count > 1}
    assert again == {"net001 infer 2 1": 2}, "only the step that was interrupted ran again"


def _is_idle_again(node):
    """Ask Slurm to use a node again; it does so by itself when the node answers."""
    subprocess.run(["scontrol", "update", f"nodename={node}", "state=resume"], capture_output=True)
    return "down" not in slurm("sinfo", "-h", "-o", "%T")


def test_steps_of_a_node_that_fails_run_again(tmp_path):
    write_networks(tmp_path, 1)
    give_orders(tmp_path, {"net000 train": "sleep 704"})
    process = matrix(tmp_path, "--on", "slurm")
    wait_for(lambda: times_run(tmp_path)["net000 train"])
    node = slurm("sinfo", "-h", "-o", "%n").split()[0]
    give_orders(tmp_path, {})
    slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    wait_for(lambda: _is_idle_again(node))
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert times_run(tmp_path)["net000 train"] == 2
    assert sum(times_run(tmp_path).values()) == NUM_STEPS + 1
    assert {status for status, _ in statuses(tmp_path, "net000").values()} == {"passed"}


def test_a_job_that_somebody_cancels_is_interrupted_and_resumed(tmp_path):
    write_networks(tmp_path, 1)
    give_orders(tmp_path, {"net000 export": "sleep 705"})
    process = matrix(tmp_path, "--on", "slurm")
    wait_for(lambda: times_run(tmp_path)["net000 export"])
    running = slurm("squeue", "-h", "-r", "-t", "RUNNING", "-o", "%i").split()
    slurm("scancel", *running)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert statuses(tmp_path, "net000")["export-1"][0] == "interrupted"
    assert statuses(tmp_path, "net000")["infer-1"] == ("skipped", "export-1 interrupted")
    give_orders(tmp_path, {})
    assert run_matrix(tmp_path, "--on", "slurm", "--resume")[0] == 0
    assert times_run(tmp_path)["net000 train"] == 1


def test_a_full_disk_is_reported_and_the_run_is_resumed(tmp_path):
    calm, root = tmp_path / "calm", tmp_path / "root"
    for folder in (calm, root):
        folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(root)], check=True)
    try:
        for folder in (calm, root):
            write_networks(folder, 2)
        assert run_matrix(calm)[0] == 0
        give_orders(root, {"net000 export": "fill"})
        status, output = run_matrix(root, "--on", "slurm")
        assert status == 1, output
        assert "No space left on device" in output
        (root / "fill").unlink()
        give_orders(root, {})
        status, output = run_matrix(root, "--on", "slurm", "--resume")
        assert status == 0, output
        assert outcome(root) == outcome(calm)
        assert verdicts(root) == verdicts(calm)
        assert times_run(root)["net000 train"] == 1
    finally:
        subprocess.run(["umount", str(root)], check=True)


def test_a_preview_submits_nothing(tmp_path):
    write_networks(tmp_path, 2)
    status, output = run_matrix(tmp_path, "--on", "slurm", "--dry-run", "--step-limit", "30")
    lines = output.splitlines()
    assert status == 0
    assert len(lines) == NUM_STEPS
    assert all("--array=0-1" in line and "--time=3" in line for line in lines)
    assert "--dependency" not in lines[0]
    assert lines[1].endswith("--dependency=aftercorr:1")
    assert slurm("squeue", "-h") == ""
    assert not (tmp_path / "test_tipc").exists()
