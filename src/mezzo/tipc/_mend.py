"""What the scripts get wrong, set right before a plan is run; each change leaves a notice that the report shows."""

import functools
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mezzo.tipc._config import LITE_MODES, MODES, ConfigError
from mezzo.tipc._plan import CVD, Plan, Step
from mezzo.tipc._profiles import PROFILES, Profile
from mezzo.tipc._shell import dangerous

Works = Callable[[str, bool], bool]
_YAML = re.compile(r"(?<=--config[ =])(\S+)/([^/\s]+\.ya?ml)\b")
LITE_CPU = "lite_cpu.yml"


@dataclass(frozen=True)
class Allowances:
    """What a user lets pass or wants refused."""

    shell: bool = False
    unknown_mode: bool = False
    strict_devices: bool = False


def mend(plan: Plan, *, root: Path, gpus: int, allow: Allowances, works: Works | None = None) -> Plan:
    """Return the plan as it is run here; raises ConfigError for what must not be run at all."""
    works = works or interpreter_works
    if plan.mode not in MODES and not allow.unknown_mode:
        raise ConfigError(
            f"unknown mode '{plan.mode}': the scripts would train at full length; known are {', '.join(MODES)}"
            " (--allow-unknown-mode to go on)"
        )
    if not allow.shell:
        for step in plan.steps:
            if found := dangerous(step.bare):
                raise ConfigError(
                    f"the command of {step.name} holds an unquoted {found[0]!r}, which would run more than one command: "
                    f"{step.bare.strip()[:200]} (--allow-shell to run it all the same)"
                )
    profile = PROFILES[plan.profile]
    placed = [replace(step, enter=_folder(plan.steps, index), time_limit=None) for index, step in enumerate(plan.steps)]
    steps = [step for step in placed if step.kind != "shell"]
    notices = {
        step.text: f"left out, as it is no part of the chain: {step.text}"
        for step in plan.steps
        if step.kind == "shell"
    }
    steps = [_devices(step, profile, gpus, allow) for step in steps]
    steps = [_interpreter(step, works, profile.launcher == "torchrun") for step in steps]
    if gpus == 0 and plan.mode in LITE_MODES:
        steps = [_small_crops(step, root) for step in steps]
    steps = _logs(steps, plan.log_dir)
    return replace(plan, steps=tuple(steps), left_out=(*plan.left_out, *notices.values()))


def _devices(step: Step, profile: Profile, gpus: int, allow: Allowances) -> Step:
    """Give a step the cards it needs, or say what it runs on instead."""
    devices = step.labels.get("devices", "")
    cards = [card for card in devices.split(",") if card.isdigit()]
    lacking = [card for card in cards if int(card) >= gpus]
    env: dict[str, str | None] = {key: value for key, value in step.env.items() if key != CVD}
    if int(step.labels.get("nodes", "1")) > 1:
        why = "several hosts: start it there through your scheduler"
        return replace(step, env=env, skip=why)
    if step.labels.get("device") == "gpu" and gpus == 0:
        return replace(step, env=env, skip="no GPU")
    here = f"this machine has {gpus or 'none'}" if gpus != 1 else "this machine has one GPU"
    if step.kind in ("train", "linear") and lacking:
        what = f"GPU{'s' if len(cards) > 1 else ''} {','.join(cards)} asked for, {here}"
        if allow.strict_devices or gpus:  # recipes for GPUs are small enough for a CPU where there is no GPU only
            return replace(step, env=env, skip=what)
        if len(cards) > 1 and profile.launcher != "torchrun":
            return replace(step, env=env, skip=f"{what}, and this launcher starts no CPU processes")
        instead = "trained on the CPU" if len(cards) == 1 else f"trained as {len(cards)} CPU processes"
        return replace(step, env={**env, CVD: ""}, notices=(*step.notices, f"{what}: {instead}"))
    if cards and not lacking:
        env[CVD] = devices if step.kind == "train" else cards[0]
    elif lacking and gpus:
        env[CVD] = "0"
    return replace(step, env=env)


def _interpreter(step: Step, works: Works, ours: bool) -> Step:
    word = step.bare.split(" ", 1)[0]
    if not re.fullmatch(r"python[0-9.]*", word) or works(word, ours):
        return step
    what = f"{word} is not installed{' with mezzo' if ours else ''}"
    notice = f"{what}: run by {sys.executable} (Python {sys.version.split()[0]})"
    return replace(step.reworded(word, sys.executable, once=True), notices=(*step.notices, notice))


@functools.cache
def interpreter_works(word: str, needs_mezzo: bool) -> bool:
    """Tell whether an interpreter is there and starts (a version manager's stand-in is there and does not), and has mezzo."""
    if shutil.which(word) is None:
        return False
    probe = (
        "import importlib.util as u, sys; sys.exit(not (u.find_spec('torch') and u.find_spec('mezzo')))"
        if needs_mezzo
        else ""
    )
    try:
        return subprocess.run([word, "-c", probe], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _small_crops(step: Step, root: Path) -> Step:
    """Take the small variant of a YAML file that `prepare` has written beside it."""
    found = _YAML.search(step.bare)
    if found is None or found[2] == LITE_CPU or not (root / found[1] / LITE_CPU).is_file():
        return step
    notice = f"no GPU: {LITE_CPU} (crops of 128x64) in place of {found[2]}"
    return replace(step.reworded(found[0], f"{found[1]}/{LITE_CPU}"), notices=(*step.notices, notice))


def _logs(steps: list[Step], folder: str) -> list[Step]:
    """Give every step a log, and every log one step."""
    times = Counter(step.log for step in steps if step.log)
    done = []
    for step in steps:
        if not step.log:
            step = replace(step, log=f"{folder}/{step.name}.log")
        elif times[step.log] > 1:
            stem, dot, end = step.log.rpartition(".")
            own = f"{stem}_{step.labels.get('trainer', '')}_gpus_{step.labels.get('devices', '')}_{step.name}{dot}{end}"
            step = replace(step.reworded(step.log, own), log=own)
        done.append(step)
    return done


def _folder(steps: Sequence[Step], index: int) -> tuple[str, ...]:
    """Return the folder a step runs in as one change from the root: the scripts' changes follow one another."""
    path: list[str] = []
    for step in steps[: index + 1]:
        for change in step.enter:
            for part in change.split("/"):
                if part == ".." and path and path[-1] != "..":
                    path.pop()
                elif part not in ("", "."):
                    path.append(part)
    return ("/".join(path),) if path else ()
