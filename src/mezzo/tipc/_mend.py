"""What the scripts get wrong, set right before a plan is run; each change leaves a notice that the report shows."""

import functools
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from posixpath import basename, normpath, relpath

from mezzo.files import FileError, MiB, read_bytes
from mezzo.tipc._config import LITE_CPU, LITE_MODES, MODES, ConfigError
from mezzo.tipc._plan import CVD, Plan, Step
from mezzo.tipc._profile import Profile
from mezzo.tipc._profiles import PROFILES
from mezzo.tipc._shell import dangerous
from mezzo.tipc._text import evaluated
from mezzo.tipc._wanted import recipes_of
from mezzo.tipc._weights import left_out

Works = Callable[[str, bool], bool]
_DEVICE = re.compile(r"(--device[= ])(?:gpu|cuda)(?::\d+)?(?!\S)")


@dataclass(frozen=True)
class Allowances:
    """What a user lets pass or wants refused."""

    shell: bool = False
    unknown_mode: bool = False
    strict_devices: bool = False


def mend(
    plan: Plan,
    *,
    root: Path,
    gpus: int,
    allow: Allowances,
    folder: str = "",
    visible: str | None = None,
    works: Works | None = None,
    lacking: Mapping[str, str] | None = None,
) -> Plan:
    """Return the plan as it is run here.

    Args:
        plan: What the script would do.
        root: Where its commands run.
        gpus: How many this machine shows us.
        allow: What is let pass.
        folder: Logs of this run go there, and are known by the documented names as well; empty: the documented ones alone.
        visible: CUDA_VISIBLE_DEVICES of the runner: card 0 of a plan is the first of these.
        works: Tells whether an interpreter can be used.
        lacking: Addresses of weights that cannot be had, each with the reason: lite modes leave them out.

    Raises:
        ConfigError: It must not be run at all.

    """
    works = works or interpreter_works
    if plan.mode not in MODES and not allow.unknown_mode:
        raise ConfigError(
            f"unknown mode '{plan.mode}': the scripts would train at full length; known are {', '.join(MODES)}"
            " (--allow-unknown-mode to go on)"
        )
    profile = PROFILES[plan.profile]
    placed = [_placed(step, plan.steps, index) for index, step in enumerate(plan.steps)]
    steps = [step for step in placed if step.kind != "shell"]
    if not allow.shell:
        for step in steps:
            if found := dangerous(step.bare):
                raise ConfigError(
                    f"the command of {step.name} holds an unquoted {found[0]!r}, which would run more than one command: "
                    f"{step.bare.strip()[:200]} (--allow-shell to run it all the same)"
                )
    own = dict.fromkeys(f"no part of the chain: {step.text}" for step in plan.steps if step.kind == "shell")
    steps = [_devices(step, profile, gpus, allow, visible) for step in steps]
    steps = [_interpreter(step, works, profile.runs_mezzo) for step in steps]
    if gpus == 0:
        steps = [_on_cpu(step) for step in steps]
    if profile.runs_mezzo and plan.mode in LITE_MODES:
        steps = [left_out(step, root, lacking or {}) for step in steps]
    if gpus == 0 and plan.mode in LITE_MODES:
        steps = [_small_crops(step, root) for step in steps]
    steps = _logs(steps, folder or plan.log_dir)
    return replace(plan, steps=tuple(steps), left_out=(*plan.left_out, *own), mended=True)


def _placed(step: Step, steps: Sequence[Step], index: int) -> Step:
    """Return a step that stands for itself: folder and log from the root, no bars, no limit of the script's."""
    enter, log = folder_of(steps, index), step.log
    if enter and log and not log.startswith("/"):
        log = normpath(f"{enter[0]}/{log}")
        step = step.reworded(step.log, relpath(log, enter[0]))
    text, bare = evaluated(step.text), evaluated(step.bare)
    status = step.status if step.status is None else step.status.replace(step.text, text)
    return replace(step, enter=enter, log=log, text=text, bare=bare, status=status, time_limit=None)


