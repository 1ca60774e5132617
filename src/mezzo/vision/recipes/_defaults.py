"""Fills in the defaults of PaddleSeg, so that the recorded recipe is complete."""

from __future__ import annotations

from typing import Any

from mezzo.files import YamlNode, mark_all
from mezzo.vision.recipes._data import classes_of
from mezzo.vision.recipes._errors import FaultLog, unknown_key

#: Old files have `learning_rate: {value: 0.01, decay: {type: poly}}`; the names of those types today.
_OLD_DECAYS = {"poly": "PolynomialDecay", "piecewise": "PiecewiseDecay", "stepdecay": "StepDecay"}
_OPTIMIZER = {"type": "sgd", "momentum": 0.9, "weight_decay": 4.0e-5}
#: Names of the length of a schedule; its default is the length of the run.
_LENGTH = {
    "PolynomialDecay": "decay_steps",
    "LinearDecay": "decay_steps",
    "CosineAnnealingDecay": "T_max",
    "LinearLR": "total_steps",
}


def translate_old(tree: YamlNode, faults: FaultLog) -> YamlNode:
    """Return a tree in which the old `learning_rate` block is an `lr_scheduler`."""
    old = tree.block.get("learning_rate")
    if old is None or "lr_scheduler" in tree.block:
        return tree
    decay = old.block.get("decay", mark_all({"type": "poly"}, old.mark))
    name = decay.get("type")
    if "value" not in old.block or not isinstance(name, str) or name not in _OLD_DECAYS:
        text = "learning_rate: must have a value and a decay, or use lr_scheduler"
        known = name is None or "value" not in old.block
        faults.add(old.mark, text if known else unknown_key("decay of learning_rate", str(name), _OLD_DECAYS))
        return tree
    rate = "values" if name == "piecewise" else "learning_rate"
    entries = {"type": YamlNode(_OLD_DECAYS[name], decay.mark_of("type")), rate: old.block["value"]}
    return tree.without("learning_rate").with_entries({"lr_scheduler": decay.with_entries(entries)})


def fill_defaults(tree: YamlNode) -> YamlNode:
    """Return a tree with the defaults of PaddleSeg for missing entries."""
    tree = tree.with_defaults(batch_size=1, optimizer=_OPTIMIZER)
    entries = {
        "optimizer": _optimizer(tree.block["optimizer"]),
        "lr_scheduler": _schedule(tree),
        "model": _model(tree),
        "train_dataset": _dataset(tree, "train_dataset", "train"),
        "val_dataset": _dataset(tree, "val_dataset", "val"),
    }
    return tree.with_entries({key: node for key, node in entries.items() if node is not None})


def _optimizer(node: YamlNode) -> YamlNode:
    name = node.get("type")
    if isinstance(name, str) and name.lower() in ("sgd", "momentum"):
        return node.with_defaults(momentum=0.9, weight_decay=0.0)
    return node


def _schedule(tree: YamlNode) -> YamlNode | None:
    node = tree.block.get("lr_scheduler")
    if node is None or not isinstance(node.value, dict):
        return node
    name = node.get("type")
    if name in ("PolynomialDecay", "LinearDecay"):
        node = node.with_defaults(end_lr=0.0, **({"power": 0.9} if name == "PolynomialDecay" else {}))
    iters, warmup = tree.get("iters"), node.get("warmup_iters")
    if isinstance(name, str) and name in _LENGTH and type(iters) is int:
        length = max(1, iters - (warmup if type(warmup) is int else 0))
        node = node.with_defaults(**{_LENGTH[name]: length})
    return node


def _model(tree: YamlNode) -> YamlNode | None:
    node = tree.block.get("model")
    classes = classes_of(tree, "train_dataset") or classes_of(tree, "val_dataset")
    if node is None or not isinstance(node.value, dict) or classes is None:
        return node
    return node.with_defaults(num_classes=classes)


def _dataset(tree: YamlNode, key: str, mode: str) -> YamlNode | None:
    node = tree.block.get(key)
    known: dict[str, Any] = {"mode": mode}
    return node.with_defaults(**known) if node is not None and isinstance(node.value, dict) else node
