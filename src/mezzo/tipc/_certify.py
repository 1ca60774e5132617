"""Certify a configuration, from its text to its report: what `mezzo tipc run` does."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from mezzo.files import say
from mezzo.tipc._adapt import Allowances, adapt_plan
from mezzo.tipc._certificate import add_checks, write_certificate
from mezzo.tipc._config import ConfigError, read_config
from mezzo.tipc._finish import finish_run
from mezzo.tipc._lint import lint
from mezzo.tipc._machine import MachineInfo, this_machine
from mezzo.tipc._missing import missing_scripts
from mezzo.tipc._output_paths import check_folder_names, check_output_paths
from mezzo.tipc._plan import CVD, Plan
from mezzo.tipc._plan_text import plan_text
from mezzo.tipc._planner import make_plan
from mezzo.tipc._progress import LineProgress, progress_for
from mezzo.tipc._recognise import choose_profile
from mezzo.tipc._report import write_reports
from mezzo.tipc._runner import FAILED, NOTHING, PASSED, RunnerOptions, run_plan
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
    text = read_config(request.config)
    profile, why = choose_profile(request.profile, text, root)
    machine = this_machine(root)
    plan = make_plan(text, request.mode, profile, str(root), request.gpu_id)
    check_folder_names(plan)
    check_output_paths(plan, root)
    findings = [str(each) for each in lint(text, request.mode, profile, plan, root, machine.gpus) if each.serious]
    if request.strict and findings:
        raise ConfigError(f"{request.config}: {findings[0]} (--strict; 'mezzo tipc lint' lists all)")
    plan = _adapt(plan, request, root, machine, dry_run)
    if dry_run:
        say(plan_text(plan, why))
        return PASSED if plan.steps else NOTHING
    if plan.failure:
        say(f"mezzo: {request.config}: {plan.failure}", err=True)
        return FAILED
    if not plan.steps:
        say(f"mezzo: {request.config}: nothing is planned in mode {request.mode}; 'mezzo tipc lint' says why", err=True)
        return NOTHING
    folder = root / run_folder(plan, request.config)
    history = history_path(request.history, root)
    if history is not None:
        check_history(history)  # before hours of work, not after
    with progress or progress_for(plan.steps, as_json) as shown:
        shown.say(f"{plan.model}, {plan.mode}: {len(plan.steps)} steps, profile {profile.name} ({why})")
        for finding in findings:
            shown.say(finding)
        result = run_plan(
            plan,
            root=root,
            folder=folder,
            config=request.config,
            config_text=text,
            machine=machine,
            options=request.options,
            progress=shown,
            notices=tuple(findings),
        )
        if request.check and result in (PASSED, FAILED):
            result = max(result, write_certificate(folder, shown.say))
        finish_run(folder, history, shown.say)
        _, page = write_reports(folder)
        shown.say(f"report: {page}")
    return result


def _adapt(plan: Plan, request: CertifyRequest, root: Path, machine: MachineInfo, dry_run: bool) -> Plan:
    """Return the plan as it is run here; fetches weights that are not in the cache, unless `dry_run`."""
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
        visible=os.environ.get(CVD),
        missing_weights=missing_weights,
    )
    return add_checks(plan) if request.check else plan
