"""Adapt a plan to this machine and repair what the scripts get wrong; each change leaves a notice in the report."""

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
from mezzo.tipc._inputs import recipes_of
from mezzo.tipc._plan import CVD, Plan, PlanStep, directory_of
from mezzo.tipc._profiles import PROFILES
from mezzo.tipc._shell import find_shell_syntax, gpu_options
from mezzo.tipc._text import evaluated
from mezzo.tipc._weights import train_without_weights

InterpreterTest = Callable[[str, bool], bool]


@dataclass(frozen=True)
class Allowances:
    """What a user allows, or wants to have refused."""

    shell: bool = False
    """Run commands with unquoted shell syntax."""
    unknown_mode: bool = False
    """Run modes that the scripts do not know."""
    strict_devices: bool = False
    """Skip trainings whose GPUs are missing instead of running them on the CPU."""


def adapt_plan(
    plan: Plan,
    *,
    root: Path,
    gpus: int,
    allow: Allowances,
    folder: str = "",
    visible: str | None = None,
    works: InterpreterTest | None = None,
    missing_weights: Mapping[str, str] | None = None,
) -> Plan:
    """Return the plan as it is run on this machine.

    Args:
        plan: What the script would do.
        root: The directory that its commands run in.
        gpus: The number of GPUs that this process can use.
        allow: What is allowed.
        folder: The folder for the logs of this run; the documented paths become links. Empty: the documented paths.
        visible: CUDA_VISIBLE_DEVICES of this process: card 0 of a plan is its first card.
        works: Returns whether an interpreter can be used, and whether with mezzo; replaces `interpreter_works`.
        missing_weights: Addresses of weights that cannot be fetched, each with the reason. Lite modes train without.

    Raises:
        ConfigError: The mode is unknown, or a command has unquoted shell syntax.

    """
    profile = PROFILES[plan.profile]
    is_lite = plan.mode in LITE_MODES
    placed = [_from_root(step, plan.steps, index) for index, step in enumerate(plan.steps)]
    steps = [step for step in placed if step.kind != "shell"]
    _refuse(plan.mode, steps, allow)
    not_run = dict.fromkeys(f"no part of the chain: {step.text}" for step in plan.steps if step.kind == "shell")
    placement = _Placement(gpus, visible, allow.strict_devices, can_use_cpu_processes=profile.runs_mezzo)
    steps = [placement.place(step) for step in steps]
    steps = [_with_interpreter(step, works or interpreter_works, profile.runs_mezzo) for step in steps]
    if gpus == 0:
        steps = [_without_gpu_option(step) for step in steps]
    if profile.runs_mezzo and is_lite:
        steps = [train_without_weights(step, root, missing_weights or {}) for step in steps]
    if gpus == 0 and is_lite:
        steps = [_with_small_recipe(step, root) for step in steps]
    steps = _with_own_logs(steps, folder or plan.log_dir)
    return replace(plan, steps=tuple(steps), left_out=(*plan.left_out, *not_run), adapted=True)


def _refuse(mode: str, steps: Sequence[PlanStep], allow: Allowances) -> None:
    """Raise ConfigError for a plan that must not be run."""
    if mode not in MODES and not allow.unknown_mode:
        raise ConfigError(
            f"unknown mode '{mode}': the scripts would train at full length; must be one of {', '.join(MODES)}"
            " (--allow-unknown-mode to run it)"
        )
    for step in () if allow.shell else steps:
        if found := find_shell_syntax(step.bare):
            raise ConfigError(
                f"the command of {step.name} has an unquoted {found[0]!r}, which would run more than one command: "
                f"{step.bare.strip()[:200]} (--allow-shell to run it)"
            )


def _from_root(step: PlanStep, steps: Sequence[PlanStep], index: int) -> PlanStep:
    """Return a step whose directory and log are relative to the root, without bars and the script's time limit."""
    enter, log = directory_of(steps, index), step.log
    if enter and log and not log.startswith("/"):
        log = normpath(f"{enter[0]}/{log}")
        step = step.with_text(step.log, relpath(log, enter[0]))
    text, bare = evaluated(step.text), evaluated(step.bare)
    status = step.status if step.status is None else step.status.replace(step.text, text)
    return replace(step, enter=enter, log=log, text=text, bare=bare, status=status, time_limit=None)


