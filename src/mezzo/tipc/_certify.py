"""Certify a configuration, from its text to its report: what `mezzo tipc run` does."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mezzo.files import say
from mezzo.tipc._adapt import Allowances, adapt_plan
from mezzo.tipc._certificate import add_checks, write_certificate
from mezzo.tipc._config import ConfigError, read_config
from mezzo.tipc._executor import LocalExecutor
from mezzo.tipc._finish import finish_run
from mezzo.tipc._lint import lint
from mezzo.tipc._machine import MachineInfo, this_machine
from mezzo.tipc._missing import missing_scripts
from mezzo.tipc._output_paths import check_folder_names, check_output_paths
from mezzo.tipc._plan import CVD, Plan
from mezzo.tipc._plan_text import plan_text
from mezzo.tipc._planner import make_plan
from mezzo.tipc._progress import LineProgress, RunListener, progress_for
from mezzo.tipc._recognise import choose_profile
from mezzo.tipc._report import write_reports
from mezzo.tipc._runner import (
    FAILED,
    NOTHING,
    PASSED,
    PlanRun,
    RunnerOptions,
    RunRequest,
    open_run,
    run_together,
)
from mezzo.tipc._script_run import run_as_scripts
from mezzo.tipc._stop_request import StopRequest
from mezzo.tipc._weights import fetch_weights, uncached_weights
from mezzo.tipc.history import check_history, history_path


@dataclass(frozen=True)
class CertifyRequest:
    """A configuration to certify, and how."""

    config: Path
    mode: str
    profile: str | None = None
    gpu_id: str = ""
    allow: Allowances = field(default_factory=Allowances)
    options: RunnerOptions = field(default_factory=RunnerOptions)
    check: bool = False
    """Add the checks of a certificate."""
    strict: bool = False
    """Refuse texts in which `lint` finds errors."""
    history: Path | None = None
    """The history that the run is added to; `off`: none; None: see `history_path`."""


def run_folder(plan: Plan, config: Path) -> str:
    """Return the folder for records and logs, relative to the root: one per text, model and mode."""
    parts = plan.log_dir.split("/")
    missing = [part for part in (plan.model, plan.mode) if part and part not in parts]
    return "/".join((plan.log_dir, *missing, config.stem))


def certify_like_scripts(config: Path, mode: str, profile: str | None, gpu_id: str) -> int:
    """Run exactly the commands of the shell script; return 0 if all passed, 1 if one failed, 3 if there was none.

    Raises:
        ConfigError: The configuration cannot be read, or names paths outside the output folder.
    """
    root = Path.cwd()
    text = read_config(config)
    chosen, _ = choose_profile(profile, text, root)

    def replan(missing_after: str = "") -> Plan:
        return make_plan(text, mode, chosen, str(root), gpu_id, missing_after)

    plan = replan()
    check_output_paths(plan, root)
    stop = StopRequest(None)
    with stop.on_signals():
        done = run_as_scripts(plan, root, replan, stop)
    if stop.signal is not None:
        return 128 + stop.signal
    if plan.failure:
        say(plan.failure)
    if plan.failure or any(ended.code != 0 for _, ended, _ in done):
        return FAILED
    return PASSED if done else NOTHING


@dataclass(frozen=True)
class PlannedCertification:
    """A configuration with the plan that is run for it."""

    request: CertifyRequest
    text: str
    plan: Plan
    origin: str
    """Whose rules the plan follows, and why."""
    findings: tuple[str, ...] = ()
    """The errors that `lint` finds in the text."""


def certify(
    request: CertifyRequest,
    root: Path,
    *,
    dry_run: bool = False,
    as_json: bool = False,
    progress: LineProgress | None = None,
) -> int:
    """Plan, adapt, run and report; return the exit status.

    Raises:
        ConfigError: The configuration cannot or must not be run.

    """
    machine = this_machine(root)
    planned = plan_certification(request, root, machine, visible=os.environ.get(CVD), dry_run=dry_run)
    if dry_run:
        say(plan_text(planned.plan, planned.origin))
        return PASSED if planned.plan.steps else NOTHING
    if (status := refusal(planned)) is not None:
        return status
    stop, options = StopRequest(request.options.total_limit), request.options
    with (
        progress or progress_for(planned.plan.steps, as_json) as shown,
        open_certification(planned, root, machine, shown, stop) as run,
    ):
        with stop.on_signals():
            run_together([run], LocalExecutor(machine, options.jobs), stop)
        return finish_certification(planned, run)


def plan_certification(
    request: CertifyRequest, root: Path, machine: MachineInfo, *, visible: str | None = None, dry_run: bool = False
) -> PlannedCertification:
    """Return a configuration with its plan for a machine; fetches weights that are not in the cache, unless `dry_run`.

    Args:
        request: The configuration, and how it is certified.
        root: The directory that its commands run in.
        machine: The machine that runs them.
        visible: CUDA_VISIBLE_DEVICES of this process, if this is the machine.
        dry_run: Do not fetch weights.

    Raises:
        ConfigError: The configuration cannot or must not be run.
    """
    text = read_config(request.config)
    profile, why = choose_profile(request.profile, text, root)
    plan = make_plan(text, request.mode, profile, str(root), request.gpu_id)
    check_folder_names(plan)
    check_output_paths(plan, root)
    findings = [str(each) for each in lint(text, request.mode, profile, plan, root, machine.gpus) if each.serious]
    if request.strict and findings:
        raise ConfigError(f"{request.config}: {findings[0]} (--strict; 'mezzo tipc lint' lists all)")
    plan = _adapt(plan, request, root, machine, visible, dry_run)
    return PlannedCertification(request, text, plan, why, tuple(findings))


def refusal(planned: PlannedCertification) -> int | None:
    """Say why a plan is not run and return the exit status; None: it is run."""
    plan, config = planned.plan, planned.request.config
    if plan.failure:
        say(f"mezzo: {config}: {plan.failure}", err=True)
        return FAILED
    if not plan.steps:
        say(f"mezzo: {config}: nothing is planned in mode {plan.mode}; 'mezzo tipc lint' says why", err=True)
        return NOTHING
    return None


@contextmanager
def open_certification(
    planned: PlannedCertification,
    root: Path,
    machine: MachineInfo,
    progress: RunListener,
    stop: StopRequest,
    code: str = "",
) -> Iterator[PlanRun]:
    """Begin the run of a plan, see `open_run`; `code` is the hash of the code, empty: it is computed."""
    plan = planned.plan
    if (history := history_path(planned.request.history, root)) is not None:
        check_history(history)  # before hours of work, not after
    progress.say(f"{plan.model}, {plan.mode}: {len(plan.steps)} steps, profile {plan.profile} ({planned.origin})")
    for finding in planned.findings:
        progress.say(finding)
    with open_run(run_request(planned, root, machine, code), progress, stop) as run:
        yield run


def run_request(planned: PlannedCertification, root: Path, machine: MachineInfo, code: str = "") -> RunRequest:
    """Return what the runner has to know about a plan."""
    return RunRequest(
        plan=planned.plan,
        root=root,
        folder=root / run_folder(planned.plan, planned.request.config),
        config=planned.request.config,
        config_text=planned.text,
        machine=machine,
        options=planned.request.options,
        notices=planned.findings,
        code=code,
    )


def finish_certification(planned: PlannedCertification, run: PlanRun) -> int:
    """Write the result, the certificate and the reports of a run, and return the exit status."""
    result = run.finish()
    if planned.request.check and result in (PASSED, FAILED):
        result = max(result, write_certificate(run.folder, run.progress.say))
    finish_run(run.folder, history_path(planned.request.history, run.root), run.progress.say)
    _, page = write_reports(run.folder)
    run.progress.say(f"report: {page}")
    return result


def _adapt(
    plan: Plan, request: CertifyRequest, root: Path, machine: MachineInfo, visible: str | None, dry_run: bool
) -> Plan:
    """Return the plan as it is run; fetches weights that are not in the cache, unless `dry_run`."""
    if missing := missing_scripts(plan, root):
        raise ConfigError(f"{request.config}: {missing[0]} (run it from the root of its repository)")
    missing_weights = uncached_weights(plan, root)
    if missing_weights and not dry_run:
        missing_weights = fetch_weights(plan, root, lambda line: None)
    plan = adapt_plan(
        plan,
        root=root,
        gpus=machine.gpus,
        allow=request.allow,
        folder=run_folder(plan, request.config),
        visible=visible,
        missing_weights=missing_weights,
    )
    return add_checks(plan) if request.check else plan
