"""The options that describe what is trained: a PaddleSeg file, or a classifier on a folder of images."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mezzo._options import Option
from mezzo.vision.shipped import RECIPE_HELP, RECIPES

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
OPTIMIZERS = ("sgd", "rmsprop", "adam", "adamw")
POLICIES = ("imagenet", "ra", "ta_wide")
FIRST_RATE, BATCH_SIZE = 0.1, 256


def classifiers() -> Iterable[str]:
    """Return the names of all classifiers."""
    from mezzo.vision.models import list_models, model_info

    return [name for name in list_models() if model_info(name).task == "classification"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassifierOptions:
    """How a classifier is trained on a folder of images."""

    data_path: Annotated[
        Path | str | None,
        Option("Folder of images to train a classifier on.", "--data-path", default_text="data, lite_data, ILSVRC2012"),
    ] = None
    """It has train/CLASS/x.jpg and val/CLASS/x.jpg, or train_list.txt and val_list.txt."""
    model: Annotated[str, Option("Classifier, a name of `mezzo models`.", suggest=classifiers)] = "mobilenet_v3_small"
    num_classes: Annotated[int | None, Option("Number of classes.", default_text="as in the data")] = None
    lr: Annotated[
        float | None,
        Option("First learning rate.", "--learning-rate", "--lr", default_text=f"{FIRST_RATE}, or that of the file"),
    ] = None
    batch_size: Annotated[
        int | None,
        Option("Samples per process.", "--batch-size", "-b", default_text=f"{BATCH_SIZE}, or that of the file"),
    ] = None
    epochs: Annotated[int, Option("Passes over the training data.")] = 90
    opt: Annotated[str, Option(f"Optimizer: {', '.join(OPTIMIZERS)}.", suggest=lambda: OPTIMIZERS)] = "sgd"
    momentum: Annotated[float, Option("Momentum of sgd and rmsprop.")] = 0.9
    weight_decay: Annotated[float, Option("Weight decay of all parameters.", "--wd", "--weight-decay")] = 1e-4
    lr_step_size: Annotated[int, Option("Epochs between two decays of the learning rate.")] = 30
    lr_gamma: Annotated[float, Option("Factor of each decay.")] = 0.1
    auto_augment: Annotated[
        str | None, Option(f"Augmentation policy: {', '.join(POLICIES)}.", suggest=lambda: POLICIES)
    ] = None
    random_erase: Annotated[float, Option("Probability that a part of an image is covered.")] = 0.0
    crop_scale: Annotated[float, Option("Smallest share of an image in a training crop.")] = 0.08
    image_size: Annotated[int, Option("Side of the network's input.", "--image-size", "--crop-size")] = 224
    resize_size: Annotated[int, Option("Short side before the centre crop of an evaluation.")] = 256
    mean: tuple[float, ...] = IMAGENET_MEAN
    """Mean of each channel of images from 0 to 1."""
    std: tuple[float, ...] = IMAGENET_STD


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeOptions(ClassifierOptions):
    """What is trained: `config` names a PaddleSeg file, `data_path` the images of a classifier."""

    config: Annotated[Path | None, Option("PaddleSeg YAML file to train by.")] = None
    recipe: Annotated[str | None, Option(RECIPE_HELP, suggest=lambda: RECIPES)] = None
    iters: Annotated[int | None, Option("Steps of the run and of the decay (only with --config).")] = None
    opts: Annotated[
        tuple[str, ...], Option("Values to change in the file (only with --config).", metavar="KEY=VALUE...")
    ] = ()
