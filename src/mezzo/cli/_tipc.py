"""`mezzo tipc`: plan, run and report TIPC configurations; also what the scripts in test_tipc/ call."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mezzo.cli._options import UsageError, option
from mezzo.files import plain, say

if TYPE_CHECKING:
    from mezzo.tipc import Plan, Profile

app = typer.Typer(help="Certify the chain train, evaluate, export, infer by TIPC configurations.", no_args_is_help=True)

_Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration text.")]
_Mode = Annotated[str, typer.Argument(metavar="MODE", help="lite_train_lite_infer and so on.")]
_GpuId = Annotated[str, typer.Argument(metavar="[GPU]", help="Card for whole_infer.")]
_Profile = Annotated[str | None, option("Whose commands [the repository's, or by the text's form].", "--profile")]


def _planned(config: Path, mode: str, profile: str | None, gpu_id: str) -> "tuple[str, Profile, Plan, str]":
    from mezzo.tipc import choose_profile, make_plan, read_config

    text = read_config(config)
    chosen, why = choose_profile(profile, text, Path.cwd())
    return text, chosen, make_plan(text, mode, chosen, str(Path.cwd()), gpu_id), why


@app.command()
def plan(
    config: _Config,
    mode: _Mode,
    gpu_id: _GpuId = "",
    profile: _Profile = None,
    compat: Annotated[bool, option("As the shell scripts do, nothing mended.", "--compat")] = False,
    form: Annotated[str, option("text, json or shell.", "--format")] = "text",
) -> int:
    """Print the commands of a configuration without running anything."""
    from mezzo.errors import MezzoError, unknown_choice

    if form not in ("text", "json", "shell"):
        raise UsageError(unknown_choice("--format", form, ("text", "json", "shell")))
    from mezzo.tipc import Allowances, mend
    from mezzo.tipc._print import as_shell, as_text

    text, _, made, why = _planned(config, mode, profile, gpu_id)
    if not compat:
        from mezzo.tipc._machine import this_machine
        from mezzo.tipc._presence import lacks
        from mezzo.tipc._weights import not_cached

        root, gpus = Path.cwd(), this_machine().gpus
        found = tuple(plain(line) for _, line in lacks(made, text, root, gpus))
        try:
            lacking = not_cached(made, root)
        except MezzoError:  # said in `found`
            lacking = {}
        allow = Allowances(shell=True, unknown_mode=True)
        made = replace(mend(made, root=root, gpus=gpus, allow=allow, lacking=lacking), lacks=found)
    say(made.as_json() if form == "json" else as_shell(made) if form == "shell" else as_text(made, why))
    return 0 if made.steps else 3


@app.command("lint")
def lint_(config: _Config, mode: _Mode, profile: _Profile = None) -> int:
    """Say what is odd about a configuration: exit status 1 for errors, 0 for warnings or nothing."""
    from mezzo.tipc import lint
    from mezzo.tipc._machine import this_machine

    text, chosen, made, why = _planned(config, mode, profile, "")
    findings = lint(text, mode, chosen, made, Path.cwd(), this_machine().gpus)
    say(f"profile {chosen.name}, {why}")
    for finding in findings:
        say(finding)
    errors = sum(finding.serious for finding in findings)
    say(f"{errors} error{'' if errors == 1 else 's'}, {len(findings) - errors} warnings")
    return 1 if errors else 0


@app.command()
def run(
    config: _Config,
    mode: _Mode,
    gpu_id: _GpuId = "",
    profile: _Profile = None,
    compat: Annotated[bool, option("Run exactly the shell's commands, known defects included.", "--compat")] = False,
    keep_going: Annotated[bool, option("Run followers of failed steps.", "--keep-going")] = False,
    dry_run: Annotated[bool, option("Print what would be run, and stop.", "--dry-run")] = False,
    resume: Annotated[bool, option("Skip what passed before, unchanged.", "--resume")] = False,
    jobs: Annotated[int, option("Steps side by side, if devices are free.", "-j", "--jobs")] = 1,
    step_limit: Annotated[float | None, option("Seconds for one step.", "--step-limit")] = None,
    total_limit: Annotated[float | None, option("Seconds for all.", "--total-limit")] = None,
    strict_devices: Annotated[bool, option("Skip what needs GPUs that are not there.", "--strict-devices")] = False,
    allow_shell: Annotated[bool, option("Run texts with ; & ` or $( as well.", "--allow-shell")] = False,
    allow_unknown_mode: Annotated[bool, option("Do not refuse other modes.", "--allow-unknown-mode")] = False,
    strict: Annotated[bool, option("Refuse texts that the lint finds errors in.", "--strict")] = False,
    check: Annotated[bool, option("Add the checks of a certificate.", "--check")] = False,
    as_json: Annotated[bool, option("Print JSON lines alone.", "--json")] = False,
) -> int:
    """Run a configuration: exit status 0 all passed, 1 a command failed, 2 bad input, 3 nothing to do."""
    if jobs < 1:
        raise UsageError(f"--jobs {jobs}: must be at least 1")
    for name, value in (("--step-limit", step_limit), ("--total-limit", total_limit)):
        if value is not None and value <= 0:
            raise UsageError(f"{name} {value:g}: must be more than 0 seconds")
    from mezzo.tipc import Allowances
    from mezzo.tipc._certify import Request, certify, run_compat
    from mezzo.tipc._run import RunOptions

    if compat:
        others = {
            "--resume": resume,
            "--check": check,
            "--json": as_json,
            "--strict-devices": strict_devices,
            "--strict": strict,
        }
        others |= {"--jobs": jobs > 1, "--step-limit": bool(step_limit), "--total-limit": bool(total_limit)}
        if given := [name for name, value in others.items() if value]:
            raise UsageError(f"--compat and {given[0]}: the scripts know nothing like it; leave one of them out")
        if dry_run:
            return plan(config, mode, gpu_id, profile, True, "shell")
        return run_compat(config, mode, profile, gpu_id)
    request = Request(
        config,
        mode,
        profile=profile,
        gpu_id=gpu_id,
        allow=Allowances(shell=allow_shell, unknown_mode=allow_unknown_mode, strict_devices=strict_devices),
        options=RunOptions(keep_going, step_limit, total_limit, jobs, resume),
        check=check,
        strict=strict,
    )
    return certify(request, Path.cwd(), dry_run=dry_run, as_json=as_json)


@app.command()
def prepare(
    config: _Config,
    mode: _Mode,
    extra: Annotated[str, typer.Argument(metavar="[EXTRA]", help="Accepted; not used.")] = "",
    data: Annotated[Path | None, option("The real data set, for whole_* modes.", "--data")] = None,
    url: Annotated[str | None, option("Archive of it, with --sha256.", "--url")] = None,
    sha256: Annotated[str | None, option("Checksum of the archive.", "--sha256")] = None,
    profile: _Profile = None,
) -> int:
    """Prepare the data of a configuration: generated in lite modes, the real set in the others."""
    from mezzo.tipc._machine import this_machine
    from mezzo.tipc._prepare import prepare as make_ready

    make_ready(
        config,
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
    directories: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Runs, or folders above them.")],
    out: Annotated[Path, option("The page, or a folder for it.", "--out")] = Path("tipc_report"),
) -> int:
    """Merge runs into one page and one JUnit file."""
    from mezzo.tipc._report import merge

    junit, page = merge(directories, out)
    say(f"{junit}\n{page}")
    return 0


@app.command()
def matrix(
    configs: Annotated[list[Path], typer.Argument(metavar="CONFIG...", help="Configurations.")],
    mode: Annotated[str, option("lite_train_lite_infer and so on.", "--mode")] = "lite_train_lite_infer",
    out: Annotated[Path, option("The page about all, or a folder for it.", "--out")] = Path("test_tipc/output"),
    with_prepare: Annotated[bool, option("Prepare the data of each first.", "--prepare")] = False,
    check: Annotated[bool, option("Add the checks of a certificate.", "--check")] = False,
    resume: Annotated[bool, option("Skip what passed before, unchanged.", "--resume")] = False,
    jobs: Annotated[int, option("Steps of one configuration side by side.", "-j", "--jobs")] = 1,
    step_limit: Annotated[float | None, option("Seconds for one step.", "--step-limit")] = None,
    slurm: Annotated[bool, option("Print a Slurm job array, and stop.", "--slurm")] = False,
    use_ray: Annotated[bool, option("Spread over a Ray cluster.", "--ray")] = False,
) -> int:
    """Run many configurations and write one page about all of them."""
    if slurm and use_ray:
        raise UsageError("--slurm and --ray: give one of them")
    from mezzo.tipc._many import Many, on_ray, run_many, slurm_array

    many = Many(tuple(configs), mode, out, with_prepare, check, resume, jobs, step_limit)
    if slurm:
        say(slurm_array(many))
        return 0
    return on_ray(many, say) if use_ray else run_many(many, say)
