"""`mezzo tipc`: plan, run and report TIPC texts. The scripts in test_tipc/ call it."""

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mezzo.cli._options import UsageError, option
from mezzo.cli._recipes import text_of, written_text
from mezzo.cli._tipc_history import History, compare, history
from mezzo.files import plain, say
from mezzo.vision.shipped import RECIPES, is_name, shipped_tree

if TYPE_CHECKING:
    from mezzo.tipc import Plan, Profile

app = typer.Typer(help="Certify training, evaluation, export and inference by TIPC texts.", no_args_is_help=True)

_LITE = "lite_train_lite_infer"
_CONFIG_HELP = f"The TIPC text, or a recipe that comes with mezzo: {', '.join(RECIPES)}."
_Config = Annotated[Path, typer.Argument(metavar="CONFIG", help=_CONFIG_HELP)]
_Mode = Annotated[str, typer.Argument(metavar="[MODE]", help="Such as lite_train_lite_infer.")]
_GpuId = Annotated[str, typer.Argument(metavar="[GPU]", help="GPU for modes that only infer.")]
_Profile = Annotated[
    str | None, option("Rules of the repository's script [recognised by the repository or the text].", "--profile")
]


def _make_plan(config: Path, mode: str, profile: str | None, gpu_id: str) -> "tuple[str, Profile, Plan, str]":
    from mezzo.tipc import choose_profile, make_plan, read_config

    text = read_config(text_of(config))
    chosen, why = choose_profile(profile, text, Path.cwd(), is_ours=is_name(config))
    return text, chosen, make_plan(text, mode, chosen, str(Path.cwd()), gpu_id), why


def _place_of(config: Path) -> Path:
    """Return where the files lie that the commands name: this folder, or mezzo's own for a recipe that is not written."""
    return shipped_tree() if is_name(config) and text_of(config).is_absolute() else Path.cwd()


@app.command()
def plan(
    config: _Config,
    mode: _Mode = _LITE,
    gpu_id: _GpuId = "",
    profile: _Profile = None,
    compat: Annotated[
        bool, option("The shell script's own commands, not adapted to this machine.", "--compat")
    ] = False,
    form: Annotated[str, option("text, json or shell.", "--format")] = "text",
) -> int:
    """Print the commands of a text without running them."""
    from mezzo.errors import unknown_choice

    if form not in ("text", "json", "shell"):
        raise UsageError(unknown_choice("--format", form, ("text", "json", "shell")))
    from mezzo.tipc import plan_script, plan_text

    text, _, made, why = _make_plan(config, mode, profile, gpu_id)
    if not compat:
        made = _adapt(made, text, config)
    say(made.as_json() if form == "json" else plan_script(made) if form == "shell" else plan_text(made, why))
    return 0 if made.steps else 3


def _adapt(plan: "Plan", text: str, config: Path) -> "Plan":
    """Return a plan for this machine, with the list of what is missing here; nothing is refused or fetched."""
    from mezzo.errors import MezzoError
    from mezzo.tipc import Allowances, adapt_plan, find_missing, this_machine, uncached_weights

    root, gpus = Path.cwd(), this_machine().gpus
    missing = tuple(plain(line) for _, line in find_missing(plan, text, _place_of(config), gpus))
    if _place_of(config) != root:
        missing = (f"the files that the commands name: `mezzo tipc prepare {config}` writes them here", *missing)
    try:
        weights = uncached_weights(plan, root)
    except MezzoError:  # `missing` has it
        weights = {}
    allow = Allowances(shell=True, unknown_mode=True)
    return replace(adapt_plan(plan, root=root, gpus=gpus, allow=allow, missing_weights=weights), missing=missing)


