"""A small recipe that is right, and what tests change in it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from mezzo.vision.recipes import Recipe, RecipeError, load_recipe

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "test_tipc" / "configs"

TEXT = """\
batch_size: 4
iters: 100
train_dataset:
  type: Dataset
  dataset_root: data/people
  train_path: data/people/train.txt
  num_classes: 2
  mode: train
  transforms:
    - type: Resize
      target_size: [64, 32]
    - type: RandomHorizontalFlip
    - type: Normalize
val_dataset:
  type: Dataset
  dataset_root: data/people
  val_path: data/people/val.txt
  num_classes: 2
  mode: val
  transforms:
    - type: Normalize
optimizer:
  type: sgd
  momentum: 0.9
  weight_decay: 0.0005
lr_scheduler:
  type: PolynomialDecay
  learning_rate: 0.01
  end_lr: 0
  power: 0.9
loss:
  types:
    - type: CrossEntropyLoss
  coef: [1]
model:
  type: PPHumanSegLite
"""
PLAIN: dict[str, Any] = yaml.safe_load(TEXT)


def changed(**blocks: Any) -> dict[str, Any]:
    """Return the small recipe with blocks replaced; None takes a block away."""
    data = {**copy.deepcopy(PLAIN), **blocks}
    return {key: value for key, value in data.items() if value is not None}


def load(folder: Path, data: str | dict[str, Any], **options: Any) -> Recipe:
    """Return the recipe of a text or of plain data, through a file."""
    path = folder / "r.yml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return load_recipe(path, **options)


def faults(folder: Path, data: str | dict[str, Any], **options: Any) -> list[str]:
    """Return the lines of the error that loading raises, without the folder and without what is allowed."""
    with pytest.raises(RecipeError) as caught:
        load(folder, data, **options)
    lines = str(caught.value).replace(f"{folder}/", "").splitlines()
    return [line.partition(": must be")[0] for line in lines]
