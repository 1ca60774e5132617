"""What the commands of a plan look for: recipes, data, images, weights. The name of the model does not matter."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from posixpath import normpath, relpath

from mezzo.fetch import is_url
from mezzo.tipc._config import Config
from mezzo.tipc._datasets import CLASSIFICATION, DataSet, dataset_of
from mezzo.tipc._layouts import LAYOUTS
from mezzo.tipc._plan import Plan, Step
from mezzo.tipc._profiles import PROFILES
from mezzo.tipc._shell import option_values, words
from mezzo.tipc._text import evaluated
from mezzo.vision.recipes import Recipe, load_recipe


@dataclass(frozen=True, slots=True)
class WantedData:
    """A folder that commands read a data set from."""

    dataset: DataSet | None
    """Its form; None for one that is not made here."""
    folder: str
    """From the root."""
    source: str
    """Who names it, for messages."""
    lists: tuple[str, ...] = ()
    """List files that a recipe names: from the root, or else from the folder."""
    is_passed: bool = True
    """Whether the commands name the folder themselves, or leave it to the script's default."""

    def lacks(self, root: Path, folder: Path | None = None) -> str | None:
        """Return the first file or pattern that is missing, None if the data look complete.

        Args:
            root: What paths are relative to.
            folder: Where the data lie now, if not in their place yet.
        """
        there = folder or root / self.folder
        if not os.path.isdir(there):
            return self.folder
        if self.lists:
            return next((name for name in self.lists if not self._has(name, root, there)), None)
        return self.dataset.lacks(there) if self.dataset is not None else None

    def _has(self, name: str, root: Path, there: Path) -> bool:
        inside = relpath(name, self.folder)
        place = root / name if inside.startswith("..") else there / inside
        return os.path.isfile(place) or os.path.isfile(there / name)


@dataclass(frozen=True, slots=True)
class WantedWeights:
    """Weights that a training starts from, named by an address."""

    url: str
    setting: str
    """In the recipe, as `--opts` takes it."""


def recipes_of(step: Step) -> list[str]:
    """Return the YAML files that a command reads; inference reads what an export has written."""
    if step.kind in ("infer", "shell"):
        return []
    named = option_values(evaluated(step.bare), "--config")
    return [name for name in dict.fromkeys(named) if name.endswith((".yml", ".yaml"))]


def all_recipes(plan: Plan) -> list[str]:
    """Return the YAML files that the commands of a plan read, each once."""
    return list(dict.fromkeys(name for step in plan.steps for name in recipes_of(step)))


def data_of(plan: Plan, config: Config, root: Path) -> list[WantedData]:
    """Return the data that the commands of a plan read, each folder once.

    Raises:
        ConfigError: A recipe is wrong.
    """
    found = [each for name in all_recipes(plan) for each in _data_of_recipe(load_recipe(root / name), name)]
    passed = [name for step in plan.steps for name in option_values(evaluated(step.bare), "--data-path")]
    found += [WantedData(dataset_of(CLASSIFICATION), name, "--data-path") for name in passed]
    if not found and "data" in LAYOUTS[PROFILES[plan.profile].layout]:  # a line that no command gets
        folder = _said(config, "data") or "data"
        found = [WantedData(dataset_of(CLASSIFICATION), folder, f"the line {config['data'].key}", is_passed=False)]
    merged: dict[str, WantedData] = {}
    for each in found:
        key = normpath(each.folder)
        before = merged.get(key, each)
        merged[key] = replace(before, lists=tuple(dict.fromkeys((*before.lists, *each.lists))))
    return list(merged.values())


def _said(config: Config, name: str) -> str:
    value = config[name].value.strip()
    return "" if value == "null" else value


def _data_of_recipe(recipe: Recipe, name: str) -> Iterable[WantedData]:
    for split in ("train_dataset", "val_dataset"):
        block = recipe.resolved.get(split) or {}
        if isinstance(folder := block.get("dataset_root"), str):
            path = block.get(f"{block.get('mode', 'train')}_path")
            lists = (path,) if isinstance(path, str) else ()
            yield WantedData(dataset_of(str(block.get("type"))), folder, f"{split} of {name}", lists)


def images_of(plan: Plan, config: Config) -> list[str]:
    """Return the images, folders or lists that inference reads; the tutorial's form leaves its image to the script."""
    steps = [step for step in plan.steps if step.kind == "infer"]
    named = [name for step in steps for name in option_values(evaluated(step.bare), "--img-path", "--image-path")]
    if not named and not PROFILES[plan.profile].data and (line := _said(config, "i_img")):
        named = [line]
    return list(dict.fromkeys(named))


def weights_of(step: Step, root: Path) -> Iterator[WantedWeights]:
    """Yield the weights behind an address that a training starts from.

    Raises:
        ConfigError: Its recipe is wrong.
    """
    command = evaluated(step.bare)
    if step.kind != "train" or option_values(command, "--pretrained", "--resume", "--resume-model"):
        return
    for name in recipes_of(step):
        if not os.path.isfile(root / name):
            continue  # its command says so
        recipe = load_recipe(root / name, opts=_changes(command))
        if recipe.pretrained is not None:
            setting, url = "model.pretrained", recipe.pretrained
        else:
            setting, url = "model.backbone.pretrained", recipe.backbone_pretrained or ""
        if is_url(url):
            yield WantedWeights(url, setting)


def _changes(command: str) -> list[str]:
    """Return the changes of a recipe in a command: `--opts a=1 b=2`."""
    found, takes = [], False
    for word in words(command):
        if word.startswith("--"):
            takes = word == "--opts"
            if word.startswith("--opts="):
                found.append(word.removeprefix("--opts="))
        elif takes:
            found.append(word)
    return found
