"""The data of a recipe: a data set, opened on request, and its transforms."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from mezzo.files import YamlNode, short_repr
from mezzo.vision.data import DATASETS, IGNORE, TRANSFORMS, Compose, Dataset, Transform
from mezzo.vision.recipes._check import attempt, check_arguments, create, find_type
from mezzo.vision.recipes._errors import FaultLog, unknown_key

PADDING = "label_padding_value"
MAX_CLASSES = 255  # labels are bytes, and one value means ignored


@dataclass(frozen=True, kw_only=True, slots=True)
class DataRecipe:
    """A data set that is not opened yet, and the transforms of its samples."""

    factory: Callable[..., Dataset]
    options: Mapping[str, Any]
    transforms: Compose

    def open(self) -> Dataset:
        """Return the data set.

        Raises:
            DataError: A file is missing or wrong; the message names the first.
        """
        return self.factory(**self.options)


def read_data(
    tree: YamlNode, key: Literal["train_dataset", "val_dataset"], num_classes: int | None, faults: FaultLog
) -> DataRecipe | None:
    """Return the data of a block without opening it; None if there is no block, or after adding faults.

    Args:
        tree: The configuration.
        key: The block.
        num_classes: Number of classes; None if unknown.
        faults: Collects the faults.
    """
    if key not in tree.block:
        return None
    node = tree.block[key]
    before = len(faults)
    factory = find_type(node, "data set", DATASETS, faults)
    transforms = _transforms(_with_padding(node, ignored_of(tree, key), num_classes, faults), key, faults)
    if factory is not None and check_arguments(node, factory, faults, given=("transforms",)):
        _check_types(node, factory, faults)
        _check_list(node, factory, faults)
    if factory is None or transforms is None or len(faults) > before:
        return None
    return DataRecipe(factory=factory, options=node.without("type", "transforms").plain(), transforms=transforms)


def _transforms(node: YamlNode, key: str, faults: FaultLog) -> Compose | None:
    if not isinstance(node.get("transforms"), list):
        faults.add(node.mark_of("transforms"), f"{key}: transforms must be a list, as in [{{type: Normalize}}]")
        return None
    # Evaluation compares with the labels as they are in the files, so only the image is changed.
    image_only = key == "val_dataset"
    transforms = [_transform(item, image_only, faults) for item in node.block["transforms"].items]
    good = [transform for transform in transforms if transform is not None]
    if len(good) < len(transforms):
        return None
    return attempt(node.block["transforms"], faults, Compose, good, image_only=image_only)


def _transform(node: YamlNode, image_only: bool, faults: FaultLog) -> Transform | None:
    """Return the transform of a block, or None after adding a fault, also if it is not allowed in evaluation."""
    transform = create(node, "transform", TRANSFORMS, faults)
    if transform is None or attempt(node, faults, Compose, [transform], image_only=image_only) is None:
        return None
    return transform


def _with_padding(node: YamlNode, ignored: int, num_classes: int | None, faults: FaultLog) -> YamlNode:
    """Return the block of a data set whose transforms pad labels with 255, the ignored value of `Sample.label`.

    In the files the value is `ignored`; data sets convert it to 255, so transforms must pad with 255 too.
    """
    written = node.block.get("transforms")
    if written is None or not written.items:
        return node
    padded = [_padding(item, ignored, num_classes, faults) for item in written.items]
    return node.with_entries({"transforms": YamlNode(padded, written.mark)})


def _padding(node: YamlNode, ignored: int, num_classes: int | None, faults: FaultLog) -> YamlNode:
    value = node.get(PADDING)
    if type(value) is not int:  # not given, or refused by the transform
        return node
    if value == ignored:
        return node.with_entries({PADDING: YamlNode(IGNORE, node.mark_of(PADDING))})
    if num_classes is not None and num_classes <= value < IGNORE:
        text = f"{PADDING}={value}: must be {ignored}, which does not count, or a class below {num_classes}"
        faults.add(node.mark_of(PADDING), text)
    return node


def _check_types(node: YamlNode, factory: Callable[..., object], faults: FaultLog) -> None:
    """Add faults for arguments of wrong types, as the data set is created much later."""
    hints = _hints(factory)
    for key, item in node.block.items():
        hint = hints.get(key)
        kinds = get_args(hint) if get_origin(hint) is UnionType else (hint,)
        if key != "num_classes" and set(kinds) <= {str, int, bool, NoneType} and type(item.plain()) not in kinds:
            wanted = " or ".join("nothing" if kind is NoneType else _WORDS[kind] for kind in kinds)
            faults.add(item.mark, f"{key}={short_repr(item.plain())}: must be {wanted}")


_WORDS: dict[Any, str] = {str: "text", int: "an integer", bool: "True or False"}


def _hints(factory: Callable[..., object]) -> dict[str, Any]:
    parameters = inspect.signature(factory, eval_str=True).parameters
    return {name: parameter.annotation for name, parameter in parameters.items()}


def _check_list(node: YamlNode, factory: Callable[..., object], faults: FaultLog) -> None:
    """Add faults for an unknown mode, and for a missing list file of the mode."""
    mode = node.get("mode")
    modes = getattr(factory, "MODES", (mode,))
    if isinstance(mode, str) and mode not in modes:
        faults.add(node.mark_of("mode"), unknown_key("mode", mode, modes))
        return
    needed = f"{mode}_path"
    if needed in _hints(factory) and not node.get(needed):
        faults.add(node.mark_of("mode"), f"{node.get('type')}: {needed} is missing: mode {mode!r} reads that list")


def classes_of(tree: YamlNode, key: str) -> int | None:
    """Return the number of classes of a data set by its `num_classes` or its type; None if unknown."""
    node = tree.block.get(key, YamlNode(None, tree.mark))
    written = node.get("num_classes")
    name = node.get("type")
    own = getattr(DATASETS.get(name), "NUM_CLASSES", None) if isinstance(name, str) else None
    return written if type(written) is int else own


def ignored_of(tree: YamlNode, key: str = "train_dataset") -> int:
    """Return the ignored label in the files of a data set."""
    written = tree.block.get(key, YamlNode(None, tree.mark)).get("ignore_index")
    return written if type(written) is int else IGNORE
