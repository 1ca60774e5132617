"""What the commands of a plan call and read, compared with what is there: found before anything is run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from mezzo.errors import MezzoError
from mezzo.files import FileError
from mezzo.tipc._config import LITE_MODES, Config, parse_config
from mezzo.tipc._datasets import CLASSIFICATION
from mezzo.tipc._plan import Plan, Step
from mezzo.tipc._profiles import PROFILES
from mezzo.tipc._shell import option_values, words
from mezzo.tipc._text import evaluated
from mezzo.tipc._wanted import WantedData, data_of, images_of, recipes_of
from mezzo.tipc._weights import not_cached
from mezzo.vision.recipes import RecipeError, load_recipe

_TENSORRT = re.compile(r"--use[-_]trt[= ]True\b")
_GPU = re.compile(r"--(?:device[= ](?:gpu|cuda)\S*|use[-_]gpu[= ]True)(?!\S)")


def missing_scripts(plan: Plan, root: Path) -> list[str]:
    """Return a line for each script that a command calls and that is not there."""
    found = []
    for step, folder in _with_folders(plan, root):
        script = next((word for word in words(evaluated(step.bare)) if word.endswith(".py")), None)
        if script is not None and not os.path.isfile(folder / script):
            found.append(f"{script}: no such script, {step.name} calls it")
    return list(dict.fromkeys(found))


def lacks(plan: Plan, text: str, root: Path, gpus: int) -> Iterator[tuple[bool, str]]:
    """Yield what a run of a plan would lack, each with whether the run then fails.

    Args:
        plan: As the script has it.
        text: Of its configuration.
        root: Where its commands run.
        gpus: How many this machine has.
    """
    for line in missing_scripts(plan, root):
        yield True, line
    ours = PROFILES[plan.profile].runs_mezzo
    yield from _recipes(plan, root, ours)
    if ours:
        yield from _data(plan, parse_config(text, PROFILES[plan.profile]), root)
        yield from _weights(plan, root)
    for step, folder in _with_folders(plan, root):
        yield from _trained(step, folder)
        yield from _machine(step, gpus, ours)


def _recipes(plan: Plan, root: Path, ours: bool) -> Iterator[tuple[bool, str]]:
    for step, folder in _with_folders(plan, root):
        for name in recipes_of(step):
            if not os.path.isfile(folder / name):
                yield True, f"{name}: no such file, {step.name} reads it"
            elif ours:
                try:
                    load_recipe(folder / name)
                except MezzoError as error:
                    yield True, str(error)


def _data(plan: Plan, config: Config, root: Path) -> Iterator[tuple[bool, str]]:
    try:
        wanted = data_of(plan, config, root)
    except RecipeError:
        return  # said of the recipe
    for each in wanted:
        if (missing := each.lacks(root)) is not None:
            then = "`mezzo tipc prepare` makes it" if each.dataset is not None else "put the data in place"
            yield each.dataset is None, f"{each.folder}: no {missing} ({each.source} names the folder): {then}"
    for name in images_of(plan, config):
        if not os.path.exists(root / name):
            then = "`mezzo tipc prepare` makes it" if _is_made(name, wanted) else "put it in place"
            yield False, f"{name}: no such image, folder or list for inference: {then}"


def _is_made(name: str, wanted: list[WantedData]) -> bool:
    """Whether `prepare` makes an image or a list: a classifier's image, or what lies in a set that it draws."""
    made = [each for each in wanted if each.dataset is not None]
    is_inside = any(Path(name).is_relative_to(each.folder) for each in made)
    return is_inside or any(each.dataset and each.dataset.kind == CLASSIFICATION for each in made)


def _weights(plan: Plan, root: Path) -> Iterator[tuple[bool, str]]:
    try:
        lacking = not_cached(plan, root)
    except RecipeError:
        return  # said of the recipe
    except FileError as error:
        yield True, str(error)
        return
    then = "this mode starts without them" if plan.mode in LITE_MODES else "the run is refused"
    for url in lacking:
        yield False, f"weights {url}: not in the cache, they are fetched first; without a network {then}"


def _trained(step: Step, folder: Path) -> Iterator[tuple[bool, str]]:
    if step.kind == "export" and not step.needs:
        for name in option_values(step.bare, "--model-path", "--pretrained"):
            if not os.path.exists(folder / name):
                yield True, f"{name}: no such weights, {step.name} reads them and nothing in this mode trains them"


def _machine(step: Step, gpus: int, ours: bool) -> Iterator[tuple[bool, str]]:
    is_skipped = gpus == 0 and step.labels.get("device") == "gpu"
    if ours and _TENSORRT.search(step.bare) and not is_skipped:
        yield True, f"{step.name} asks for TensorRT, which mezzo does not have: leave --use_trt out, or False"
    if gpus == 0 and (found := _GPU.search(step.bare)):
        then = "is skipped" if is_skipped else "runs on the CPU"
        yield False, f"{step.name} asks for a GPU ({found[0]}), this machine has none: it {then}"


def _with_folders(plan: Plan, root: Path) -> Iterator[tuple[Step, Path]]:
    """Yield the commands of the chain, each with the folder it runs in: changes of folder follow one another."""
    folder = root
    for step in plan.steps:
        for change in step.enter:
            folder = folder / change
        if step.kind != "shell":
            yield step, folder
        if plan.mended:  # then each step starts from the root
            folder = root
