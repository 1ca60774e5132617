"""What a training command line says, as a recipe and the options of a run; both documented forms in one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mezzo.cli._options import UsageError

if TYPE_CHECKING:
    from mezzo.vision.recipes import Recipe
    from mezzo.vision.train import RunOptions

#: Options that only one of the two forms has.
_OF_CLASSIFICATION: tuple[str, ...] = (
    "data_path",
    "model",
    "epochs",
    "opt",
    "momentum",
    "weight_decay",
    "lr_step_size",
    "lr_gamma",
)
_OF_CLASSIFICATION += (
    "num_classes",
    "auto_augment",
    "random_erase",
    "crop_scale",
    "start_epoch",
    "image_size",
    "resize_size",
)
_OF_SEGMENTATION = ("iters", "opts")
DEFAULT_DATA = (Path("data"), Path("lite_data"), Path("ILSVRC2012"))
"""Where a classifier's images are looked for without --data-path: the places that the documents use."""
_SPELLED = {"weight_decay": "--wd"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """The options of a command line; None is one that was not given."""

    config: Path | None = None
    data_path: Path | None = None
    model: str | None = None
    num_classes: int | None = None
    epochs: int | None = None
    opt: str | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    lr_step_size: int | None = None
    lr_gamma: float | None = None
    auto_augment: str | None = None
    random_erase: float | None = None
    crop_scale: float | None = None
    image_size: int | None = None
    resize_size: int | None = None
    start_epoch: int | None = None
    iters: int | None = None
    opts: tuple[str, ...] = ()
    learning_rate: float | None = None
    batch_size: int | None = None
    precision: str | None = None
    amp_level: str | None = None

    def recipe(self, weights: str | Path | None = None) -> Recipe:
        """Return what is trained or evaluated.

        Args:
            weights: They are evaluated: unless the command line has a number of classes, theirs must be that of the data.

        Raises:
            UsageError: Neither or both of `--config` and `--data-path` are given, or an option of the other form.
        """
        from mezzo.vision.recipes import classification_recipe, load_recipe

        data_path = self._data_path()
        if (self.config is None) == (data_path is None):
            came = "neither" if self.config is None else "both"
            usual = ", ".join(f"./{path}" for path in DEFAULT_DATA)
            also = f"; {usual} hold no training images either" if self.config is None else ""
            raise UsageError(
                f"{came} of --config and --data-path: give --config FILE.yml to train by a configuration, or "
                f"--data-path DIR to train a classifier on a folder of images{also}"
            )
        self._refuse_others()
        if self.config is not None:
            return load_recipe(
                self.config,
                opts=self.opts,
                batch_size=self.batch_size,
                iters=self.iters,
                learning_rate=self.learning_rate,
            )
        given = {name: getattr(self, name) for name in _OF_CLASSIFICATION if name != "start_epoch"}
        given |= {"data_path": data_path, "lr": self.learning_rate, "batch_size": self.batch_size}
        recipe = classification_recipe(**{name: value for name, value in given.items() if value is not None})
        if weights is not None and self.num_classes is None:
            _check_classes(weights, recipe)
        return recipe

    def options(self, **others: Any) -> RunOptions:
        """Return how it is trained; `amp_level` alone means fp16 for a classifier, as in its document."""
        from mezzo.vision.train import RunOptions

        precision = self.precision
        if precision is None:
            precision = "fp32" if self.config is not None or self.amp_level in (None, "O0") else "fp16"
        others |= {"amp_level": self.amp_level, "start_epoch": self.start_epoch}
        given: dict[str, Any] = {name: value for name, value in others.items() if value is not None}
        return RunOptions(precision=precision, **given)

    def has_validation(self) -> bool:
        """Return whether a classifier's folder has images to evaluate on: then it is evaluated, asked or not."""
        from mezzo.vision.data import has_split

        data_path = self._data_path()
        return data_path is not None and has_split(data_path, "val")

    def assumed(self) -> str | None:
        """Return the line that says which folder is used where the command line names none."""
        found = self._data_path()
        return (
            None if found is None or self.data_path is not None else f"no --data-path: the images of ./{found} are used"
        )

    def _data_path(self) -> Path | None:
        """Return the folder of images; the documents' certification names none, then it is a usual one."""
        if self.config is None and self.data_path is None:
            from mezzo.vision.data import TRAIN, has_split

            return next((path for path in DEFAULT_DATA if has_split(path, TRAIN)), None)
        return self.data_path

    def _refuse_others(self) -> None:
        wrong = _OF_CLASSIFICATION[1:] if self.config is not None else _OF_SEGMENTATION
        given = [
            _SPELLED.get(name, f"--{name.replace('_', '-')}") for name in wrong if getattr(self, name) not in (None, ())
        ]
        if given:
            where = "with --config: it belongs into the file" if self.config is not None else "with --data-path"
            raise UsageError(f"{given[0]} cannot be used {where}")


def _check_classes(weights: str | Path, recipe: Recipe) -> None:
    """Raise UsageError if weights are for another number of classes than the data has."""
    from mezzo.checkpoint import find_weights
    from mezzo.vision.models import count_classes

    found = count_classes(recipe.model.name, find_weights(weights))
    if found is not None and found != recipe.num_classes:
        advice = (
            f"; if the data are a part of a larger set, give --num-classes {found}"
            if found > recipe.num_classes
            else ""
        )
        raise UsageError(f"{weights} has {found} classes, the data have {recipe.num_classes}{advice}")
