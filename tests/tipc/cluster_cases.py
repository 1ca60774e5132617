"""What every cluster has to do; the tests of Ray and Slurm call these with the options that choose the cluster."""

import os
import signal
import subprocess
import time

import pytest
from synthetic import (
    end,
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


def prepare_both(tmp_path, orders=None, count=2):
    """Write the same networks into two folders and run those of the first on this machine; return both folders."""
    calm, root = tmp_path / "calm", tmp_path / "root"
    for folder in (calm, root):
        folder.mkdir(exist_ok=True)
        write_networks(folder, count)
        give_orders(folder, orders or {})
    assert run_matrix(calm)[0] == (1 if orders else 0)
    return calm, root


def assert_same_report(root, calm):
    assert outcome(root) == outcome(calm)
    assert verdicts(root) == verdicts(calm)


def same_as_here(tmp_path, on):
    """The steps of all networks end as on this machine, and run once: a failed training is a result."""
    orders = {"net001 train": "exit 3", "net002 infer 1 1": "exit 1"}
    here, there = prepare_both(tmp_path, orders, count=3)
    status, output = run_matrix(there, *on)
    assert status == 1, output
    assert_same_report(there, here)
    assert times_run(there) == times_run(here)
    assert set(times_run(there).values()) == {1}
    assert statuses(there, "net001")["train-1"] == ("failed", "exit status 3: train of net001 in")
    assert statuses(there, "net001")["export-1"] == ("skipped", "train-1 failed")
    assert not list(there.glob("test_tipc/output/net*/*/net*/jobs")), "no jobs are left"
    return there


def our_time_limit(tmp_path, on):
    """Our own time limit holds inside a worker, also for a process in a session of its own."""
    write_networks(tmp_path, 1)
    give_orders(tmp_path, {"net000 train": "sleep 701"})
    status, output = run_matrix(tmp_path, *on, "--step-limit", "2")
    assert status == 1, output
    assert statuses(tmp_path, "net000")["train-1"] == ("timeout", "longer than 2 s")
    assert statuses(tmp_path, "net000")["export-1"] == ("skipped", "train-1 timeout")
    assert not sleepers("701")


def ended_and_resumed(tmp_path, on, number, check_ended):
    """A runner that is ended is resumed and repeats nothing that passed."""
    calm, root = prepare_both(tmp_path)
    give_orders(root, {"net001 infer 2 1": "sleep 703"})
    process = matrix(root, *on)
    wait_for(lambda: times_run(root)["net001 infer 2 1"])
    time.sleep(2)  # steps that have begun end
    status, output = end(process, number)
    assert status == (-signal.SIGKILL if number == signal.SIGKILL else 128 + number), output
    check_ended()
    give_orders(root, {})
    status, output = run_matrix(root, *on, "--resume")
    assert status == 0, output
    assert not sleepers("703")
    assert_same_report(root, calm)
    again = {name: count for name, count in times_run(root).items() if count > 1}
    assert again == {"net001 infer 2 1": 2}, "only the step that was interrupted ran again"


def full_disk(tmp_path, on):
    """A full disk is reported, and the run is resumed when there is space again."""
    if os.getuid() != 0:
        pytest.skip("mounting a small disk needs root")
    small = tmp_path / "root"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(small)], check=True)
    try:
        calm, root = prepare_both(tmp_path)
        give_orders(root, {"net000 export": "fill"})
        status, output = run_matrix(root, *on)
        assert status == 1, output
        assert "No space left on device" in output
        (root / "fill").unlink()
        give_orders(root, {})
        status, output = run_matrix(root, *on, "--resume")
        assert status == 0, output
        assert_same_report(root, calm)
        assert times_run(root)["net000 train"] == 1
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
