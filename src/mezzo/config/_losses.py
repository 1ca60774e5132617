"""Losses of a configuration: one term a head, each with its coefficient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mezzo.config._check import check_block, create
from mezzo.config._errors import Faults, short
from mezzo.config._numbers import number, numbers, whole
from mezzo.config._tree import Mark, Node
from mezzo.models import losses

Maker = Callable[[], nn.Module]


@dataclass(frozen=True, slots=True)
class LossRecipe:
    """How the loss of a segmentation network is made."""

    makers: tuple[Maker, ...]
    coefs: tuple[float, ...]

    def create(self) -> nn.Module:
        """Return a new module that takes a list of logits and the labels."""
        return losses.HeadLosses([make() for make in self.makers], self.coefs)


class ClassLoss(nn.Module):
    """Mean cross entropy of logits (n, classes), or of the first of a list of them, and class numbers (n), in float32."""

    def forward(self, outputs: Tensor | Sequence[Tensor], labels: Tensor) -> Tensor:
        """Return the loss."""
        logits = outputs if isinstance(outputs, Tensor) else outputs[0]
        with torch.autocast(logits.device.type, enabled=False):
            return F.cross_entropy(logits.float(), labels.long())


# Data sets give ignored pixels one label, whatever it is in the files, so the losses need not be told.
def _cross_entropy(
    weight: Any = None,
    top_k_percent_pixels: Any = 1.0,
    avg_non_ignore: Any = True,
    data_format: Any = "NCHW",
) -> Maker:
    _fixed("top_k_percent_pixels", top_k_percent_pixels, 1.0, "OhemCrossEntropyLoss keeps the hard pixels only")
    _fixed("avg_non_ignore", avg_non_ignore, True, "the mean is over the pixels that count")
    _fixed("data_format", data_format, "NCHW", "the layout of tensors is not a matter of the loss here")
    checked = None if weight is None else numbers("weight", weight, at_least=0)
    return lambda: losses.CrossEntropyLoss(checked)


def _ohem(thresh: Any = 0.7, min_kept: Any = 10000) -> Maker:
    limit, kept = number("thresh", thresh, at_least=0, at_most=1), whole("min_kept", min_kept)
    return lambda: losses.OhemCrossEntropyLoss(limit, kept)


def _lovasz(classes: Any = "present") -> Maker:
    _fixed("classes", classes, "present", "the mean is over the classes that occur")
    return losses.LovaszSoftmaxLoss


def _fixed(name: str, value: object, wanted: object, why: str) -> None:
    if value != wanted:
        raise ValueError(f"{name}={short(value)}: only {wanted!r} is built here; {why}")


_SINGLE: dict[str, Callable[..., Maker]] = {
    "CrossEntropyLoss": _cross_entropy,
    "OhemCrossEntropyLoss": _ohem,
    "LovaszSoftmaxLoss": _lovasz,
}


def read_loss(tree: Node, ignore_index: int, num_classes: int | None, faults: Faults) -> LossRecipe | None:
    """Return the loss of the `loss` block of a configuration, or None after noting what is wrong.

    Args:
        tree: The configuration.
        ignore_index: Label that does not count in the files of the data; a loss may repeat it, not change it.
        num_classes: How many weights a weighted loss must have; None if it is not known.
        faults: Where to note.
    """
    if "loss" not in tree.block:
        faults.add(Mark(tree.mark.file), "loss is missing, as in {types: [{type: CrossEntropyLoss}], coef: [1]}")
        return None
    return _Losses(ignore_index, num_classes, faults).heads(tree.block["loss"])


class _Losses:
    """Reads blocks of losses that share what the data say."""

    def __init__(self, ignore_index: int, num_classes: int | None, faults: Faults) -> None:
        self._ignore_index, self._num_classes, self._faults = ignore_index, num_classes, faults

    def heads(self, node: Node) -> LossRecipe | None:
        """Return the losses of all heads; one type serves them all."""
        found = self._terms(node, "loss", "types")
        if found is None:
            return None
        items, coefs = found
        if len(items) == 1:
            items = items * len(coefs)
        return self._joined(node, "loss", items, coefs)

    def _joined(self, node: Node, what: str, items: list[Node], coefs: tuple[float, ...]) -> LossRecipe | None:
        if len(items) != len(coefs) or not items:
            text = f"{what}: {len(items)} losses and {len(coefs)} coefficients; must be as many, at least one"
            self._faults.add(node.mark_of("coef"), text)
            return None
        makers = [self._maker(item) for item in items]
        good = tuple(maker for maker in makers if maker is not None)
        return LossRecipe(good, coefs) if len(good) == len(makers) else None

    def _terms(self, node: Node, what: str, key: str) -> tuple[list[Node], tuple[float, ...]] | None:
        """Return the blocks under `key` and their coefficients."""
        before = len(self._faults)
        if not check_block(node.without("type"), what, (key, "coef"), (key, "coef"), self._faults):
            return None
        for name in (key, "coef"):
            if not isinstance(node.get(name), list):
                self._faults.add(node.mark_of(name), f"{what}: {name} must be a list, one entry a loss")
        if len(self._faults) > before:
            return None
        try:
            return node.block[key].items, numbers("coef", node.get("coef"), at_least=0)
        except ValueError as error:
            self._faults.add(node.mark_of("coef"), f"{what}: {error}")
            return None

    def _maker(self, node: Node) -> Maker | None:
        if node.get("type") == "MixedLoss":
            return self._mixed(node)
        table: dict[str, Callable[..., Maker]] = {**_SINGLE, "MixedLoss": _cross_entropy}  # by name only, see above
        before = len(self._faults)
        made = create(node.without("ignore_index"), "loss", table, self._faults)
        self._check_data(node)
        return made if len(self._faults) == before else None

    def _mixed(self, node: Node) -> Maker | None:
        found = self._terms(node, "MixedLoss", "losses")
        joined = None if found is None else self._joined(node, "MixedLoss", *found)
        if joined is None:
            return None
        return lambda: losses.MixedLoss([make() for make in joined.makers], joined.coefs)

    def _check_data(self, node: Node) -> None:
        """Note what disagrees with the data."""
        ignored, weight = node.get("ignore_index"), node.get("weight")
        if ignored is not None and ignored != self._ignore_index:
            text = f"ignore_index={short(ignored)}: the data set leaves out {self._ignore_index}; leave it away here"
            self._faults.add(node.mark_of("ignore_index"), text)
        if isinstance(weight, list) and self._num_classes not in (None, len(weight)):
            text = f"weight: {len(weight)} numbers for {self._num_classes} classes; must be one a class"
            self._faults.add(node.mark_of("weight"), text)
