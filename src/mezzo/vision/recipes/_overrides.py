"""Overrides of a recipe by options of the command line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mezzo.files import SourceMark, YamlNode, parse_yaml, short_repr
from mezzo.vision.recipes._errors import FaultLog

MAX_PARTS = 32
#: Names of the length of a schedule; its default is the number of iterations.
DECAY_LENGTHS = ("decay_steps", "T_max", "total_steps")


def apply_options(tree: YamlNode, options: Iterable[str], faults: FaultLog) -> YamlNode:
    """Return a tree with options like `a.b=c` or `a.0.b=c` applied in order; values are YAML."""
    for option in options:
        tree = _apply(tree, option, faults)
    return tree


def _apply(tree: YamlNode, option: str, faults: FaultLog) -> YamlNode:
    name, separator, text = option.partition("=")
    parts = name.strip().split(".")
    mark = SourceMark(f"--opts {name.strip()[:80]}")
    if not separator or not all(parts):
        faults.add(SourceMark("--opts"), f"{short_repr(option)}: must be name=value, as in model.num_classes=19")
        return tree
    if len(parts) > MAX_PARTS:
        faults.add(mark, f"{len(parts)} names, at most {MAX_PARTS} are allowed")
        return tree
    before = len(faults)
    value = parse_yaml(text, mark.file, faults, line=None) or YamlNode(None, mark)
    if len(faults) > before:
        return tree
    return _replace(tree, parts, YamlNode(value.value, mark), faults)


def _replace(node: YamlNode, parts: Sequence[str], value: YamlNode, faults: FaultLog) -> YamlNode:
    """Return a node with the value at the path `parts`; missing blocks on the way are created."""
    if not parts:
        return value
    part, rest = parts[0], parts[1:]
    if isinstance(node.value, list):
        return _replace_item(node, part, rest, value, faults)
    if node.value is not None and not isinstance(node.value, dict):
        faults.add(
            value.mark, f"{part!r} has no place: what is in front of it is {short_repr(node.value)}, not a block"
        )
        return node
    below = node.block.get(part, YamlNode(None, value.mark))
    return node.with_entries({part: _replace(below, rest, value, faults)})


def _replace_item(node: YamlNode, part: str, rest: Sequence[str], value: YamlNode, faults: FaultLog) -> YamlNode:
    items = list(node.items)
    index = int(part) if part.isascii() and part.isdigit() and len(part) < 9 else -1
    if not 0 <= index < len(items):
        faults.add(value.mark, f"{part!r} is not an index of a list of {len(items)}; indices start at 0")
        return node
    items[index] = _replace(items[index], rest, value, faults)
    return YamlNode(items, node.mark)


def apply_direct(
    tree: YamlNode, faults: FaultLog, *, batch_size: int | None, iters: int | None, learning_rate: float | None
) -> YamlNode:
    """Return a tree with the named options applied; `iters` also sets the length of the decay."""
    if batch_size is not None:
        tree = tree.with_entries({"batch_size": YamlNode(batch_size, SourceMark("--batch_size"))})
    if iters is not None:
        tree = tree.with_entries({"iters": YamlNode(iters, SourceMark("--iters"))})
        if "lr_scheduler" in tree.block:
            tree = tree.with_entries({"lr_scheduler": tree.block["lr_scheduler"].without(*DECAY_LENGTHS)})
    if learning_rate is not None:
        tree = _with_rate(tree, YamlNode(learning_rate, SourceMark("--learning_rate")), faults)
    return tree


def _with_rate(tree: YamlNode, rate: YamlNode, faults: FaultLog) -> YamlNode:
    schedule = tree.block.get("lr_scheduler")
    if schedule is None:
        return tree  # the fault is added where it is read
    if schedule.get("type") == "PiecewiseDecay":
        faults.add(rate.mark, "PiecewiseDecay has a list of rates; use --opts lr_scheduler.values=[...]")
        return tree
    return tree.with_entries({"lr_scheduler": schedule.with_entries({"learning_rate": rate})})
