"""What the commands of a plan need and this machine does not have: found before anything is run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from mezzo.errors import MezzoError
from mezzo.files import FileError
from mezzo.tipc._config import LITE_MODES, Config, parse_config
from mezzo.tipc._datasets import CLASSIFICATION
from mezzo.tipc._inputs import DataInput, find_data, find_images, recipes_of
from mezzo.tipc._plan import Plan, PlanStep, directory_of
from mezzo.tipc._profiles import PROFILES
from mezzo.tipc._shell import gpu_options, option_values
from mezzo.tipc._weights import uncached_weights
from mezzo.vision.recipes import RecipeError, load_recipe

_TENSORRT = re.compile(r"--use[-_]trt[= ]True\b")
Missing = tuple[bool, str]
"""Whether the run fails without it, and a line about it."""


def missing_scripts(plan: Plan, root: Path) -> list[str]:
    """Return a line for each script that a command calls and that does not exist."""
    found = []
    for step, folder in _with_folders(plan, root):
        script = next((word for word in step.words if word.endswith(".py")), None)
        if script is not None and not os.path.isfile(folder / script):
            found.append(f"{script}: no such script, {step.name} calls it")
    return list(dict.fromkeys(found))


def find_missing(plan: Plan, text: str, root: Path, gpus: int) -> Iterator[Missing]:
    """Yield what a run of a plan needs and does not find: whether the run fails without it, and a line about it.

    Args:
        plan: What the script would do.
        text: The configuration.
        root: The directory that its commands run in.
        gpus: The number of GPUs of this machine.
    """
    for line in missing_scripts(plan, root):
        yield True, line
    runs_mezzo = PROFILES[plan.profile].runs_mezzo
    yield from _recipes(plan, root, runs_mezzo)
    if runs_mezzo:
        yield from _data(plan, parse_config(text, PROFILES[plan.profile]), root)
        yield from _weights(plan, root)
    for step, folder in _with_folders(plan, root):
        yield from _trained_weights(step, folder)
        yield from _devices(step, gpus, runs_mezzo)


def _recipes(plan: Plan, root: Path, runs_mezzo: bool) -> Iterator[Missing]:
    for step, folder in _with_folders(plan, root):
        for name in recipes_of(step):
            if not os.path.isfile(folder / name):
                yield True, f"{name}: no such file, {step.name} reads it"
            elif runs_mezzo:
                try:
                    load_recipe(folder / name)
                except MezzoError as error:
                    yield True, str(error)


def _data(plan: Plan, config: Config, root: Path) -> Iterator[Missing]:
    try:
        inputs = find_data(plan, config, root)
    except RecipeError:
        return  # reported with the recipes
    for each in inputs:
        if (missing := each.first_missing(root)) is not None:
            then = "`mezzo tipc prepare` makes it" if each.dataset is not None else "put the data in place"
            yield each.dataset is None, f"{each.folder}: no {missing} ({each.source} names the folder): {then}"
    for name in find_images(plan, config):
        if not os.path.exists(root / name):
            then = "`mezzo tipc prepare` makes it" if _is_prepared(name, inputs) else "put it in place"
            yield False, f"{name}: no such image, folder or list for inference: {then}"


def _is_prepared(name: str, inputs: list[DataInput]) -> bool:
    """Return whether `prepare` makes an image or a list: an image of a classifier, or a part of a generated set."""
    generated = [each for each in inputs if each.dataset is not None]
    is_inside = any(Path(name).is_relative_to(each.folder) for each in generated)
    return is_inside or any(each.dataset and each.dataset.kind == CLASSIFICATION for each in generated)


def _weights(plan: Plan, root: Path) -> Iterator[Missing]:
    try:
        missing = uncached_weights(plan, root)
    except RecipeError:
        return  # reported with the recipes
    except FileError as error:
        yield True, str(error)
        return
    then = "this mode starts without them" if plan.mode in LITE_MODES else "the run is refused"
    for url in missing:
        yield False, f"weights {url}: not in the cache, they are fetched first; without a network {then}"


def _trained_weights(step: PlanStep, folder: Path) -> Iterator[Missing]:
    if step.kind == "export" and not step.needs:
        for name in option_values(step.bare, "--model-path", "--pretrained"):
            if not os.path.exists(folder / name):
                yield True, f"{name}: no such weights, {step.name} reads them and nothing in this mode trains them"


def _devices(step: PlanStep, gpus: int, runs_mezzo: bool) -> Iterator[Missing]:
    is_skipped = gpus == 0 and step.labels.get("device") == "gpu"
    if runs_mezzo and _TENSORRT.search(step.bare) and not is_skipped:
        yield True, f"{step.name} asks for TensorRT, which mezzo does not support: omit --use_trt, or set it to False"
    options = gpu_options(step.bare)
    if gpus == 0 and options:
        then = "is skipped" if is_skipped else "runs on the CPU"
        yield False, f"{step.name} asks for a GPU ({options[0].text}), this machine has none: it {then}"


def _with_folders(plan: Plan, root: Path) -> Iterator[tuple[PlanStep, Path]]:
    """Yield the steps except the script's own shell commands, each with the folder that it runs in."""
    for index, step in enumerate(plan.steps):
        if step.kind != "shell":
            changes = step.enter if plan.adapted else directory_of(plan.steps, index)
            yield step, root.joinpath(*changes)
