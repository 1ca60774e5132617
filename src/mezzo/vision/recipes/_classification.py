"""The recipe of the classification command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from mezzo._arguments import check_integer, check_number
from mezzo.errors import unknown_choice
from mezzo.files import SourceMark
from mezzo.vision.data import (
    AutoAugment,
    CenterCrop,
    Compose,
    Normalize,
    RandomErase,
    RandomResizedCrop,
    ResizeShort,
    Transform,
    open_classification,
)
from mezzo.vision.data.transforms import RandomHorizontalFlip
from mezzo.vision.options import BATCH_SIZE, FIRST_RATE, OPTIMIZERS, ClassifierOptions, classifiers
from mezzo.vision.recipes._check import REFUSALS
from mezzo.vision.recipes._curves import StepDecay
from mezzo.vision.recipes._data import DataRecipe
from mezzo.vision.recipes._errors import FaultLog, parsed
from mezzo.vision.recipes._model import ModelRecipe
from mezzo.vision.recipes._optimizers import OptimizerRecipe
from mezzo.vision.recipes._recipe import Recipe
from mezzo.vision.recipes._schedules import Schedule

P = ParamSpec("P")
R = TypeVar("R")


def classification_recipe(settings: ClassifierOptions) -> Recipe:
    """Return the recipe of a classifier that is trained on a folder of images.

    Raises:
        RecipeError: Options are wrong; the message has a line for each of them.
        DataError: `num_classes` is None, and the data, which give it, cannot be read.
    """
    root = settings.data_path
    if root is None:
        raise ValueError("data_path is missing: give the folder of images")
    lr = FIRST_RATE if settings.lr is None else settings.lr
    batch_size = BATCH_SIZE if settings.batch_size is None else settings.batch_size
    settings = replace(settings, lr=lr, batch_size=batch_size)
    options = _Options()
    options.check_model(settings.model)
    options.check("batch-size", check_integer, "batch_size", batch_size, at_least=1)
    options.check("epochs", check_integer, "epochs", settings.epochs, at_least=1)
    if settings.num_classes is not None:
        options.check("num-classes", check_integer, "num_classes", settings.num_classes, at_least=1)
    curve = options.curve(lr, settings.lr_step_size, settings.lr_gamma)
    optimizer = options.optimizer(settings.opt, lr, settings.momentum, settings.weight_decay)
    normalize = options.check("mean, --std", Normalize, settings.mean, settings.std)
    train = options.train_transforms(
        settings.image_size, settings.crop_scale, settings.auto_augment, settings.random_erase
    )
    val = options.val_transforms(settings.image_size, settings.resize_size)
    options.faults.raise_if_any()
    classes = settings.num_classes or open_classification(root, "train").num_classes
    resolved = {name: _plain(value) for name, value in asdict(settings).items()}
    return Recipe(
        task="classification",
        model=ModelRecipe(name=settings.model, options={"num_classes": classes}),
        num_classes=classes,
        train_data=_data(root, "train", classes, [*train, parsed(normalize)]),
        val_data=_data(root, "val", classes, [*val, parsed(normalize)]),
        batch_size=batch_size,
        iters=None,
        epochs=settings.epochs,
        optimizer=parsed(optimizer),
        schedule=Schedule(curve=parsed(curve), unit="epoch"),
        loss=None,
        resolved={"task": "classification", **resolved, "num_classes": classes},
    )


class _Options:
    """Builds the parts of a recipe, and collects a fault for each option that is refused."""

    def __init__(self) -> None:
        self.faults = FaultLog()

    def check(self, option: str, make: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """Return `make(*args, **kwargs)`; if it refuses the value, add a fault and return None."""
        try:
            return make(*args, **kwargs)
        except REFUSALS as error:
            self.faults.add(SourceMark(f"--{option}"), str(error))
            return None

    def check_model(self, name: str) -> None:
        """Add a fault unless the name is a classifier."""
        known = list(classifiers())
        if name not in known:
            self.faults.add(SourceMark("--model"), unknown_choice("classifier", name, known))

    def curve(self, lr: float, step_size: int, gamma: float) -> StepDecay | None:
        """Return the schedule of the learning rate, or None after a fault."""
        self.check("lr", check_number, "lr", lr, above=0)
        self.check("lr-step-size", check_integer, "lr_step_size", step_size, at_least=1)
        self.check("lr-gamma", check_number, "lr_gamma", gamma, above=0, at_most=1)
        return None if self.faults else StepDecay(learning_rate=lr, step_size=step_size, gamma=gamma)

    def optimizer(self, opt: str, lr: float, momentum: float, weight_decay: float) -> OptimizerRecipe | None:
        """Return the optimizer, or None after a fault."""
        if opt not in OPTIMIZERS:
            self.faults.add(SourceMark("--opt"), unknown_choice("optimizer", opt, OPTIMIZERS))
            return None
        kind: Any = opt
        self.check("momentum", OptimizerRecipe, kind="sgd", lr=1.0, momentum=momentum)
        self.check("wd", check_number, "weight_decay", weight_decay, at_least=0)
        return None if self.faults else OptimizerRecipe(kind=kind, lr=lr, momentum=momentum, weight_decay=weight_decay)

    def train_transforms(self, size: int, scale: float, policy: str | None, erase: float) -> list[Transform]:
        """Return the transforms of training images: random crop, flip, augmentation and erasing."""
        found: list[Transform | None] = [
            self.check("image-size, --crop-scale", RandomResizedCrop, size, (scale, 1.0)),
            RandomHorizontalFlip(0.5),
        ]
        if policy is not None:
            found.append(self.check("auto-augment", AutoAugment, policy))
        if erase != 0:
            found.append(self.check("random-erase", RandomErase, erase))
        return [transform for transform in found if transform is not None]

    def val_transforms(self, size: int, resize_size: int) -> list[Transform]:
        """Return the transforms of evaluation: resize the short side, then crop the center."""
        found: list[Transform | None] = [
            self.check("resize-size", ResizeShort, resize_size),
            self.check("image-size", CenterCrop, size),
        ]
        return [transform for transform in found if transform is not None]


def _data(root: str | Path, split: str, classes: int, transforms: list[Transform]) -> DataRecipe:
    options = {"root": root, "split": split, "num_classes": classes}
    return DataRecipe(factory=open_classification, options=options, transforms=Compose(transforms))


def _plain(value: Any) -> Any:
    """Return an argument as YAML data."""
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
