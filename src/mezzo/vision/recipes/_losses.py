"""Losses of a recipe: one loss and one coefficient per head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mezzo._arguments import check_numbers
from mezzo.files import SourceMark, YamlNode, short_repr
from mezzo.vision.models import losses
from mezzo.vision.recipes._check import check_block, create
from mezzo.vision.recipes._errors import FaultLog
from mezzo.vision.recipes._loss_types import SINGLE, Maker, without_gradient


@dataclass(frozen=True, slots=True)
class LossRecipe:
    """Creates the loss of a segmentation network."""

    makers: tuple[Maker, ...]
    coefs: tuple[float, ...]
    ignored: tuple[str, ...] = ()
    """Losses that are left out because they have no effect, each as `position: name: reason`."""

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


def read_loss(tree: YamlNode, ignore_index: int, num_classes: int | None, faults: FaultLog) -> LossRecipe | None:
    """Return the loss of the `loss` block of a configuration, or None after adding faults.

    Args:
        tree: The configuration.
        ignore_index: Ignored label in the files; a loss may repeat it, but not change it.
        num_classes: Number of weights of a weighted loss; None if unknown.
        faults: Collects the faults.
    """
    if "loss" not in tree.block:
        faults.add(SourceMark(tree.mark.file), "loss is missing, as in {types: [{type: CrossEntropyLoss}], coef: [1]}")
        return None
    return _Losses(ignore_index, num_classes, faults).heads(tree.block["loss"])


class _Losses:
    """Reads loss blocks for given data."""

    def __init__(self, ignore_index: int, num_classes: int | None, faults: FaultLog) -> None:
        self._ignore_index, self._num_classes, self._faults = ignore_index, num_classes, faults
        self._ignored: dict[str, None] = {}

    def heads(self, node: YamlNode) -> LossRecipe | None:
        """Return the losses of all heads; a single type is used for all."""
        found = self._terms(node, "loss", "types")
        if found is None:
            return None
        items, coefs = found
        if len(items) == 1:
            items = items * len(coefs)
        joined = self._joined(node, "loss", items, coefs)
        if joined is None or without_gradient not in joined.makers:
            return joined and replace(joined, ignored=tuple(self._ignored))
        text = "loss: SemanticConnectivityLoss has no gradient; put it into a MixedLoss beside another, or leave it out"
        self._faults.add(node.mark_of("types"), text)
        return None

    def _joined(self, node: YamlNode, what: str, items: list[YamlNode], coefs: tuple[float, ...]) -> LossRecipe | None:
        if len(items) != len(coefs) or not items:
            text = f"{what}: {len(items)} losses and {len(coefs)} coefficients; must be as many, at least one"
            self._faults.add(node.mark_of("coef"), text)
            return None
        makers = [self._maker(item) for item in items]
        good = tuple(maker for maker in makers if maker is not None)
        return LossRecipe(good, coefs) if len(good) == len(makers) else None

    def _terms(self, node: YamlNode, what: str, key: str) -> tuple[list[YamlNode], tuple[float, ...]] | None:
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
            return node.block[key].items, check_numbers("coef", node.get("coef"), at_least=0)
        except ValueError as error:
            self._faults.add(node.mark_of("coef"), f"{what}: {error}")
            return None

    def _maker(self, node: YamlNode) -> Maker | None:
        if node.get("type") == "MixedLoss":
            return self._mixed(node)
        table: dict[str, Callable[..., Maker]] = {
            **SINGLE,
            "MixedLoss": lambda: without_gradient,
        }  # by name only, see above
        before = len(self._faults)
        maker = create(node.without("ignore_index"), "loss", table, self._faults)
        self._check_data(node)
        return maker if len(self._faults) == before else None

    def _mixed(self, node: YamlNode) -> Maker | None:
        found = self._terms(node, "MixedLoss", "losses")
        joined = None if found is None else self._joined(node, "MixedLoss", *found)
        if joined is None:
            return None
        kept = [pair for pair in zip(joined.makers, joined.coefs, strict=True) if pair[0] is not without_gradient]
        if not kept:
            return without_gradient  # refused with the head that it is for
        for item, maker in zip(node.block["losses"].items, joined.makers, strict=True):
            if maker is without_gradient:
                why = "is computed from predicted classes, so it has no gradient; the loss is without it"
                self._ignored[f"{item.mark_of('type')}: {item.get('type')}: {why}"] = None
        return lambda: losses.MixedLoss([make() for make, _ in kept], [coef for _, coef in kept])

    def _check_data(self, node: YamlNode) -> None:
        """Add faults for entries that contradict the data."""
        name, classes = node.get("type"), self._num_classes
        ignored, weight, written = (node.get(key) for key in ("ignore_index", "weight", "num_classes"))
        if ignored is not None and ignored != self._ignore_index:
            text = f"ignore_index={short_repr(ignored)}: the data set leaves out {self._ignore_index}; remove it here"
            self._faults.add(node.mark_of("ignore_index"), text)
        if classes is None:
            return
        if isinstance(weight, list) and len(weight) != classes:
            text = f"weight: {len(weight)} numbers for {classes} classes; must be one a class"
            self._faults.add(node.mark_of("weight"), text)
        if written is not None and written != classes:
            text = f"{name}: num_classes={short_repr(written)}: the data have {classes}; remove it here"
            self._faults.add(node.mark_of("num_classes"), text)
        if name == "LovaszHingeLoss" and classes > 2:
            text = f"LovaszHingeLoss: {classes} classes; it is for two, LovaszSoftmaxLoss for more"
            self._faults.add(node.mark_of("type"), text)
