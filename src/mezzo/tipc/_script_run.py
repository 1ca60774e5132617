"""A plan run as the shell scripts run it: their commands, one after the other, with their verdicts, whatever fails."""

import glob
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mezzo.files import FileError, read_bytes
from mezzo.tipc._plan import Plan, PlanStep
from mezzo.tipc._process import Ended, environment, run_command, training_logs
from mezzo.tipc._status_file import append_line, print_status
from mezzo.tipc._text import evaluated

Replan = Callable[[str], Plan]


def run_as_scripts(
    plan: Plan, root: Path, replan: Replan, stop: Callable[[], str] = lambda: ""
) -> list[tuple[PlanStep, Ended, bool]]:
    """Run a plan from `root` and return what was run, how it ended and what the script makes of it.

    Args:
        plan: The plan.
        root: The working directory at the start.
        replan: Gives the plan that follows from weights that are missing after the training of that name.
        stop: A text ends the run.

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
        for change in step.enter:  # a change that fails leaves the script where it is
            if (folder / change).is_dir():
                folder = Path(os.path.normpath(folder / change))
        ended = _run(step, folder, stop)
        passed = _judged(step, ended, folder)
        if step.status is not None:
            line = step.status_line(passed)
            print_status(line)
            append_line(status_file, line)
        done.append((step, ended, passed))
        if step.fallback and not replanned and not (folder / step.checkpoint).is_file():
            plan, replanned = replan(step.name), True  # the script keeps the other name from then on
        index += 1
    return done


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
        _show(folder / step.log)
    if ended.stopped and step.time_limit is not None and ended.code is None:
        ended = replace(ended, code=124 if ended.stopped.startswith("longer") else 128 + signal.SIGTERM)
    return ended


def _show(log: Path) -> None:
    """Print a log, as the scripts do after the command."""
    try:
        data = read_bytes(log)
    except FileError:
        return  # the command has written none; the scripts' `cat` fails too
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _judged(step: PlanStep, ended: Ended, folder: Path) -> bool:
    """Return the scripts' own verdict: of some, the exit status of copying a training log, which is done here."""
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
