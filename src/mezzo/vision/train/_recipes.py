"""Makes a recipe from options, which name a PaddleSeg file or a classifier."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from mezzo._options import options_of
from mezzo.checkpoint import find_weights
from mezzo.errors import OptionError
from mezzo.vision.data import TRAIN, has_split
from mezzo.vision.models import count_classes
from mezzo.vision.recipes import ClassifierOptions, Recipe, RecipeOptions, classification_recipe, load_recipe
from mezzo.vision.shipped import config_of

USUAL_FOLDERS = (Path("data"), Path("lite_data"), Path("ILSVRC2012"))
"""Folders of a classifier's images, as the documents name them; used without `data_path`."""
_BOTH_FORMS = ("data_path", "lr", "batch_size")


def with_usual_data(options: RecipeOptions) -> RecipeOptions:
    """Return the options with a folder of images.

    If they name neither a file nor a folder, add the first usual folder with images.
    """
    options = _with_shipped_file(options)
    if options.config is None and options.data_path is None:
        return replace(options, data_path=next((path for path in USUAL_FOLDERS if has_split(path, TRAIN)), None))
    return options


def make_recipe(options: RecipeOptions, weights: str | Path | None = None) -> Recipe:
    """Return the recipe that the options describe.

    Args:
        options: With `config`, `recipe` or `data_path`.
        weights: Weights to evaluate. Without `num_classes`, they must have the classes of the data.

    Raises:
        OptionError: Both or neither of `config` and `data_path` are given, or an option that
            belongs to the other one.
        ConfigError: The file or an option is wrong; the message has a line for each fault.
    """
    options = _with_shipped_file(options)
    if (options.config is None) == (options.data_path is None):
        given = "neither" if options.config is None else "both"
        usual = ", ".join(f"./{path}" for path in USUAL_FOLDERS)
        also = f"; {usual} hold no training images either" if options.config is None else ""
        raise OptionError(
            f"{given} of --config and --data-path: give --config FILE.yml to train by a configuration, or "
            f"--data-path DIR to train a classifier on a folder of images{also}"
        )
    _refuse_other_form(options)
    if options.config is not None:
        return load_recipe(
            options.config,
            opts=options.opts,
            batch_size=options.batch_size,
            iters=options.iters,
            learning_rate=options.lr,
        )
    own = {field.name: getattr(options, field.name) for field in fields(ClassifierOptions)}
    recipe = classification_recipe(ClassifierOptions(**own))
    if weights is not None and options.num_classes is None:
        _check_classes(weights, recipe)
    return recipe


def _with_shipped_file(options: RecipeOptions) -> RecipeOptions:
    """Return the options with the file of the recipe that they name."""
    if options.recipe is None:
        return options
    return replace(options, config=config_of(options.config, options.recipe), recipe=None)


def _refuse_other_form(options: RecipeOptions) -> None:
    of_classifiers = [each for each in options_of(ClassifierOptions) if each.name not in _BOTH_FORMS]
    of_files = [each for each in options_of(RecipeOptions) if each.name in ("iters", "opts")]
    for each in of_files if options.config is None else of_classifiers:
        if getattr(options, each.name) != each.default:
            form = "--data-path" if options.config is None else "--config: set it in the file"
            raise OptionError(f"{each.spellings[0]} cannot be used with {form}")


def _check_classes(weights: str | Path, recipe: Recipe) -> None:
    """Raise OptionError if weights are for another number of classes than the data has."""
    found = count_classes(recipe.model.name, find_weights(weights))
    if found is not None and found != recipe.num_classes:
        is_part = found > recipe.num_classes
        advice = f"; if the data are a part of a larger set, give --num-classes {found}" if is_part else ""
        raise OptionError(f"{weights} has {found} classes, the data have {recipe.num_classes}{advice}")