def _devices(step: Step, profile: Profile, gpus: int, allow: Allowances, visible: str | None) -> Step:
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
    if step.kind in ("train", "linear") and lacking:
        what = f"needs {_in_words(len(cards))} ({','.join(cards)}), this machine has {_in_words(gpus)}"
        if allow.strict_devices or gpus:  # recipes for GPUs are small enough for a CPU where there is no GPU only
            return replace(step, env=env, skip=what)
        if len(cards) > 1 and not profile.runs_mezzo:
            return replace(step, env=env, skip=f"{what}, and this launcher starts no CPU processes")
        instead = "trained on the CPU" if len(cards) == 1 else f"trained as {len(cards)} CPU processes"
        return replace(step, env={**env, CVD: ""}, notices=(*step.notices, f"{what}: {instead}"))
    if not cards and gpus and step.env.get(CVD):
        cards = [step.env[CVD] or ""]  # the card that was asked for on the command line
    if gpus and cards:
        used = cards if step.kind == "train" and not lacking else ["0"] if lacking else cards[:1]
        env[CVD] = ",".join(_shown(card, visible) for card in used)
    return replace(step, env=env)


def _in_words(gpus: int) -> str:
    """Return a number of GPUs for people.

    >>> _in_words(0), _in_words(1), _in_words(2), _in_words(8)
    ('no GPU', 'one GPU', 'two GPUs', '8 GPUs')
    """
    word = ("no", "one", "two", "three", "four")[gpus] if gpus <= 4 else str(gpus)
    return f"{word} GPU{'s' if gpus > 1 else ''}"


def _on_cpu(step: Step) -> Step:
    """Let a step that is run on a machine without GPU not ask for one."""
    found = _DEVICE.search(step.bare)
    if found is None or step.skip or step.labels.get("device") == "gpu":
        return step
    notice = f"no GPU: {found[1]}cpu in place of {found[0]}"
    return replace(step.reworded(found[0], f"{found[1]}cpu"), notices=(*step.notices, notice))


def _shown(card: str, visible: str | None) -> str:
    """Return what a card of the plan is called here: a scheduler may have given us others than the first."""
    masked = (visible or "").split(",")
    return masked[int(card)] if visible and card.isdigit() and int(card) < len(masked) else card


def _interpreter(step: Step, works: Works, ours: bool) -> Step:
    word = step.bare.split(" ", 1)[0]
    if not re.fullmatch(r"python[0-9.]*", word) or works(word, ours):
        return step
    what = f"{word} is not installed{' with mezzo' if ours else ''}"
    notice = f"{what}: run by {sys.executable} (Python {sys.version.split()[0]})"
    return replace(step.reworded(word, shlex.quote(sys.executable), once=True), notices=(*step.notices, notice))


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
    for name in recipes_of(step):
        recipe = Path(name)
        for small in (recipe.with_name(LITE_CPU), recipe.with_name(f"{Path(LITE_CPU).stem}_{recipe.stem}.yml")):
            if _base_of(root / small) == recipe.name:
                notice = f"no GPU: {small.name} (crops of 128x64) in place of {recipe.name}"
                return replace(step.reworded(name, str(small)), notices=(*step.notices, notice))
    return step


def _base_of(path: Path) -> str | None:
    """Return the recipe that a small variant builds on, None if there is no such file."""
    try:
        text = read_bytes(path, limit=MiB).decode(errors="replace")
    except FileError:
        return None
    found = re.search(r"^\{?_base_: ([^\s,}]+)", text, re.MULTILINE)
    return found[1].strip("'\"") if found is not None else None


def _logs(steps: list[Step], folder: str) -> list[Step]:
    """Give every step a log in the run's own folder, and every log one step."""
    times = Counter(step.log for step in steps if step.log)
    done = []
    for step in steps:
        stem, dot, end = basename(step.log).rpartition(".")
        name = f"{step.name}.log" if not step.log else f"{stem}{dot}{end}"
        if times[step.log] > 1:
            name = f"{stem}_{step.name}{dot}{end}"
        log, shown = f"{folder}/{name}", _from(f"{folder}/{name}", step)
        if step.log and shown != _from(step.log, step):
            step = replace(step.reworded(_from(step.log, step), shown), known_as=(step.log, *step.known_as))
        done.append(replace(step, log=log))
    return done


def _from(path: str, step: Step) -> str:
    """Return a path as the command of a step writes it, which may run in another folder."""
    return relpath(path, step.enter[0]) if step.enter and not path.startswith("/") else path


def folder_of(steps: Sequence[Step], index: int) -> tuple[str, ...]:
    """Return the folder a step runs in as one change from the root: the scripts' changes follow one another."""
    path: list[str] = []
    for step in steps[: index + 1]:
        for change in step.enter:
            if change.startswith("/"):
                path = [""]
            for part in change.split("/"):
                if part == ".." and path and path[-1] != "..":
                    path.pop()
                elif part not in ("", "."):
                    path.append(part)
    return ("/".join(path),) if any(path) else ()
