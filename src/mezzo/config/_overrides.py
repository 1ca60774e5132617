"""Settings of the command line over those of a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mezzo.config._errors import Faults
from mezzo.files import Mark, Node, parse_yaml, short_repr

MAX_PARTS = 32
#: What says how long a schedule decays; without it a schedule takes the run's iterations.
DECAY_LENGTHS = ("decay_steps", "T_max", "total_steps")


def apply_options(tree: Node, options: Iterable[str], faults: Faults) -> Node:
    """Return a tree with options like `a.b=c` or `a.0.b=c` applied, from first to last; values are YAML."""
    for option in options:
        tree = _apply(tree, option, faults)
    return tree


def _apply(tree: Node, option: str, faults: Faults) -> Node:
    name, separator, text = option.partition("=")
    parts = name.strip().split(".")
    mark = Mark(f"--opts {name.strip()[:80]}")
    if not separator or not all(parts):
        faults.add(Mark("--opts"), f"{short_repr(option)}: must be name=value, as in model.num_classes=19")
        return tree
    if len(parts) > MAX_PARTS:
        faults.add(mark, f"{len(parts)} names, at most {MAX_PARTS} are allowed")
        return tree
    before = len(faults)
    value = parse_yaml(text, mark.file, faults, line=None) or Node(None, mark)
    if len(faults) > before:
        return tree
    return _replace(tree, parts, Node(value.value, mark), faults)


def _replace(node: Node, parts: Sequence[str], value: Node, faults: Faults) -> Node:
    """Return a node with the value at the path `parts`; blocks that are missing on the way are made."""
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
    below = node.block.get(part, Node(None, value.mark))
    return node.with_entries({part: _replace(below, rest, value, faults)})


def _replace_item(node: Node, part: str, rest: Sequence[str], value: Node, faults: Faults) -> Node:
    items = list(node.items)
    index = int(part) if part.isascii() and part.isdigit() and len(part) < 9 else -1
    if not 0 <= index < len(items):
        faults.add(value.mark, f"{part!r} is no place in a list of {len(items)}; places are counted from 0")
        return node
    items[index] = _replace(items[index], rest, value, faults)
    return Node(items, node.mark)


def apply_direct(
    tree: Node, faults: Faults, *, batch_size: int | None, iters: int | None, learning_rate: float | None
) -> Node:
    """Return a tree with the options that have a name of their own; `iters` also becomes the length of the decay."""
    if batch_size is not None:
        tree = tree.with_entries({"batch_size": Node(batch_size, Mark("--batch_size"))})
    if iters is not None:
        tree = tree.with_entries({"iters": Node(iters, Mark("--iters"))})
        if "lr_scheduler" in tree.block:
            tree = tree.with_entries({"lr_scheduler": tree.block["lr_scheduler"].without(*DECAY_LENGTHS)})
    if learning_rate is not None:
        tree = _with_rate(tree, Node(learning_rate, Mark("--learning_rate")), faults)
    return tree


def _with_rate(tree: Node, rate: Node, faults: Faults) -> Node:
    schedule = tree.block.get("lr_scheduler")
    if schedule is None:
        return tree  # that it is missing is noted where it is read
    if schedule.get("type") == "PiecewiseDecay":
        faults.add(rate.mark, "PiecewiseDecay has a list of rates; use --opts lr_scheduler.values=[...]")
        return tree
    return tree.with_entries({"lr_scheduler": schedule.with_entries({"learning_rate": rate})})