@app.command("lint")
def lint_(config: _Config, mode: _Mode = _LITE, profile: _Profile = None) -> int:
    """Check a text: exit status 1 if there are errors, 0 if there are only warnings."""
    from mezzo.tipc import lint, this_machine

    text, chosen, made, why = _make_plan(config, mode, profile, "")
    findings = lint(text, mode, chosen, made, _place_of(config), this_machine().gpus)
    say(f"profile {chosen.name}, {why}")
    for finding in findings:
        say(finding)
    errors = sum(finding.serious for finding in findings)
    say(f"{errors} error{'' if errors == 1 else 's'}, {len(findings) - errors} warnings")
    return 1 if errors else 0


@app.command()
def run(
    config: _Config,
    mode: _Mode = _LITE,
    gpu_id: _GpuId = "",
    profile: _Profile = None,
    compat: Annotated[bool, option("Run exactly the shell script's commands, with its defects.", "--compat")] = False,
    keep_going: Annotated[bool, option("Run steps that need a failed step.", "--keep-going")] = False,
    dry_run: Annotated[bool, option("Print the plan and run nothing.", "--dry-run")] = False,
    resume: Annotated[bool, option("Do not repeat steps that passed and have not changed.", "--resume")] = False,
    jobs: Annotated[int, option("Steps that may run at the same time.", "-j", "--jobs")] = 1,
    step_limit: Annotated[float | None, option("Time limit of one step, in seconds.", "--step-limit")] = None,
    total_limit: Annotated[float | None, option("Time limit of the whole run, in seconds.", "--total-limit")] = None,
    strict_devices: Annotated[
        bool, option("Skip trainings whose GPUs are missing, also on machines without GPU.", "--strict-devices")
    ] = False,
    allow_shell: Annotated[bool, option("Allow commands with unquoted ; & ` or $(.", "--allow-shell")] = False,
    allow_unknown_mode: Annotated[
        bool, option("Allow modes that the scripts do not know.", "--allow-unknown-mode")
    ] = False,
    strict: Annotated[bool, option("Refuse texts in which `lint` finds errors.", "--strict")] = False,
    check: Annotated[bool, option("Add the checks of a certificate.", "--check")] = False,
    as_json: Annotated[bool, option("Print one JSON line per step on standard output.", "--json")] = False,
    history_file: History = None,
) -> int:
    """Run a text: exit status 0 if all steps passed, 1 if one failed, 2 for bad input, 3 if there is nothing to do."""
    _check_limits(jobs, step_limit, total_limit)
    from mezzo.tipc import Allowances, CertifyRequest, RunnerOptions, certify, certify_like_scripts

    if compat:
        others = {
            "--resume": resume,
            "--check": check,
            "--json": as_json,
            "--strict-devices": strict_devices,
            "--strict": strict,
            "--history": history_file,
        }
        others |= {"--jobs": jobs > 1, "--step-limit": bool(step_limit), "--total-limit": bool(total_limit)}
        if given := [name for name, value in others.items() if value]:
            raise UsageError(f"--compat and {given[0]}: the scripts have no such option; omit one of them")
        if dry_run:
            return plan(config, mode, gpu_id, profile, True, "shell")
        return certify_like_scripts(written_text(config), mode, profile, gpu_id)
    if dry_run and is_name(config):
        return plan(config, mode, gpu_id, profile)
    request = CertifyRequest(
        written_text(config),
        mode,
        profile=profile,
        gpu_id=gpu_id,
        allow=Allowances(shell=allow_shell, unknown_mode=allow_unknown_mode, strict_devices=strict_devices),
        options=RunnerOptions(keep_going, step_limit, total_limit, jobs, resume),
        check=check,
        strict=strict,
        history=history_file,
    )
    return certify(request, Path.cwd(), dry_run=dry_run, as_json=as_json)


def _check_limits(jobs: int, step_limit: float | None, total_limit: float | None = None) -> None:
    if jobs < 1:
        raise UsageError(f"--jobs {jobs}: must be at least 1")
    for name, value in (("--step-limit", step_limit), ("--total-limit", total_limit)):
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{name} {value:g}: must be a number of seconds, more than 0")


