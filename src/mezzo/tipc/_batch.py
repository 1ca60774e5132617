"""Certify many configurations: one after the other on this machine, or through a scheduler (Slurm, Ray)."""

import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mezzo.errors import MezzoError, require
from mezzo.tipc._certify import CertifyRequest, certify, run_folder
from mezzo.tipc._config import read_config
from mezzo.tipc._machine import this_machine
from mezzo.tipc._output_paths import check_folder_names, check_output_paths
from mezzo.tipc._planner import make_plan
from mezzo.tipc._prepare import prepare
from mezzo.tipc._recognise import choose_profile
from mezzo.tipc._record import RECORDS
from mezzo.tipc._report import merge_reports
from mezzo.tipc._runner import FAILED, NOTHING, RunnerOptions

Report = Callable[[str], None]


@dataclass(frozen=True)
class BatchRun:
    """Configurations to certify, and how."""

    configs: tuple[Path, ...]
    mode: str
    out: Path
    """The page about all of them, or a folder for it."""
    prepare: bool = False
    check: bool = False
    resume: bool = False
    jobs: int = 1
    step_limit: float | None = None
    history: Path | None = None
    """See `CertifyRequest.history`."""


def run_batch(batch: BatchRun, report: Report) -> int:
    """Certify the configurations one after the other; return one exit status for all, see `worst_status`."""
    root = Path.cwd()
    results = []
    for number, config in enumerate(batch.configs, 1):
        report(f"[{number}/{len(batch.configs)}] {config}")
        try:
            results.append(_run_one(batch, config, root, report))
        except MezzoError as error:  # the other configurations are still run
            report(f"mezzo: {error}")
            results.append(error.exit_code)
        if results[-1] > 128:
            break
    _write_report(batch, root, report)
    return worst_status(results)


def _run_one(batch: BatchRun, config: Path, root: Path, report: Report) -> int:
    if batch.prepare:
        prepare(config, batch.mode, root=root, has_gpu=this_machine().gpus > 0, report=report)
    options = RunnerOptions(step_limit=batch.step_limit, jobs=batch.jobs, resume=batch.resume)
    return certify(CertifyRequest(config, batch.mode, options=options, check=batch.check, history=batch.history), root)


def worst_status(results: list[int]) -> int:
    """Return one exit status for many runs: of an interruption, bad input, a failure, nothing to do, or success.

    >>> worst_status([0, 3]), worst_status([3, 3]), worst_status([0, 137]), worst_status([1, 2]), worst_status([1, 143])
    (0, 3, 1, 2, 143)
    >>> worst_status([0, 1]), worst_status([0, -9]), worst_status([0, 130]), worst_status([])
    (1, 1, 130, 0)
    """
    for status in (130, 143, 2):
        if status in results:
            return status
    if any(result not in (0, NOTHING) for result in results):
        return FAILED
    return NOTHING if results and all(result == NOTHING for result in results) else 0


def _write_report(batch: BatchRun, root: Path, report: Report) -> None:
    folders = []
    for config in batch.configs:
        try:
            text = read_config(config)
            profile, _ = choose_profile(None, text, root)
            plan = make_plan(text, batch.mode, profile, str(root))
            check_folder_names(plan)
            check_output_paths(plan, root)
        except MezzoError:
            continue  # already reported
        folder = root / run_folder(plan, config)
        if (folder / RECORDS).is_file():
            folders.append(folder)
    if folders:
        _, page = merge_reports(folders, batch.out)
        report(f"report: {page.resolve()}")


def _run_command(batch: BatchRun, config: str) -> list[str]:
    flags = [flag for flag, is_set in (("--check", batch.check), ("--resume", batch.resume)) if is_set]
    limit = ["--step-limit", f"{batch.step_limit:g}"] if batch.step_limit is not None else []
    history = ["--history", str(batch.history)] if batch.history is not None else []
    return ["-m", "mezzo", "tipc", "run", *flags, *limit, *history, "--jobs", str(batch.jobs), config, batch.mode]


def slurm_script(batch: BatchRun) -> str:
    """Return a script for `sbatch`, to be submitted from the repository: an array with one task per configuration."""
    configs = " ".join(shlex.quote(str(config)) for config in batch.configs)
    python = shlex.quote(sys.executable)
    lines = [
        "#!/bin/bash",
        "#SBATCH --job-name=mezzo-tipc",
        f"#SBATCH --array=0-{len(batch.configs) - 1}",
        "#SBATCH --gpus=1",
        "#SBATCH --cpus-per-task=8",
        f"configs=({configs})",
        'config="${configs[$SLURM_ARRAY_TASK_ID]}"',
    ]
    if batch.prepare:
        lines.append(f'{python} -m mezzo tipc prepare "$config" {shlex.quote(batch.mode)} || exit')
    command = " ".join(shlex.quote(word) for word in _run_command(batch, "CONFIG")).replace("CONFIG", '"$config"')
    lines.append(f"exec {python} {command}")
    lines.append(f"# afterwards: {python} -m mezzo tipc report test_tipc/output --out {shlex.quote(str(batch.out))}")
    return "\n".join(lines)


def run_batch_on_ray(batch: BatchRun, report: Report) -> int:
    """Run the configurations as tasks of a Ray cluster whose machines share this folder; returns as `run_batch`."""
    require("ray", extra="ray")
    import ray

    root = str(Path.cwd())

    def task(commands: list[list[str]]) -> int:
        results = [subprocess.run([sys.executable, *words], cwd=root).returncode for words in commands]
        return next((result for result in results if result), 0)

    def commands(config: str) -> list[list[str]]:
        first = [["-m", "mezzo", "tipc", "prepare", config, batch.mode]] if batch.prepare else []
        return [*first, _run_command(batch, config)]

    ray.init(ignore_reinit_error=True)
    gpus = 1 if ray.cluster_resources().get("GPU", 0) else 0
    remote = ray.remote(num_gpus=gpus, num_cpus=1)(task)
    results = ray.get([remote.remote(commands(str(config))) for config in batch.configs])
    for config, result in zip(batch.configs, results, strict=True):
        report(f"{config}: exit status {result}")
    _write_report(batch, Path(root), report)
    return worst_status(list(results))
