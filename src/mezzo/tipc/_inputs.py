"""What the commands of a plan read: recipes (YAML files), data, images and weights. The name of the model is not used."""

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
from mezzo.tipc._plan import Plan, PlanStep
from mezzo.tipc._profiles import PROFILES
from mezzo.tipc._shell import option_values
from mezzo.tipc._text import evaluated
from mezzo.vision.recipes import Recipe, load_recipe


@dataclass(frozen=True, slots=True)
class DataInput:
    """A folder that commands read a data set from."""

    dataset: DataSet | None
    """Its form; None: `prepare` cannot make it."""
    folder: str
    """Relative to the root."""
    source: str
    """The option, line or recipe that names it, for messages."""
    lists: tuple[str, ...] = ()
    """List files that a recipe names: relative to the root, or else to the folder."""
    is_passed: bool = True
    """Whether a command names the folder; otherwise the script uses its default."""

    def first_missing(self, root: Path, folder: Path | None = None) -> str | None:
        """Return the first file or pattern that is missing, None if the data look complete.

        Args:
            root: The root of relative paths.
            folder: Where the data are now, if not in their place yet.
        """
        there = folder or root / self.folder
        if not os.path.isdir(there):
            return self.folder
        if self.lists:
            return next((name for name in self.lists if not self._has_list(name, root, there)), None)
        return self.dataset.first_missing(there) if self.dataset is not None else None

    def _has_list(self, name: str, root: Path, there: Path) -> bool:
        inside = relpath(name, self.folder)
        place = root / name if inside.startswith("..") else there / inside
        return os.path.isfile(place) or os.path.isfile(there / name)


@dataclass(frozen=True, slots=True)
class WeightsInput:
    """Weights that a training downloads and starts from."""

    url: str
    setting: str
    """The recipe's setting, as `--opts` takes it."""


def recipes_of(step: PlanStep) -> list[str]:
    """Return the recipes that a command reads; inference reads what an export has written."""
    if step.kind in ("infer", "shell"):
        return []
    named = option_values(evaluated(step.bare), "--config")
    return [name for name in dict.fromkeys(named) if name.endswith((".yml", ".yaml"))]


def find_recipes(plan: Plan) -> list[str]:
    """Return the recipes that the commands of a plan read, each once."""
    return list(dict.fromkeys(name for step in plan.steps for name in recipes_of(step)))


def find_data(plan: Plan, config: Config, root: Path) -> list[DataInput]:
    """Return the data that the commands of a plan read, each folder once.

    Raises:
        RecipeError: A recipe is wrong.
    """
    found = [each for name in find_recipes(plan) for each in _data_of_recipe(load_recipe(root / name), name)]
    passed = [name for step in plan.steps for name in option_values(evaluated(step.bare), "--data-path")]
    found += [DataInput(dataset_of(CLASSIFICATION), name, "--data-path") for name in passed]
    if not found and "data" in LAYOUTS[PROFILES[plan.profile].layout]:  # a line that no command gets
        folder = _value(config, "data") or "data"
        found = [DataInput(dataset_of(CLASSIFICATION), folder, f"the line {config['data'].key}", is_passed=False)]
    merged: dict[str, DataInput] = {}
    for each in found:
        key = normpath(each.folder)
        before = merged.get(key, each)
        merged[key] = replace(before, lists=tuple(dict.fromkeys((*before.lists, *each.lists))))
    return list(merged.values())


def _value(config: Config, name: str) -> str:
    value = config[name].value.strip()
    return "" if value == "null" else value


def _data_of_recipe(recipe: Recipe, name: str) -> Iterable[DataInput]:
    for split in ("train_dataset", "val_dataset"):
        block = recipe.resolved.get(split) or {}
        if isinstance(folder := block.get("dataset_root"), str):
            path = block.get(f"{block.get('mode', 'train')}_path")
            lists = (path,) if isinstance(path, str) else ()
            yield DataInput(dataset_of(str(block.get("type"))), folder, f"{split} of {name}", lists)


def find_images(plan: Plan, config: Config) -> list[str]:
    """Return the images, folders or lists that inference reads."""
    steps = [step for step in plan.steps if step.kind == "infer"]
    named = [name for step in steps for name in option_values(evaluated(step.bare), "--img-path", "--image-path")]
    if not named and not PROFILES[plan.profile].data and (line := _value(config, "i_img")):
        named = [line]  # no command gets it: the inference script has the same default
    return list(dict.fromkeys(named))


def find_weights(step: PlanStep, root: Path) -> Iterator[WeightsInput]:
    """Yield the weights that a training downloads.

    Raises:
        RecipeError: Its recipe is wrong.
    """
    command = evaluated(step.bare)
    if step.kind != "train" or option_values(command, "--pretrained", "--resume", "--resume-model"):
        return
    for name in recipes_of(step):
        if not os.path.isfile(root / name):
            continue  # the command itself reports it
        recipe = load_recipe(root / name, opts=_overrides(step))
        if recipe.pretrained is not None:
            setting, url = "model.pretrained", recipe.pretrained
        else:
            setting, url = "model.backbone.pretrained", recipe.backbone_pretrained or ""
        if is_url(url):
            yield WeightsInput(url, setting)


def _overrides(step: PlanStep) -> list[str]:
    """Return the settings that a command changes in its recipe: `--opts a=1 b=2`."""
    found, is_setting = [], False
    for word in step.words:
        if word.startswith("--"):
            is_setting = word == "--opts"
            if word.startswith("--opts="):
                found.append(word.removeprefix("--opts="))
        elif is_setting:
            found.append(word)
    return found
