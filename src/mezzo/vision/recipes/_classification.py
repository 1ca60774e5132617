"""The documented command line for classification as a recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from mezzo.vision.models import list_models, model_info
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
OPTIMIZERS = ("sgd", "rmsprop", "adam", "adamw")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def classification_recipe(
    *,
    data_path: str | Path,
    model: str = "mobilenet_v3_small",
    num_classes: int | None = None,
    lr: float = 0.1,
    batch_size: int = 256,
    epochs: int = 90,
    opt: str = "sgd",
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    lr_step_size: int = 30,
    lr_gamma: float = 0.1,
    auto_augment: str | None = None,
    random_erase: float = 0.0,
    crop_scale: float = 0.08,
    image_size: int = 224,
    resize_size: int = 256,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> Recipe:
    """Return how a classifier is trained on a folder of images.

    Args:
        data_path: Folder with train/CLASS/x.jpg and val/CLASS/x.jpg, or with train_list.txt and val_list.txt.
        model: A classifier of `mezzo.vision.models.list_models()`.
        num_classes: Classes; None counts those of the training data, for which the folder is opened.
        lr: First learning rate.
        batch_size: Images a step and process.
        epochs: Rounds over the training data.
        opt: sgd, rmsprop, adam or adamw.
        momentum: Of sgd and rmsprop.
        weight_decay: Of all parameters.
        lr_step_size: Epochs after which the rate is multiplied by `lr_gamma`, again and again.
        lr_gamma: See there.
        auto_augment: None, imagenet, ra or ta_wide.
        random_erase: Probability that a part of an image is covered.
        crop_scale: Smallest share of an image that a training crop may show.
        image_size: Side of the images that the network sees.
        resize_size: Length of the short side before the middle is cut out, in evaluation.
        mean: Of the channels, images being 0 to 1.
        std: Deviation of the channels.

    Raises:
        RecipeError: Options are wrong; the message has a line for each.
        DataError: The classes are to be counted, and the data cannot be read.
    """
    given = {name: _plain(value) for name, value in locals().items()}
    options = _Options()
    options.check_model(model)
    options.check("batch-size", check_integer, "batch_size", batch_size, at_least=1)
    options.check("epochs", check_integer, "epochs", epochs, at_least=1)
    if num_classes is not None:
        options.check("num-classes", check_integer, "num_classes", num_classes, at_least=1)
    curve = options.curve(lr, lr_step_size, lr_gamma)
    optimizer = options.optimizer(opt, lr, momentum, weight_decay)
    normalize = options.check("mean, --std", Normalize, mean, std)
    train = options.train_transforms(image_size, crop_scale, auto_augment, random_erase)
    val = options.val_transforms(image_size, resize_size)
    options.faults.raise_if_any()
    classes = num_classes or open_classification(data_path, "train").num_classes
    return Recipe(
        task="classification",
        model=ModelRecipe(name=model, options={"num_classes": classes}),
        num_classes=classes,
        train_data=_data(data_path, "train", classes, [*train, parsed(normalize)]),
        val_data=_data(data_path, "val", classes, [*val, parsed(normalize)]),
        batch_size=batch_size,
        iters=None,
        epochs=epochs,
        optimizer=parsed(optimizer),
        schedule=Schedule(curve=parsed(curve), unit="epoch"),
        loss=None,
        resolved={"task": "classification", **given, "num_classes": classes},
    )


class _Options:
    """Tries what options ask for and notes what is refused, under the names of the options."""

    def __init__(self) -> None:
        self.faults = FaultLog()

    def check(self, option: str, make: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """Return what a call makes of the value of an option, or None after noting why it refuses."""
        try:
            return make(*args, **kwargs)
        except REFUSALS as error:
            self.faults.add(SourceMark(f"--{option}"), str(error))
            return None

    def check_model(self, name: str) -> None:
        """Note a name that is no classifier."""
        known = [item for item in list_models() if model_info(item).task == "classification"]
        if name not in known:
            self.faults.add(SourceMark("--model"), unknown_choice("classifier", name, known))

    def curve(self, lr: float, step_size: int, gamma: float) -> StepDecay | None:
        """Return the steps of the learning rate."""
        self.check("lr", check_number, "lr", lr, above=0)
        self.check("lr-step-size", check_integer, "lr_step_size", step_size, at_least=1)
        self.check("lr-gamma", check_number, "lr_gamma", gamma, above=0, at_most=1)
        return None if self.faults else StepDecay(learning_rate=lr, step_size=step_size, gamma=gamma)

    def optimizer(self, opt: str, lr: float, momentum: float, weight_decay: float) -> OptimizerRecipe | None:
        """Return the optimizer."""
        if opt not in OPTIMIZERS:
            self.faults.add(SourceMark("--opt"), unknown_choice("optimizer", opt, OPTIMIZERS))
            return None
        kind: Any = opt
        self.check("momentum", OptimizerRecipe, kind="sgd", lr=1.0, momentum=momentum)
        self.check("wd", check_number, "weight_decay", weight_decay, at_least=0)
        return None if self.faults else OptimizerRecipe(kind=kind, lr=lr, momentum=momentum, weight_decay=weight_decay)

    def train_transforms(self, size: int, scale: float, policy: str | None, erase: float) -> list[Transform]:
        """Return what training images go through: a part of the image, mirrored, augmented, covered."""
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
        """Return what images go through in evaluation: the short side to its length, then the middle."""
        found: list[Transform | None] = [
            self.check("resize-size", ResizeShort, resize_size),
            self.check("image-size", CenterCrop, size),
        ]
        return [transform for transform in found if transform is not None]


def _data(root: str | Path, split: str, classes: int, transforms: list[Transform]) -> DataRecipe:
    options = {"root": root, "split": split, "num_classes": classes}
    return DataRecipe(factory=open_classification, options=options, transforms=Compose(transforms))


def _plain(value: Any) -> Any:
    """Return an argument as YAML can hold it."""
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
