"""Export the network of a PaddleSeg file, or a classifier by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mezzo.checkpoint import find_weights
from mezzo.export import Description, ExportOptions, ExportReport, PrintLine, export_model
from mezzo.vision.data import DataError
from mezzo.vision.infer import read_batches
from mezzo.vision.models import load_trained
from mezzo.vision.options import IMAGENET_MEAN, IMAGENET_STD
from mezzo.vision.recipes import Recipe


def describe_recipe(recipe: Recipe, class_names: Sequence[str] = ()) -> Description:
    """Return the description of a PaddleSeg file's network, with the transforms of its validation data."""
    block = recipe.resolved.get("val_dataset") or recipe.resolved.get("train_dataset") or {}
    transforms = tuple(block.get("transforms") or ({"type": "Normalize"},))
    return Description(
        task="segmentation",
        model_name=recipe.model.name,
        num_classes=recipe.num_classes,
        class_names=tuple(class_names),
        transforms=transforms,
    )


def describe_classifier(
    name: str,
    num_classes: int,
    *,
    image_size: int = 224,
    resize_size: int = 256,
    class_names: Sequence[str] = (),
) -> Description:
    """Return the description of a classifier: resize, centre crop, ImageNet's mean and deviation."""
    return Description(
        task="classification",
        model_name=name,
        num_classes=num_classes,
        class_names=tuple(class_names),
        transforms=(
            {"type": "ResizeShort", "size": resize_size},
            {"type": "CenterCrop", "size": image_size},
            {"type": "Normalize", "mean": list(IMAGENET_MEAN), "std": list(IMAGENET_STD)},
        ),
    )


def export_recipe(
    recipe: Recipe,
    weights: Path | str | None,
    options: ExportOptions,
    *,
    calibration: Sequence[Path] = (),
    class_names: Sequence[str] = (),
    say: PrintLine = lambda line: None,
) -> ExportReport:
    """Export the network of a PaddleSeg file; verified with its validation images, calibrated with its training images.

    Args:
        recipe: The file.
        weights: A file, or the folder of a checkpoint or a run; None takes those that the file names, or none.
        options: What is written, and where.
        calibration: Images for int8 instead of the training images.
        class_names: In their order.
        say: Takes a line about each step.
    """
    network = recipe.create_model()
    given = weights or recipe.pretrained
    if given is not None:
        say(str(load_trained(network, find_weights(given))))
    else:
        say("no weights given (--model_path): the network is exported as it was initialised")
    images = _images(recipe, "val", say) or calibration
    calibration = calibration or (_images(recipe, "train", say) if "int8" in options.precisions else ())
    described = describe_recipe(recipe, class_names)
    return export_model(
        network, described, options, images=images, calibration=calibration, read_images=read_batches, say=say
    )


def _images(recipe: Recipe, split: str, say: PrintLine) -> list[Path]:
    """Return images spread over a split; none, with a printed reason, if the data are missing."""
    data = recipe.val_data if split == "val" else recipe.train_data
    if data is None:
        return []
    try:
        opened = data.open()
    except DataError as error:
        say(f"no real images of the {split} split: {error}")
        return []
    step = max(1, len(opened) // 200)
    return [Path(opened.path(index)) for index in range(0, len(opened), step)]
