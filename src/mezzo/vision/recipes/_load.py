"""Loads a PaddleSeg file as a recipe; one error reports all faults."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from mezzo._arguments import check_integer
from mezzo._options import yaml_keys
from mezzo.files import SourceMark, YamlNode
from mezzo.vision.options import RunOptions
from mezzo.vision.recipes._check import attempt, check_names
from mezzo.vision.recipes._data import MAX_CLASSES, classes_of, ignored_of, read_data
from mezzo.vision.recipes._defaults import fill_defaults, translate_old
from mezzo.vision.recipes._errors import FaultLog, parsed
from mezzo.vision.recipes._losses import LossRecipe, read_loss
from mezzo.vision.recipes._model import count_outputs, read_model
from mezzo.vision.recipes._optimizers import check_parts, read_optimizer
from mezzo.vision.recipes._overrides import apply_direct, apply_options
from mezzo.vision.recipes._recipe import Recipe
from mezzo.vision.recipes._schedules import read_schedule
from mezzo.vision.recipes._source import read_tree

_USED = ("batch_size", "iters", "train_dataset", "val_dataset", "model", "loss", "optimizer", "lr_scheduler")
#: Keys that PaddleSeg's files may have and that have no effect here, with the reason.
UNUSED = {
    **dict.fromkeys(
        (*yaml_keys(RunOptions), "use_vdl", "profiler_options"), "is an option of the command, not of the file"
    ),
    "learning_rate": "lr_scheduler is there too, and has precedence",
    "export": "is about exports, not about training",
    "test_config": "evaluation uses one scale, without flipping",
    "distill_loss": "distillation is not supported",
    "amp": "precision is set with --precision and --amp_level",
    **dict.fromkeys(("global", "runtime", "train", "eval", "test", "infer"), "the command decides what runs"),
}


def load_recipe(
    path: str | Path,
    *,
    opts: Sequence[str] = (),
    batch_size: int | None = None,
    iters: int | None = None,
    learning_rate: float | None = None,
) -> Recipe:
    """Return the recipe of a PaddleSeg YAML file.

    Args:
        path: The file; `_base_` names files that it is based on.
        opts: Overrides of settings, such as `model.num_classes=3` or `train_dataset.transforms.0.prob=0.1`.
        batch_size: Overrides the file and `opts`, like the next two.
        iters: Number of steps; also the length of the learning-rate decay, even if the file sets one.
        learning_rate: The first learning rate.

    Raises:
        RecipeError: The message has one line per fault, with file and line number.
    """
    faults = FaultLog()
    tree = read_tree(Path(path), faults)
    faults.raise_if_any()  # missing entries of a broken file would be reported twice
    tree = translate_old(apply_options(tree, opts, faults), faults)
    tree = apply_direct(tree, faults, batch_size=batch_size, iters=iters, learning_rate=learning_rate)
    return _read(fill_defaults(tree), faults)


def _read(tree: YamlNode, faults: FaultLog) -> Recipe:
    check_names(tree, "a configuration", (*_USED, *UNUSED), faults)
    classes = _count_classes(tree, faults)
    model, outline = read_model(tree, faults)
    loss = read_loss(tree, ignored_of(tree), classes, faults)
    schedule = read_schedule(tree, faults)
    optimizer = read_optimizer(tree, 1.0 if schedule is None else schedule.peak, faults)
    train = read_data(tree, "train_dataset", classes, faults)
    val = read_data(tree, "val_dataset", classes, faults)
    size, steps = _count(tree, "batch_size", faults), _count(tree, "iters", faults)
    if outline is not None and optimizer is not None:
        check_parts(optimizer, outline, tree.mark_of("optimizer"), faults)
    if outline is not None and loss is not None:
        _check_heads(tree, outline, loss, faults)
    faults.raise_if_any()
    return Recipe(
        task="segmentation",
        model=parsed(model),
        num_classes=parsed(classes),
        train_data=train,
        val_data=val,
        batch_size=parsed(size),
        iters=parsed(steps),
        epochs=None,
        optimizer=parsed(optimizer),
        schedule=parsed(schedule),
        loss=parsed(loss),
        resolved=tree.plain(),
        ignored=(*_unused(tree), *parsed(loss).ignored),
    )


def _unused(tree: YamlNode) -> list[str]:
    return [f"{tree.mark_of(key)}: {key}: {UNUSED[key]}" for key in tree.block if key in UNUSED]


def _count(tree: YamlNode, key: str, faults: FaultLog) -> int | None:
    if key not in tree.block:
        faults.add(SourceMark(tree.mark.file), f"{key} is missing: how many steps the run has")
        return None
    return attempt(tree.block[key], faults, check_integer, key, tree.get(key), at_least=1)


def _count_classes(tree: YamlNode, faults: FaultLog) -> int | None:
    """Return the number of classes; add faults if parts of the recipe disagree."""
    found: dict[str, int] = {}
    before = len(faults)
    for key in ("train_dataset", "val_dataset", "model"):
        node = tree.block.get(key, YamlNode(None, tree.mark))
        if "num_classes" in node.block:
            own = node.block["num_classes"]
            checked = attempt(own, faults, check_integer, "num_classes", own.plain(), at_least=1, at_most=MAX_CLASSES)
            found |= {} if checked is None else {key: checked}
        elif (count := classes_of(tree, key)) is not None:
            found[key] = count
    for key, count in found.items():
        first = next(iter(found))
        if count != found[first]:
            mark = tree.block[key].mark_of("num_classes")
            faults.add(mark, f"{key} has {count} classes, {first} has {found[first]}; they must agree")
    if not found and len(faults) == before:
        faults.add(tree.mark_of("model"), "num_classes is missing: neither the data set nor the model has it")
    return next(iter(found.values()), None)


def _check_heads(tree: YamlNode, outline: nn.Module, loss: LossRecipe, faults: FaultLog) -> None:
    """Add a fault if the loss does not have one coefficient per output of the network."""
    outputs, terms = count_outputs(outline), len(loss.coefs)
    if outputs != terms:
        name = tree.block["model"].get("type")
        text = f"loss: {terms} coefficients, but {name} has {outputs} outputs in training; give one a head"
        faults.add(tree.block["loss"].mark_of("coef"), text)