@dataclass(frozen=True)
class _Placement:
    """Decides which devices a step runs on."""

    gpus: int
    visible: str | None
    is_strict: bool
    can_use_cpu_processes: bool

    def place(self, step: PlanStep) -> PlanStep:
        """Return the step with its cards, with a notice about the CPU, or with the reason why it is skipped."""
        env: dict[str, str | None] = {key: value for key, value in step.env.items() if key != CVD}
        step, asked_for = replace(step, env=env), step.env.get(CVD)
        if int(step.labels.get("nodes", "1")) > 1:
            return replace(step, skip="several hosts: start it there through your scheduler")
        if step.labels.get("device") == "gpu" and self.gpus == 0:
            return replace(step, skip="no GPU")
        cards = [card for card in step.labels.get("devices", "").split(",") if card.isdigit()]
        has_all = all(int(card) < self.gpus for card in cards)
        if step.kind in ("train", "linear") and not has_all:
            return self._on_cpu(step, cards)
        if not cards and asked_for:
            cards = [asked_for]  # the card of the command line
        if self.gpus and cards:
            used = ["0"] if not has_all else cards if step.kind == "train" else cards[:1]
            return replace(step, env={**env, CVD: ",".join(map(self._real_card, used))})
        return step

    def _on_cpu(self, step: PlanStep, cards: list[str]) -> PlanStep:
        """Return a training whose cards are missing: on the CPU if that is possible, otherwise skipped."""
        what = f"needs {_count_gpus(len(cards))} ({','.join(cards)}), this machine has {_count_gpus(self.gpus)}"
        if self.is_strict or self.gpus:  # recipes are made small enough for a CPU only where there is no GPU
            return replace(step, skip=what)
        if len(cards) > 1 and not self.can_use_cpu_processes:
            return replace(step, skip=f"{what}, and this launcher starts no CPU processes")
        instead = "trained on the CPU" if len(cards) == 1 else f"trained as {len(cards)} CPU processes"
        return replace(step, env={**step.env, CVD: ""}).with_notice(f"{what}: {instead}")

    def _real_card(self, card: str) -> str:
        """Return the number of a plan's card on this machine: a scheduler may have given us others than the first."""
        cards = (self.visible or "").split(",")
        return cards[int(card)] if self.visible and card.isdigit() and int(card) < len(cards) else card


def _count_gpus(gpus: int) -> str:
    """Return a number of GPUs in words.

    >>> _count_gpus(0), _count_gpus(1), _count_gpus(2), _count_gpus(8)
    ('no GPU', 'one GPU', 'two GPUs', '8 GPUs')
    """
    word = ("no", "one", "two", "three", "four")[gpus] if gpus <= 4 else str(gpus)
    return f"{word} GPU{'s' if gpus > 1 else ''}"


def _without_gpu_option(step: PlanStep) -> PlanStep:
    """Replace `--device gpu` by `--device cpu`."""
    options = [option for option in gpu_options(step.bare) if option.name == "--device"]
    if not options or step.skip or step.labels.get("device") == "gpu":
        return step
    given, instead = options[0].text, f"{options[0].name}{options[0].joint}cpu"
    return step.with_text(given, instead).with_notice(f"no GPU: {instead} in place of {given}")


def _with_interpreter(step: PlanStep, works: InterpreterTest, needs_mezzo: bool) -> PlanStep:
    """Replace an interpreter that cannot be used by the one that runs this process."""
    word = step.bare.split(" ", 1)[0]
    if not re.fullmatch(r"python[0-9.]*", word) or works(word, needs_mezzo):
        return step
    what = f"{word} is not installed{' with mezzo' if needs_mezzo else ''}"
    notice = f"{what}: run by {sys.executable} (Python {sys.version.split()[0]})"
    return step.with_text(word, shlex.quote(sys.executable), once=True).with_notice(notice)


@functools.cache
def interpreter_works(word: str, needs_mezzo: bool) -> bool:
    """Return whether an interpreter starts and, if needed, has torch and mezzo.

    Looking for the file is not enough: the stand-in of a version manager exists and does not start.
    """
    if shutil.which(word) is None:
        return False
    has_mezzo = "import importlib.util as u, sys; sys.exit(not (u.find_spec('torch') and u.find_spec('mezzo')))"
    try:
        probe = [word, "-c", has_mezzo if needs_mezzo else ""]
        return subprocess.run(probe, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _with_small_recipe(step: PlanStep, root: Path) -> PlanStep:
    """Use the small variant of a recipe that `prepare` has written beside it."""
    for name in recipes_of(step):
        recipe = Path(name)
        for small in (recipe.with_name(LITE_CPU), recipe.with_name(f"{Path(LITE_CPU).stem}_{recipe.stem}.yml")):
            if _base_of(root / small) == recipe.name:
                notice = f"no GPU: {small.name} (crops of 128x64) in place of {recipe.name}"
                return step.with_text(name, str(small)).with_notice(notice)
    return step


def _base_of(path: Path) -> str | None:
    """Return the recipe that a small variant builds on, None if there is no such file."""
    try:
        text = read_bytes(path, limit=MiB).decode(errors="replace")
    except FileError:
        return None
    found = re.search(r"^\{?_base_: ([^\s,}]+)", text, re.MULTILINE)
    return found[1].strip("'\"") if found is not None else None


def _with_own_logs(steps: list[PlanStep], folder: str) -> list[PlanStep]:
    """Give every step its own log in the run's folder."""
    times = Counter(step.log for step in steps if step.log)
    done = []
    for step in steps:
        stem, dot, end = basename(step.log).rpartition(".")
        name = f"{step.name}.log" if not step.log else f"{stem}{dot}{end}"
        if times[step.log] > 1:
            name = f"{stem}_{step.name}{dot}{end}"
        log = f"{folder}/{name}"
        before, after = _seen_from(step, step.log), _seen_from(step, log)
        if step.log and before != after:
            step = replace(step.with_text(before, after), known_as=(step.log, *step.known_as))
        done.append(replace(step, log=log))
    return done


def _seen_from(step: PlanStep, path: str) -> str:
    """Return a path as the command of a step writes it, which may run in another directory."""
    return relpath(path, step.enter[0]) if step.enter and not path.startswith("/") else path
