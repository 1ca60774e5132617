"""A configuration from its text to its report: what `mezzo tipc run` does."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from mezzo.files import say
from mezzo.tipc._compat import run_as_scripts
from mezzo.tipc._config import ConfigError, read_config
from mezzo.tipc._lint import lint
from mezzo.tipc._machine import this_machine
from mezzo.tipc._mend import Allowances, mend
from mezzo.tipc._places import check_names, check_places
from mezzo.tipc._plan import CVD, Plan
from mezzo.tipc._planner import make_plan
from mezzo.tipc._presence import missing_scripts
from mezzo.tipc._print import as_text
from mezzo.tipc._recognise import choose_profile
from mezzo.tipc._run import FAILED, NOTHING, PASSED, RunOptions, run_plan
from mezzo.tipc._stop import Stop
from mezzo.tipc._view import Lines, view_for
from mezzo.tipc._weights import fetch_weights, not_cached


@dataclass(frozen=True)
class Request:
    """What is asked for."""

    config: Path
    mode: str
    profile: str | None = None
    gpu_id: str = ""
    allow: Allowances = field(default_factory=Allowances)
    options: RunOptions = field(default_factory=RunOptions)
    check: bool = False
    strict: bool = False  # refuse texts that the lint finds errors in


def run_folder(plan: Plan, config: Path) -> str:
    """Return where records and logs of a configuration go, seen from the root: one folder for text, model and mode."""
    parts = plan.log_dir.split("/")
    missing = [part for part in (plan.model, plan.mode) if part and part not in parts]
    return "/".join((plan.log_dir, *missing, config.stem))


def run_compat(config: Path, mode: str, profile: str | None, gpu_id: str) -> int:
    """Run exactly the commands of the shell script, and return 0 all passed, 1 one failed, 3 there was none.

    Raises:
        ConfigError: The configuration cannot be read, or names places outside of the output folder.
    """
    root = Path.cwd()
    text = read_config(config)
    chosen, _ = choose_profile(profile, text, root)

    def planned(missing_after: str = "") -> Plan:
        return make_plan(text, mode, chosen, str(root), gpu_id, missing_after)

    plan = planned()
    check_places(plan, root)
    stop = Stop(None)
    with stop.on_signals():
        done = run_as_scripts(plan, root, planned, stop)
    if stop.signal is not None:
        return 128 + stop.signal
    if plan.failure:
        say(plan.failure)
    if plan.failure or any(ended.code != 0 for _, ended, _ in done):
        return FAILED
    return PASSED if done else NOTHING


def _lacking_weights(plan: Plan, root: Path, dry_run: bool) -> dict[str, str]:
    """Return the weights that cannot be had, each with the reason; fetches what is not in the cache."""
    lacking = not_cached(plan, root)
    return lacking if dry_run or not lacking else fetch_weights(plan, root, lambda line: None)


def certify(
    request: Request, root: Path, *, dry_run: bool = False, as_json: bool = False, view: Lines | None = None
) -> int:
    """Plan, mend, run and report; returns the exit status.

    Raises:
        ConfigError: The configuration cannot or must not be run.

    """
    text = read_config(request.config)
    profile, why = choose_profile(request.profile, text, root)
    machine = this_machine()
    plan = make_plan(text, request.mode, profile, str(root), request.gpu_id)
    check_names(plan)
    check_places(plan, root)
    found = lint(text, request.mode, profile, plan, root, machine.gpus)
    findings = [str(finding) for finding in found if finding.serious]
    if request.strict and findings:
        raise ConfigError(f"{request.config}: {findings[0]} (--strict; 'mezzo tipc lint' lists all)")
    if lost := missing_scripts(plan, root):
        raise ConfigError(f"{request.config}: {lost[0]} (run it from the root of its repository)")
    lacking = _lacking_weights(plan, root, dry_run)
    folder = run_folder(plan, request.config)
    visible = os.environ.get(CVD)
    plan = mend(
        plan,
        root=root,
        gpus=machine.gpus,
        allow=request.allow,
        folder=folder,
        visible=visible,
        lacking=lacking,
    )
    if request.check:
        from mezzo.tipc._checks import with_checks

        plan = with_checks(plan)
    if dry_run:
        say(as_text(plan, why))
        return PASSED if plan.steps else NOTHING
    if plan.failure:
        say(f"mezzo: {request.config}: {plan.failure}", err=True)
        return FAILED
    if not plan.steps:
        say(f"mezzo: {request.config}: nothing is planned in mode {request.mode}; 'mezzo tipc lint' says why", err=True)
        return NOTHING
    with view or view_for(plan.steps, as_json) as shown:
        shown.say(f"{plan.model}, {plan.mode}: {len(plan.steps)} steps, profile {profile.name} ({why})")
        for finding in findings:
            shown.say(finding)
        result = run_plan(
            plan,
            root=root,
            folder=root / folder,
            config=request.config,
            config_text=text,
            machine=machine,
            options=request.options,
            view=shown,
            notices=tuple(findings),
        )
        if request.check and result in (PASSED, FAILED):
            from mezzo.tipc._checks import write_certificate

            result = max(result, write_certificate(root / folder, shown.say))
        from mezzo.tipc._report import write_reports

        _, page = write_reports(root / folder)
        shown.say(f"report: {page}")
    return result
