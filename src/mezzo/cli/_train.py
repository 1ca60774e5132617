"""`mezzo train`, `mezzo eval`, `mezzo prepare`; train.py and tools/val.py call these too."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from mezzo._options import Option, Subset
from mezzo.cli._show import progress_bar
from mezzo.errors import OptionError, require
from mezzo.files import say
from mezzo.vision.options import RecipeOptions, RunOptions

LITE_SETS = ("imagenet_lite", "mini_supervisely", "cityscapes")
_EVALUATED = Subset(
    "config", "recipe", "opts", "data_path", "model", "num_classes", "batch_size", "image_size", "resize_size"
)
_EVALUATION = Subset(
    "precision", "amp_level", "fp8", "amp_use_promote", "amp_lists", "pretrained", "device", "workers"
)  # fmt: skip


def train(
    recipe: RecipeOptions,
    options: RunOptions,
    use_vdl: Annotated[bool, Option("Accepted; TensorBoard events are always written.")] = False,
    test_only: Annotated[bool, Option("Evaluate, do not train.")] = False,
) -> int:
    """Train a network by a file or a classifier on images.

    Give --config FILE.yml (PaddleSeg) or --data-path DIR. Start with torchrun to use several devices.
    """
    require("cv2", "PIL", "safetensors", extra="vision")
    if options.wandb:
        require("wandb", extra="wandb")
    from mezzo.vision.data import has_split
    from mezzo.vision.train import evaluate, make_recipe, train

    recipe = _with_data(recipe)
    if recipe.config is not None and options.start_epoch:
        raise OptionError("--start-epoch cannot be used with --config: set iters in the file")
    if test_only:
        evaluate(make_recipe(recipe, options.pretrained or options.resume), options)
        return 0
    has_val = recipe.data_path is not None and has_split(Path(recipe.data_path), "val")
    train(make_recipe(recipe), replace(options, do_eval=options.do_eval or has_val))
    return 0


def evaluate(recipe: Annotated[RecipeOptions, _EVALUATED], options: Annotated[RunOptions, _EVALUATION]) -> int:
    """Evaluate weights on validation data.

    The data are those of a configuration (--config) or of a folder of images (--data-path).
    """
    require("cv2", "PIL", "safetensors", extra="vision")
    from mezzo.vision.train import evaluate, make_recipe

    recipe = _with_data(recipe)
    evaluate(make_recipe(recipe, options.pretrained), replace(options, eval_batch_size=recipe.batch_size))
    return 0


def _with_data(recipe: RecipeOptions) -> RecipeOptions:
    """Return the options with a usual folder of images if they name none; the first process prints which."""
    from mezzo.vision.train import with_usual_data

    found = with_usual_data(recipe)
    if found.data_path != recipe.data_path and os.environ.get("RANK", "0") == "0":
        say(f"no --data-path: the images of ./{found.data_path} are used")
    return found


def prepare(
    name: Annotated[str, Option(f"{', '.join(LITE_SETS)}.", suggest=lambda: LITE_SETS, is_argument=True)],
    directory: Annotated[Path, Option("Folder to create.", is_argument=True)],
) -> int:
    """Generate a small data set to try commands on.

    The images are the same each time, and a network can learn from them.
    """
    require("cv2", "PIL", extra="vision")
    from mezzo.vision.lite import prepare

    with progress_bar() as report:
        summary = prepare(name, directory, progress=lambda done, total: report(name, done, total))
    say(summary)
    return 0
