"""Run a plan as the shell scripts do: one command after the other, with their verdicts, whatever fails."""

import glob
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mezzo.files import FileError, plain, read_bytes
from mezzo.tipc._plan import Plan, PlanStep
from mezzo.tipc._process import Ended, environment, run_command, training_logs
from mezzo.tipc._record import append_line
from mezzo.tipc._text import evaluated

Replan = Callable[[str], Plan]


def run_as_scripts(
    plan: Plan, root: Path, replan: Replan, stop: Callable[[], str] = lambda: ""
) -> list[tuple[PlanStep, Ended, bool]]:
    """Run a plan from `root`; return each step, how it ended, and the verdict of the script.

    Args:
        plan: The plan.
        root: The working directory at the start.
        replan: Returns the plan for the case that the weights of the named training are missing.
        stop: Returns why the run has to stop, empty if it need not.

    """
    done: list[tuple[PlanStep, Ended, bool]] = []
    status_file = root / plan.status_file
    if plan.banner:
        append_line(status_file, plan.banner_line)
    elif plan.model or plan.steps:
        status_file.parent.mkdir(parents=True, exist_ok=True)
    folder, index, replanned = root, 0, False
    while index < len(plan.steps) and not stop():
        step = _expanded(plan.steps[index], folder)
        for change in step.enter:  # the script ignores a change that fails
            if (folder / change).is_dir():
                folder = Path(os.path.normpath(folder / change))
        ended = _run(step, folder, stop)
        passed = _passed(step, ended, folder)
        if step.status is not None:
            line = step.status_line(passed)
            _print_status(line)
            append_line(status_file, line)
        done.append((step, ended, passed))
        if step.fallback and not replanned and not (folder / step.checkpoint).is_file():
            plan, replanned = replan(step.name), True  # the script uses the other name from then on
        index += 1
    return done


def _print_status(line: str) -> None:
    """Print a status line in the scripts' colour; control characters of the text are left out."""
    print(f"\x1b[33m{plain(line)}\x1b[0m", flush=True)


def _expanded(step: PlanStep, folder: Path) -> PlanStep:
    """Expand the wildcards that the script expands when it composes the command."""
    if not step.pattern:
        return step
    found = sorted(glob.glob(step.pattern, root_dir=folder))
    return step.with_text(step.pattern, " ".join(found)) if found else step


def _run(step: PlanStep, folder: Path, stop: Callable[[], str]) -> Ended:
    command = evaluated(step.text)
    log = folder / step.log if step.output in ("tee", "file") else None
    echo = sys.stdout.buffer if step.output == "tee" else None
    if step.output == "file":
        command, log = f"{command} > {step.log} 2>&1", None
    sys.stdout.flush()
    ended = run_command(
        command, env=environment(step), cwd=folder, log=log, limit=step.time_limit, stop=stop, echo=echo
    )
    if step.output in ("text", "file") and step.log:
        _print_log(folder / step.log)
    if ended.stopped and step.time_limit is not None and ended.code is None:
        ended = replace(ended, code=124 if ended.stopped.startswith("longer") else 128 + signal.SIGTERM)
    return ended


def _print_log(log: Path) -> None:
    """Print a log, as the scripts do after the command."""
    try:
        data = read_bytes(log)
    except FileError:
        return  # the command has written none; the `cat` of the scripts fails too
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _passed(step: PlanStep, ended: Ended, folder: Path) -> bool:
    """Return the verdict of the script: the exit status, or whether a training log could be copied, which is done here."""
    found = training_logs(step, folder)
    if found is None:
        return ended.code == 0
    try:
        text = b"".join(read_bytes(path) for path in found)
        if found and step.copied_to:
            with (folder / step.copied_to).open("ab") as file:
                file.write(text)
    except (FileError, OSError):
        return False
    return bool(found)
