"""The clusters that `mezzo tipc matrix --on` knows."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mezzo.errors import OptionError
from mezzo.files import one_line
from mezzo.tipc._executor import StepExecutor
from mezzo.tipc._machine import MachineInfo, this_machine

NAMES = ("ray", "ray://ADDRESS", "slurm", "k8s")


@dataclass(frozen=True)
class Cluster:
    """A cluster that is ready to take steps."""

    executor: StepExecutor
    machine: MachineInfo
    """Devices of its largest node; software of this machine, which all nodes share."""
    description: str


def check_cluster_name(name: str) -> None:
    """Raise OptionError unless a cluster has this name."""
    if name not in ("ray", "slurm", "k8s") and not (name.startswith("ray://") and len(name) > len("ray://")):
        raise OptionError(f"--on {name}: must be one of {', '.join(NAMES)}")


@contextmanager
def open_cluster(name: str, work: Path, memory_mb: int | None) -> Iterator[Cluster]:
    """Connect to a cluster, and leave it at the end.

    Args:
        name: Its name, see `NAMES`.
        work: A folder for temporary files that all its machines see.
        memory_mb: Memory of each step in MiB; None: what the cluster gives.

    Raises:
        OptionError: There is no such cluster.
        RunError: It does not answer.
    """
    check_cluster_name(name)
    if name == "slurm":
        opened = _open_slurm(work, memory_mb)
    elif name == "k8s":
        raise OptionError("--on k8s: mezzo starts no jobs in Kubernetes; add --dry-run to print a Job to apply")
    else:
        opened = _open_ray(name.removeprefix("ray").removeprefix("://"), memory_mb)
    with opened as cluster:
        yield cluster


@contextmanager
def _open_slurm(work: Path, memory_mb: int | None) -> Iterator[Cluster]:
    from mezzo.tipc._on_slurm import SlurmExecutor
    from mezzo.tipc._slurm_queue import largest_node, setting

    cores, gpus = largest_node()
    description = f"Slurm {setting('SLURM_VERSION')}, nodes of up to {cores} cores and {gpus} GPUs"
    executor = SlurmExecutor(work, cores=cores, memory_mb=memory_mb)
    try:
        yield Cluster(executor, _machine(f"Slurm{_partition()}", cores, gpus, description), description)
    finally:
        executor.close()


@contextmanager
def _open_ray(address: str, memory_mb: int | None) -> Iterator[Cluster]:
    from mezzo.tipc._on_ray import RayExecutor

    executor = RayExecutor(address, memory_mb=memory_mb)
    try:
        machine = _machine("Ray", executor.cores, executor.gpus, executor.description)
        yield Cluster(executor, machine, executor.description)
    finally:
        executor.close()


def _partition() -> str:
    name = one_line(os.environ.get("SBATCH_PARTITION", ""))
    return f" (partition {name})" if name else ""


def _machine(name: str, cores: int, gpus: int, description: str) -> MachineInfo:
    """Return the machine of a cluster's runs: the history must not take their speeds for those of this machine."""
    here = this_machine(Path.cwd())
    node = f"node of {name}"
    own = {"processor": node, "cores": str(cores), "GPUs": f"{gpus} per {node}" if gpus else "none"}
    return replace(here, cores=cores, gpus=gpus, facts={**here.facts, **own, "cluster": description})
