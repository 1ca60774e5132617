"""Many configurations: one after the other here, or spread by a scheduler that is there already (Slurm, Ray)."""

import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mezzo.errors import MezzoError, require
from mezzo.tipc._certify import Request, certify, run_folder
from mezzo.tipc._config import read_config
from mezzo.tipc._machine import this_machine
from mezzo.tipc._places import check_names, check_places
from mezzo.tipc._planner import make_plan
from mezzo.tipc._recognise import choose_profile
from mezzo.tipc._record import RECORDS
from mezzo.tipc._report import merge
from mezzo.tipc._run import FAILED, NOTHING, RunOptions

Say = Callable[[str], None]


@dataclass(frozen=True)
class Many:
    """Configurations to run, and how."""

    configs: tuple[Path, ...]
    mode: str
    out: Path
    prepare: bool = False
    check: bool = False
    resume: bool = False
    jobs: int = 1
    step_limit: float | None = None


def run_many(many: Many, say: Say) -> int:
    """Run them here, one after the other; returns 1 if one failed, 3 if there was nothing to do in any."""
    root = Path.cwd()
    results = []
    for number, config in enumerate(many.configs, 1):
        say(f"[{number}/{len(many.configs)}] {config}")
        try:
            results.append(_one(many, config, root, say))
        except MezzoError as error:  # one bad text does not end the others
            say(f"mezzo: {error}")
            results.append(error.exit_code)
        if results[-1] > 128:
            break
    _report(many, root, say)
    return _worst(results)


def _one(many: Many, config: Path, root: Path, say: Say) -> int:
    if many.prepare:
        from mezzo.tipc._prepare import prepare

        prepare(config, many.mode, root=root, has_gpu=this_machine().gpus > 0, report=say)
    options = RunOptions(step_limit=many.step_limit, jobs=many.jobs, resume=many.resume)
    return certify(Request(config, many.mode, options=options, check=many.check), root)


def _worst(results: list[int]) -> int:
    """Return one status for many: an interruption, a failure, bad input, nothing to do, or success."""
    for worst in (130, 143, 2):
        if worst in results:
            return worst
    if any(result not in (0, NOTHING) for result in results):
        return FAILED
    return NOTHING if results and all(result == NOTHING for result in results) else 0


def _report(many: Many, root: Path, say: Say) -> None:
    folders = []
    for config in many.configs:
        try:
            text = read_config(config)
            profile, _ = choose_profile(None, text, root)
            plan = make_plan(text, many.mode, profile, str(root))
            check_names(plan)
            check_places(plan, root)
        except MezzoError:
            continue  # said when it was its turn
        folder = root / run_folder(plan, config)
        if (folder / RECORDS).is_file():
            folders.append(folder)
    if folders:
        _, page = merge(folders, many.out)
        say(f"report: {page.resolve()}")


def _command(many: Many, config: str) -> list[str]:
    flags = [flag for flag, wanted in (("--check", many.check), ("--resume", many.resume)) if wanted]
    limit = ["--step-limit", f"{many.step_limit:g}"] if many.step_limit is not None else []
    return ["-m", "mezzo", "tipc", "run", *flags, *limit, "--jobs", str(many.jobs), config, many.mode]


def _commands(many: Many, config: str) -> list[list[str]]:
    prepare = [["-m", "mezzo", "tipc", "prepare", config, many.mode]] if many.prepare else []
    return [*prepare, _command(many, config)]


def slurm_array(many: Many) -> str:
    """Return a script for `sbatch`: one task of an array for each configuration, to be started from the repository."""
    configs = " ".join(shlex.quote(str(config)) for config in many.configs)
    python = shlex.quote(sys.executable)
    lines = [
        "#!/bin/bash",
        "#SBATCH --job-name=mezzo-tipc",
        f"#SBATCH --array=0-{len(many.configs) - 1}",
        "#SBATCH --gpus=1",
        "#SBATCH --cpus-per-task=8",
        f"configs=({configs})",
        'config="${configs[$SLURM_ARRAY_TASK_ID]}"',
    ]
    if many.prepare:
        lines.append(f'{python} -m mezzo tipc prepare "$config" {shlex.quote(many.mode)} || exit')
    command = " ".join(shlex.quote(word) for word in _command(many, "CONFIG")).replace("CONFIG", '"$config"')
    lines.append(f"exec {python} {command}")
    lines.append(f"# afterwards: {python} -m mezzo tipc report test_tipc/output --out {shlex.quote(str(many.out))}")
    return "\n".join(lines)


def on_ray(many: Many, say: Say) -> int:
    """Run them as tasks of a Ray cluster whose machines share this folder; returns as `run_many`."""
    require("ray", extra="ray")
    import ray

    root = str(Path.cwd())

    def task(commands: list[list[str]]) -> int:
        results = [subprocess.run([sys.executable, *words], cwd=root).returncode for words in commands]
        return next((result for result in results if result), 0)

    ray.init(ignore_reinit_error=True)
    gpus = 1 if ray.cluster_resources().get("GPU", 0) else 0
    remote = ray.remote(num_gpus=gpus, num_cpus=1)(task)
    results = ray.get([remote.remote(_commands(many, str(config))) for config in many.configs])
    for config, result in zip(many.configs, results, strict=True):
        say(f"{config}: exit status {result}")
    _report(many, Path(root), say)
    return _worst(list(results))
