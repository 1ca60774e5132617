"""Certify many configurations: one after the other on this machine, or all together on a cluster (Ray, Slurm)."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from mezzo.errors import MezzoError, OptionError
from mezzo.tipc._certify import (
    CertifyRequest,
    PlannedCertification,
    certify,
    finish_certification,
    open_certification,
    plan_certification,
    refusal,
    run_folder,
    run_request,
)
from mezzo.tipc._clusters import check_cluster_name, open_cluster
from mezzo.tipc._config import read_config
from mezzo.tipc._executor import StepJob
from mezzo.tipc._machine import MachineInfo, code_hash, this_machine
from mezzo.tipc._on_k8s import job_template
from mezzo.tipc._on_slurm import SlurmExecutor
from mezzo.tipc._output_paths import check_folder_names, check_output_paths
from mezzo.tipc._planner import make_plan
from mezzo.tipc._prepare import prepare
from mezzo.tipc._progress import LineProgress
from mezzo.tipc._recognise import choose_profile
from mezzo.tipc._record import RECORDS
from mezzo.tipc._report import merge_reports
from mezzo.tipc._runner import FAILED, NOTHING, PlanRun, RunnerOptions, run_together
from mezzo.tipc._stop_request import StopRequest

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
    on: str = ""
    """The cluster: 'ray', 'ray://ADDRESS' or 'slurm'; empty: this machine."""
    step_memory: str = ""
    """Memory of each step on a cluster, such as '4G'; empty: what the cluster gives."""

    def __post_init__(self) -> None:
        if self.on:
            check_cluster_name(self.on)
        if self.step_memory and not self.on:
            raise OptionError(f"--step-memory {self.step_memory}: needs --on; this machine has no limit of memory")
        self.memory_mb  # noqa: B018  (refuses a bad size)

    def work(self, root: Path) -> Path:
        """Return the folder for temporary files of a cluster."""
        return root / (self.out.parent if self.out.suffix == ".html" else self.out)

    @property
    def memory_mb(self) -> int | None:
        """Memory of each step in MiB; None: what the cluster gives."""
        if not self.step_memory:
            return None
        size = re.fullmatch(r"([0-9]{1,9})([MG])i?B?", self.step_memory)
        if size is None or int(size[1]) == 0:
            raise OptionError(f"--step-memory {self.step_memory[:40]}: must be a size such as 512M or 4G")
        return int(size[1]) * (1024 if size[2] == "G" else 1)


def run_batch(batch: BatchRun, report: Report) -> int:
    """Certify the configurations; return one exit status for all, see `worst_status`."""
    root, outcome = Path.cwd(), _Outcome(report)
    if batch.on:
        _run_on_cluster(batch, root, outcome)
    else:
        _run_here(batch, root, outcome)
    _write_report(batch, root, report)
    return worst_status(outcome.statuses)


@dataclass(frozen=True)
class _Outcome:
    """The exit statuses of the configurations so far."""

    report: Report
    statuses: list[int] = field(default_factory=list)

    @contextmanager
    def noting_errors(self) -> Iterator[None]:
        """Report an error and note its exit status; the other configurations are still run."""
        try:
            yield
        except MezzoError as error:
            self.report(f"mezzo: {error}")
            self.statuses.append(error.exit_code)


def _run_here(batch: BatchRun, root: Path, outcome: _Outcome) -> None:
    """Certify the configurations one after the other."""
    for number, config in enumerate(batch.configs, 1):
        outcome.report(f"[{number}/{len(batch.configs)}] {config}")
        with outcome.noting_errors():
            _prepare(batch, config, root, this_machine(), outcome.report)
            outcome.statuses.append(certify(_request(batch, config), root))
        if outcome.statuses[-1] > 128:
            break


def _run_on_cluster(batch: BatchRun, root: Path, outcome: _Outcome) -> None:
    """Certify all configurations at the same time; the cluster decides which step runs when."""
    stop = StopRequest(None)
    # Ray handles signals in its own way when it is opened; ours have to come after it.
    with open_cluster(batch.on, batch.work(root), batch.memory_mb) as cluster, stop.on_signals(), ExitStack() as stack:
        outcome.report(f"{batch.on}: {cluster.description}")
        planned = _plan_all(batch, root, cluster.machine, stop, outcome)
        code = code_hash(root)  # after planning, which may write recipes
        runs: list[tuple[PlannedCertification, PlanRun]] = []
        for each in planned:
            with outcome.noting_errors():
                shown = LineProgress(_with_name(outcome.report, each.plan.model))
                opening = open_certification(each, root, cluster.machine, shown, stop, code)
                runs.append((each, stack.enter_context(opening)))
        run_together([run for _, run in runs], cluster.executor, stop)
        for each, run in runs:
            with outcome.noting_errors():
                outcome.statuses.append(finish_certification(each, run))
    if stop.signal is not None:
        outcome.statuses.append(128 + stop.signal)


def preview_batch(batch: BatchRun, report: Report) -> int:
    """Report the jobs that a batch would submit to Slurm or Kubernetes, and run nothing; return the exit status."""
    root, outcome, stop = Path.cwd(), _Outcome(report), StopRequest(None)
    if batch.on == "k8s":
        limit, memory = batch.step_limit, batch.memory_mb
        report(
            job_template(
                batch.configs,
                batch.mode,
                check=batch.check,
                step_limit=limit,
                memory_mb=memory,
                history=batch.history,
            )
        )
        return 0
    with open_cluster(batch.on, batch.work(root), batch.memory_mb) as cluster:
        planned = _plan_all(replace(batch, prepare=False), root, cluster.machine, stop, outcome, dry_run=True)
        jobs = []
        for each in planned:
            run = PlanRun(run_request(each, root, cluster.machine, code="-"), LineProgress(report), stop, {})
            run_steps: list[str] = []
            for step in each.plan.steps:
                needs = [name for name in step.needs if name in run.steps]
                if not step.skip and all(name in run_steps for name in needs):
                    run_steps.append(step.name)
                    jobs.append(StepJob(run, step, tuple(needs)))
        assert isinstance(cluster.executor, SlurmExecutor)
        for command in cluster.executor.preview(jobs):
            report(command)
    return worst_status(outcome.statuses)


def _plan_all(
    batch: BatchRun, root: Path, machine: MachineInfo, stop: StopRequest, outcome: _Outcome, *, dry_run: bool = False
) -> list[PlannedCertification]:
    """Return the configurations that can be run, with their plans."""
    planned = []
    for config in batch.configs:
        if stop():
            break
        with outcome.noting_errors():
            _prepare(batch, config, root, machine, outcome.report)
            made = plan_certification(_request(batch, config), root, machine, dry_run=dry_run)
            if (status := refusal(made)) is None:
                planned.append(made)
            else:
                outcome.statuses.append(status)
    return planned


def _prepare(batch: BatchRun, config: Path, root: Path, machine: MachineInfo, report: Report) -> None:
    if batch.prepare:
        prepare(config, batch.mode, root=root, has_gpu=machine.gpus > 0, report=report)


def _request(batch: BatchRun, config: Path) -> CertifyRequest:
    options = RunnerOptions(step_limit=batch.step_limit, jobs=batch.jobs, resume=batch.resume)
    return CertifyRequest(config, batch.mode, options=options, check=batch.check, history=batch.history)


def _with_name(report: Report, model: str) -> Report:
    return lambda line: report(f"{model}: {line}")


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
