"""The network of a recipe."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mezzo._arguments import check_flag, check_integer, check_integers
from mezzo.files import SourceMark, YamlNode, short_repr
from mezzo.vision.models import create_from_types, create_model, model_info
from mezzo.vision.recipes._check import REFUSALS, attempt, find_entry, find_line
from mezzo.vision.recipes._errors import FaultLog

_WIDEST = 2**16
_channels = functools.partial(check_integer, at_least=1, at_most=_WIDEST)
_three_channels = functools.partial(check_integers, count=3, at_most=_WIDEST)
#: Checks of options that the networks themselves do not check.
_VALUES: dict[str, Callable[[str, object], object]] = {
    "arm_out_chs": _three_channels,
    "seg_head_inter_chs": _three_channels,
    "seg_head_mid_chs": _three_channels,
    "cm_out_ch": _channels,
    "cm_bin_sizes": check_integers,
    "ocr_mid_channels": _channels,
    "ocr_key_channels": _channels,
    "aspp_ratios": check_integers,
    "bias": check_flag,
    "padding_same": check_flag,
}
_COMMON = ("type", "num_classes", "backbone", "pretrained")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRecipe:
    """Creates a network, and names its initial weights."""

    name: str
    """A type of PaddleSeg's or a name of `mezzo.vision.models.list_models()`."""
    options: Mapping[str, Any]
    pretrained: str | None = None
    """File or URL of weights of the whole network; the training loads them."""
    backbone_pretrained: str | None = None
    """File or URL of weights of only the backbone."""

    def create(self) -> nn.Module:
        """Return a new network, without the pretrained weights."""
        return create_model(self.name, **self.options)


def read_model(tree: YamlNode, faults: FaultLog) -> tuple[ModelRecipe | None, nn.Module | None]:
    """Return the network of the `model` block of a configuration, and its outline; or None after adding faults."""
    if "model" not in tree.block:
        faults.add(SourceMark(tree.mark.file), "model is missing, as in {type: PPLiteSeg, backbone: {type: STDC1}}")
        return None, None
    node = tree.block["model"]
    if not isinstance(node.value, dict):
        faults.add(node.mark, f"model: {short_repr(node.plain())}: must be a block with a type")
        return None, None
    bare = node.without("pretrained")
    backbone = bare.block.get("backbone")
    if backbone is not None and isinstance(backbone.value, dict):
        bare = bare.with_entries({"backbone": backbone.without("pretrained")})
    before = len(faults)
    _check_common(bare, faults)
    weights = (_weights(node, faults), None if backbone is None else _weights(backbone, faults))
    options = bare.plain()
    recipe = ModelRecipe(
        name=str(options.pop("type", None)), options=options, pretrained=weights[0], backbone_pretrained=weights[1]
    )
    return recipe, _outline(bare, faults) if len(faults) == before else None


def _outline(node: YamlNode, faults: FaultLog) -> nn.Module | None:
    """Return a network on the meta device.

    Wrong options are added to the faults and removed, and creation is tried again, so that all faults are found.
    """
    node = _check_values(node, faults)
    while True:
        try:
            with torch.device("meta"):
                return create_from_types(node.plain())
        except REFUSALS as error:
            text = str(error) or type(error).__name__
            faults.add(find_line(node, text), text)
            path = find_entry(node, text)
            if not path or path[-1] in _COMMON:
                return None
            node = _without(node, path)


def _check_values(node: YamlNode, faults: FaultLog) -> YamlNode:
    """Return a block, and the blocks in it, without the options that have wrong values."""
    good: dict[str, YamlNode] = {}
    for key, item in node.block.items():
        kept = _check_values(item, faults) if isinstance(item.value, dict) else item
        if key not in _VALUES or attempt(item, faults, _VALUES[key], key, item.plain()) is not None:
            good[key] = kept
    return YamlNode(good, node.mark)


def _without(node: YamlNode, path: tuple[str, ...]) -> YamlNode:
    """Return a block without the entry that a path leads to."""
    if len(path) == 1:
        return node.without(path[0])
    return node.with_entries({path[0]: _without(node.block[path[0]], path[1:])})


def _check_common(node: YamlNode, faults: FaultLog) -> None:
    """Add faults for misspelled common keys, as a network knows only its own options."""
    for key, item in node.block.items():
        close = difflib.get_close_matches(key[:60], _COMMON, n=1, cutoff=0.8)
        if close and key not in _COMMON:
            faults.add(
                item.mark,
                f"unknown option of {short_repr(node.get('type'))} {short_repr(key)}; did you mean {close[0]!r}?",
            )


def _weights(node: YamlNode, faults: FaultLog) -> str | None:
    found = node.get("pretrained")
    if found is None or (isinstance(found, str) and found):
        return found
    faults.add(node.mark_of("pretrained"), f"pretrained={short_repr(found)}: must be a file or an address")
    return None


def count_outputs(model: nn.Module) -> int:
    """Return the number of logits tensors of a network in training."""
    return model_info(str(model.model_name)).train_outputs
