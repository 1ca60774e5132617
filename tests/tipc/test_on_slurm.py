"""Runs on a real Slurm of one node; `make test-slurm` starts it (tools/slurm_here.py)."""

import os
import shutil
import signal
import subprocess

import cluster_cases
import pytest
from synthetic import (
    NUM_STEPS,
    end_started,
    give_orders,
    matrix,
    run_matrix,
    sleepers,
    statuses,
    times_run,
    wait_for,
    write_networks,
)

pytestmark = pytest.mark.cluster
ON = ("--on", "slurm")


@pytest.fixture(autouse=True)
def _slurm():
    if "SLURM_CONF" not in os.environ or shutil.which("sbatch") is None:
        pytest.skip("no Slurm here: run `make test-slurm`")
    yield
    end_started()


def slurm(*words):
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def test_the_steps_of_all_networks_end_as_on_this_machine_and_run_once(tmp_path):
    there = cluster_cases.same_as_here(tmp_path, ON)
    assert not list(there.glob("test_tipc/output/mezzo-*")), "tables and outputs of jobs are removed"
    assert slurm("squeue", "-h") == ""


def test_our_own_time_limit_holds_inside_a_job(tmp_path):
    cluster_cases.our_time_limit(tmp_path, ON)


def test_slurms_time_limit_is_a_timeout_and_what_needs_the_step_is_skipped(tmp_path):
    write_networks(tmp_path, 2)
    give_orders(tmp_path, {"net000 train": "sleep 702"})
    status, output = run_matrix(tmp_path, *ON, env={"SBATCH_PARTITION": "minute"})
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
    status, output = run_matrix(tmp_path, *ON, "--step-memory", "200M")
    assert status == 1, output
    found = statuses(tmp_path, "net000")
    assert found["train-1"][0] == "failed"
    assert found["train-1"][1].startswith("Slurm ended it: it used more memory than the job has")
    assert found["export-1"] == ("skipped", "train-1 failed")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_runner_that_is_ended_is_resumed_and_repeats_nothing_that_passed(tmp_path, number):
    def check_ended():
        if number == signal.SIGINT:  # a killed runner cannot cancel its jobs; the next one does
            assert slurm("squeue", "-h") == "", "its jobs are cancelled"
            assert not sleepers("703")

    cluster_cases.ended_and_resumed(tmp_path, ON, number, check_ended)
    assert slurm("squeue", "-h") == ""


def _is_idle_again(node):
    """Ask Slurm to use a node again; it does so by itself when the node answers."""
    subprocess.run(["scontrol", "update", f"nodename={node}", "state=resume"], capture_output=True)
    return "down" not in slurm("sinfo", "-h", "-o", "%T")


def test_steps_of_a_node_that_fails_run_again(tmp_path):
    write_networks(tmp_path, 1)
    give_orders(tmp_path, {"net000 train": "sleep 704"})
    process = matrix(tmp_path, *ON)
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
    process = matrix(tmp_path, *ON)
    wait_for(lambda: times_run(tmp_path)["net000 export"])
    running = slurm("squeue", "-h", "-r", "-t", "RUNNING", "-o", "%i").split()
    slurm("scancel", *running)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert statuses(tmp_path, "net000")["export-1"][0] == "interrupted"
    assert statuses(tmp_path, "net000")["infer-1"] == ("skipped", "export-1 interrupted")
    give_orders(tmp_path, {})
    assert run_matrix(tmp_path, *ON, "--resume")[0] == 0
    assert times_run(tmp_path)["net000 train"] == 1


def test_a_full_disk_is_reported_and_the_run_is_resumed(tmp_path):
    cluster_cases.full_disk(tmp_path, ON)


def test_a_preview_submits_nothing(tmp_path):
    write_networks(tmp_path, 2)
    status, output = run_matrix(tmp_path, *ON, "--dry-run", "--step-limit", "30")
    lines = output.splitlines()
    assert status == 0
    assert len(lines) == NUM_STEPS
    assert all("--array=0-1" in line and "--time=3" in line for line in lines)
    assert "--dependency" not in lines[0]
    assert lines[1].endswith("--dependency=aftercorr:1")
    assert slurm("squeue", "-h") == ""
    assert not (tmp_path / "test_tipc").exists()
