"""What the commands of a text look for: recipes, data, an image, weights. Read from the text, not from its model's name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from posixpath import normpath, relpath

from mezzo.config import Recipe, load_recipe
from mezzo.fetch import is_url
from mezzo.tipc._datasets import CLASSIFICATION, DataSet, dataset_of

_RECIPE = re.compile(r"--config[ =](\S+\.ya?ml)(?!\S)")
_DATA = re.compile(r"--data[-_]path[ =](\S+)")
_DATA_LINE = re.compile(r"^--data[-_]path:(\S+)", re.MULTILINE)
_IMAGE = re.compile(r"--(?:img|image)[-_]path[ =](\S+)")
_IMAGE_LINE = re.compile(r"^--(?:img|image)[-_]path:(\S+)", re.MULTILINE)
_IMAGES_LINE = re.compile(r"^train_infer_img_dir:(\S+)", re.MULTILINE)
_TRAINS = re.compile(r"^\w+:(?:\S*/)?train\.py\b", re.MULTILINE)


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
        if not there.is_dir():
            return self.folder
        if self.lists:
            return next((name for name in self.lists if not self._has(name, root, there)), None)
        return self.dataset.lacks(there) if self.dataset is not None else None

    def _has(self, name: str, root: Path, there: Path) -> bool:
        inside = relpath(name, self.folder)
        place = root / name if inside.startswith("..") else there / inside
        return place.is_file() or (there / name).is_file()


@dataclass(frozen=True, slots=True)
class WantedWeights:
    """Weights that a training starts from, named by an address."""

    url: str
    setting: str
    """In the recipe, as `--opts` takes it."""


def recipes_of(text: str) -> list[str]:
    """Return the YAML files that the commands of a text, or one command, name."""
    return list(dict.fromkeys(_RECIPE.findall(text)))


def data_of(text: str, root: Path) -> list[WantedData]:
    """Return the data that the commands of a text read, each folder once.

    Raises:
        ConfigError: A recipe is wrong.
    """
    found = [each for name in recipes_of(text) for each in _data_of_recipe(load_recipe(root / name), name)]
    passed = [WantedData(dataset_of(CLASSIFICATION), name, "--data-path") for name in _DATA.findall(text)]
    if not found and not passed and _TRAINS.search(text):
        line = _DATA_LINE.search(text)
        folder = line[1] if line is not None else "data"
        passed = [WantedData(dataset_of(CLASSIFICATION), folder, "the line --data-path", is_passed=False)]
    merged: dict[str, WantedData] = {}
    for each in (*found, *passed):
        key = normpath(each.folder)
        before = merged.get(key, each)
        merged[key] = replace(before, lists=tuple(dict.fromkeys((*before.lists, *each.lists))))
    return list(merged.values())


def _data_of_recipe(recipe: Recipe, name: str) -> Iterable[WantedData]:
    for split in ("train_dataset", "val_dataset"):
        block = recipe.resolved.get(split) or {}
        if isinstance(folder := block.get("dataset_root"), str):
            path = block.get(f"{block.get('mode', 'train')}_path")
            lists = (path,) if isinstance(path, str) else ()
            yield WantedData(dataset_of(str(block.get("type"))), folder, f"{split} of {name}", lists)


def image_of(text: str) -> str | None:
    """Return the image that a classifier's text names for inference and does not pass on, None where there is none."""
    line = _IMAGE_LINE.search(text)
    return None if line is None or _IMAGE.search(text) or recipes_of(text) else line[1]


def images_of(text: str) -> list[str]:
    """Return the images, folders or lists of images that a text has for inference after training."""
    return [name for name in _IMAGES_LINE.findall(text) if name != "null"]


def weights_of(recipe: Recipe) -> list[WantedWeights]:
    """Return the weights behind an address that a training by a recipe starts from."""
    if recipe.pretrained is not None:
        named = {"model.pretrained": recipe.pretrained}
    else:
        named = {"model.backbone.pretrained": recipe.backbone_pretrained or ""}
    return [WantedWeights(url, setting) for setting, url in named.items() if is_url(url)]
