"""Runs on a real Ray cluster of two nodes on this machine; `make test-ray` installs Ray."""

import os
import signal
from pathlib import Path

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

pytestmark = [
    pytest.mark.cluster,
    # Ray's own modules warn about themselves, and leave sockets and processes open when a cluster is shut down.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def cluster():
    """A cluster of two nodes of two CPUs; one test may kill a node."""
    pytest.importorskip("ray", reason="no Ray here: run `make test-ray`")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    made.second = made.add_node(num_cpus=2)
    made.wait_for_nodes()
    made.on = ("--on", f"ray://{made.address}")
    yield made
    end_started()
    made.shutdown()


def test_the_steps_of_all_networks_end_as_on_this_machine_and_run_once(tmp_path, cluster):
    cluster_cases.same_as_here(tmp_path, cluster.on)


def test_our_own_time_limit_holds_inside_a_task(tmp_path, cluster):
    cluster_cases.our_time_limit(tmp_path, cluster.on)


def worker_of(command):
    """Return the Ray worker above a process: the first ancestor that Ray has named."""
    pid = command
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        if line.startswith(b"ray::"):
            return pid
    raise AssertionError("no Ray worker above it")


def test_a_worker_that_is_killed_takes_its_step_with_it_and_the_step_runs_again(tmp_path, cluster):
    calm, root = cluster_cases.prepare_both(tmp_path, count=1)
    give_orders(root, {"net000 train": "sleep 802"})
    process = matrix(root, *cluster.on)
    wait_for(lambda: sleepers("802"))
    give_orders(root, {})
    os.kill(worker_of(sleepers("802")[0]), signal.SIGKILL)
    wait_for(lambda: not sleepers("802"), 10)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    cluster_cases.assert_same_report(root, calm)
    assert times_run(root)["net000 train"] == 2
    assert sum(times_run(root).values()) == NUM_STEPS + 1


def test_a_step_that_kills_its_worker_each_time_fails(tmp_path, cluster):
    write_networks(tmp_path, 1)
    give_orders(tmp_path, {"net000 export": "sleep 803"})
    process = matrix(tmp_path, *cluster.on)
    for attempt in (1, 2, 3):
        wait_for(lambda attempt=attempt: times_run(tmp_path)["net000 export"] == attempt and sleepers("803"))
        os.kill(worker_of(sleepers("803")[0]), signal.SIGKILL)
        wait_for(lambda: not sleepers("803"))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert statuses(tmp_path, "net000")["export-1"] == ("failed", "its worker was lost 3 times")
    assert statuses(tmp_path, "net000")["infer-1"] == ("skipped", "export-1 failed")


def test_a_node_killed_in_the_middle_costs_nothing_but_time(tmp_path, cluster):
    calm, root = cluster_cases.prepare_both(tmp_path, count=4)
    # Two trainings, each on all cores of a node: one of them is on the node that is killed.
    give_orders(root, {"net000 train": "sleep 804", "net001 train": "sleep 804"})
    process = matrix(root, *cluster.on)
    wait_for(lambda: len(sleepers("804")) == 2)
    give_orders(root, {})
    cluster.remove_node(cluster.second, allow_graceful=False)
    wait_for(lambda: len(sleepers("804")) == 1, 20)
    os.kill(sleepers("804")[0], signal.SIGKILL)  # the other one goes on
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    cluster_cases.assert_same_report(root, calm)
    again = {name: count for name, count in times_run(root).items() if count > 1}
    assert len(again) == 1, "only the step of the lost node ran again"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_runner_that_is_ended_is_resumed_and_repeats_nothing_that_passed(tmp_path, cluster, number):
    def check_ended():
        wait_for(lambda: not sleepers("703"), 30)  # Ray ends the workers, and their watchers the commands

    cluster_cases.ended_and_resumed(tmp_path, cluster.on, number, check_ended)


def test_a_full_disk_is_reported_and_the_run_is_resumed(tmp_path, cluster):
    cluster_cases.full_disk(tmp_path, cluster.on)


@pytest.mark.parametrize(
    ("address", "status", "word"),
    [("127.0.0.1:9", 1, "no Ray at 127.0.0.1:9"), ("head", 2, "must be ray://HOST:PORT"), ("h:x", 2, "ray://h:x")],
)
def test_an_address_without_a_cluster_is_one_line(tmp_path, address, status, word):
    pytest.importorskip("ray", reason="no Ray here: run `make test-ray`")
    write_networks(tmp_path, 1)
    came, output = run_matrix(tmp_path, "--on", f"ray://{address}")
    assert came == status
    assert word in output
    assert output.count("\n") == 1