@app.command()
def prepare(
    config: _Config,
    mode: _Mode = _LITE,
    extra: Annotated[str, typer.Argument(metavar="[EXTRA]", help="Ignored; the scripts accept it.")] = "",
    data: Annotated[Path | None, option("Folder with the real data set.", "--data")] = None,
    url: Annotated[str | None, option("Archive with the real data set; needs --sha256.", "--url")] = None,
    sha256: Annotated[str | None, option("Checksum of the archive.", "--sha256")] = None,
    profile: _Profile = None,
) -> int:
    """Prepare the data of a text: small generated data for lite modes, the real set for the others."""
    from mezzo.tipc import prepare as prepare_files
    from mezzo.tipc import this_machine

    prepare_files(
        written_text(config),
        mode,
        root=Path.cwd(),
        has_gpu=this_machine().gpus > 0,
        profile=profile,
        data=data,
        url=url,
        sha256=sha256,
        report=say,
    )
    return 0


@app.command()
def report(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Folders of runs, or folders above them.")
    ],
    out: Annotated[Path, option("Path of the page (.html), or a folder for it.", "--out")] = Path("tipc_report"),
) -> int:
    """Merge runs into one page and one JUnit file."""
    from mezzo.tipc import merge_reports

    junit, page = merge_reports(directories, out)
    say(f"{junit}\n{page}")
    return 0


@app.command()
def matrix(
    configs: Annotated[list[Path], typer.Argument(metavar="CONFIG...", help="TIPC texts, or names of recipes.")],
    mode: Annotated[str, option("Mode of all runs.", "--mode")] = _LITE,
    out: Annotated[Path, option("Path of the page (.html), or a folder for it.", "--out")] = Path("test_tipc/output"),
    with_prepare: Annotated[bool, option("Run `prepare` for each text first.", "--prepare")] = False,
    check: Annotated[bool, option("Add the checks of a certificate.", "--check")] = False,
    resume: Annotated[bool, option("Do not repeat steps that passed and have not changed.", "--resume")] = False,
    jobs: Annotated[int, option("Steps of one text that may run at the same time.", "-j", "--jobs")] = 1,
    step_limit: Annotated[float | None, option("Time limit of one step, in seconds.", "--step-limit")] = None,
    on: Annotated[
        str, option("Cluster that runs the steps: ray, ray://HOST:PORT, slurm, or k8s with --dry-run.", "--on")
    ] = "",
    step_memory: Annotated[str, option("Memory of each step on a cluster, such as 4G.", "--step-memory")] = "",
    dry_run: Annotated[bool, option("Print what would be run, and run nothing.", "--dry-run")] = False,
    slurm: Annotated[bool, option("Deprecated: --on slurm --dry-run.", "--slurm")] = False,
    use_ray: Annotated[bool, option("Deprecated: --on ray.", "--ray")] = False,
    history_file: History = None,
) -> int:
    """Run many texts and write one page about all of them."""
    _check_limits(jobs, step_limit)
    if [bool(on), slurm, use_ray].count(True) > 1:
        raise UsageError("--on, --slurm and --ray: give one of them")
    if slurm or use_ray:
        old, new = ("--slurm", "--on slurm --dry-run") if slurm else ("--ray", "--on ray")
        say(f"mezzo: {old} is deprecated and will be removed in 0.4; use {new}", err=True)
        on, dry_run = ("slurm", True) if slurm else ("ray", dry_run)
    from mezzo.tipc import BatchRun, preview_batch, run_batch

    options = BatchRun(
        tuple(configs),
        mode,
        out,
        with_prepare,
        check,
        resume,
        jobs,
        step_limit,
        on=on,
        step_memory=step_memory,
        history=history_file,
    )
    if dry_run and on not in ("slurm", "k8s"):
        return max(run(config, mode, dry_run=True, check=check) for config in configs)
    if dry_run and on == "k8s":
        return preview_batch(options, say)
    batch = replace(options, configs=tuple(written_text(config) for config in configs))
    return preview_batch(batch, say) if dry_run else run_batch(batch, say)


app.command()(history)
app.command()(compare)
