"""Overhead of a certification on this machine, on a Ray cluster of two local nodes and on Slurm, per step.

Networks that exist only as TIPC texts have ten steps each; a step is a Python program of a few lines. After each run all
records must be there, all must have passed, and each command must have run exactly once.

    python benchmarks/clusters.py local
    .ray/bin/python benchmarks/clusters.py ray
    .ray/bin/python benchmarks/clusters.py ray --disturb
    python tools/slurm_here.py python benchmarks/clusters.py slurm

`--disturb` kills a node and then the runner (SIGKILL), resumes, and compares all records with those of the run on this
machine, which must be in the same folder.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/tipc"))

from synthetic import NUM_STEPS, matrix, outcome, run_matrix, times_run, wait_for, write_networks

from mezzo.tipc import find_runs, load_run


@contextmanager
def ray_nodes(cpus):
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus, "include_dashboard": False})
    cluster.second = cluster.add_node(num_cpus=cpus)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


def measure(root, words, networks):
    start = time.perf_counter()
    status, output = run_matrix(root, *words)
    wall = time.perf_counter() - start
    if status != 0:
        sys.exit(f"exit status {status}:\n{output[-4000:]}")
    check(root, networks, {1})
    return wall


def check(root, networks, allowed):
    """Refuse a run with a missing record, a step that did not pass, or a command that ran twice."""
    records = [record for path in find_runs([root]) for record in load_run(path).records]
    counts = times_run(root)
    assert len(records) == networks * NUM_STEPS, len(records)
    assert {record.status for record in records} == {"passed"}
    assert len(counts) == networks * NUM_STEPS, len(counts)
    assert set(counts.values()) <= allowed, counts.most_common(3)
    return records


def disturb(root, cluster, words, networks):
    """Kill a node, then the runner; resume; return the number of commands that ran a second time."""
    process = matrix(root, *words)
    total = networks * NUM_STEPS
    wait_for(lambda: sum(times_run(root).values()) > total * 0.2, 600)
    cluster.remove_node(cluster.second, allow_graceful=False)
    wait_for(lambda: sum(times_run(root).values()) > total * 0.5, 600)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    status, output = run_matrix(root, *words, "--resume")
    if status != 0:
        sys.exit(f"exit status {status}:\n{output[-4000:]}")
    check(root, networks, {1, 2})
    return sum(count > 1 for count in times_run(root).values())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("place", choices=("local", "ray", "slurm"))
    parser.add_argument("--networks", type=int, default=200)
    parser.add_argument("--cpus", type=int, default=2, help="CPUs of each node of the Ray cluster")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "mezzo-clusters"))
    parser.add_argument("--disturb", action="store_true", help="kill a node and the runner, and resume (Ray)")
    options = parser.parse_args()
    name = f"{options.place}-disturbed" if options.disturb else options.place
    root = options.folder / name
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    write_networks(root, options.networks, threads="1", batches="1|2|3|4|5|6|7|8")
    with ExitStack() as stack:
        words = ["--jobs", "2"] if options.place == "local" else ["--on", "slurm"]
        if options.place == "ray":
            cluster = stack.enter_context(ray_nodes(options.cpus))
            words = ["--on", f"ray://{cluster.address}"]
        if options.disturb:
            again = disturb(root, cluster, words, options.networks)
            same = outcome(root) == outcome(options.folder / "local")
            result = {"place": name, "ran again": again, "records equal those of the local run": same}
        else:
            wall = measure(root, words, options.networks)
            records = check(root, options.networks, {1})
            steps = len(records)
            result = {
                "place": name,
                "steps": steps,
                "wall s": round(wall, 1),
                "ms per step": round(1000 * wall / steps, 1),
                "command ms": round(1000 * sum(record.seconds for record in records) / steps, 1),
            }
            if (options.folder / "local").is_dir() and options.place != "local":
                result["records equal those of the local run"] = outcome(root) == outcome(options.folder / "local")
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
