"""What a bisection may keep in float32: modules and operators that ran in half."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from torch import nn

from mezzo.amp import OPERATOR_GROUPS, OPS, resolve_list, resolve_name
from mezzo.fp8 import FP8_LINEAR
from mezzo.record import OperatorRow

Stages = tuple[tuple[str, ...], ...]
"""Candidates in the order in which they are preferred; those of a later stage count only if all before do not help."""


def module_stages(rows: Iterable[OperatorRow], call_order: Sequence[str], *, in_fp8: bool = False) -> Stages:
    """Return the modules that ran operators in half, or products in FP8; those without such modules inside come first.

    A module that is kept takes the modules inside along, so one with operators of its own between its children is looked
    at last. The last module called is preferred: at O1 the float32 result of a module makes the operators after it
    float32 too, so that a module before the culprit would seem to help.
    """
    ran = {row.module for row in rows if (is_fp8_forward(row) if in_fp8 else _is_half(row))}
    names = [name for name in reversed(call_order) if name in ran]
    outer = {name for name in names if any(_is_inside(other, name) for other in names)}
    stages = (tuple(n for n in names if n not in outer), tuple(n for n in names if n in outer))
    return stages if outer else stages[:1]


def operator_stages(rows: Iterable[OperatorRow]) -> Stages:
    """Return the operators that ran in half, under names that lists know; those on no list first.

    A white operator in float32 makes what follows it float32 too at O1, so it would often seem to help.
    """
    whites: dict[str, bool] = {}
    for row in rows:
        name = _list_name(row)
        if name is not None and _is_half(row):
            whites[name] = whites.get(name, False) or row.reason.endswith("white list")
    names = sorted(whites, key=lambda name: (whites[name], name))
    return (tuple(_exact(name, names) for name in names),)


def check_candidates(candidates: Iterable[str], by: str, model: nn.Module) -> Stages:
    """Return the candidates that a user gave, as one stage.

    Raises:
        ValueError: The model has no module of such a name, or no operator is called so.
    """
    names = tuple(dict.fromkeys(candidates))
    if by == "ops":
        resolve_list(names, "candidates")
        return (names,)
    known = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "dict(model.named_modules()) has all"
            raise ValueError(f"candidates: the model has no module {name!r}; {hint}")
    return (names,)


def is_fp8_forward(row: OperatorRow) -> bool:
    """Whether it is a product of the forward in FP8."""
    return row.phase == "forward" and row.op == FP8_LINEAR


def _is_half(row: OperatorRow) -> bool:
    """Whether it computed in half, be it between half borders on a CPU without units for it; a cast computes nothing."""
    if row.phase != "forward" or row.op == "_to_copy":
        return False
    return row.fp16 + row.bf16 > 0 or row.reason.endswith("white list")


def _is_inside(name: str, outer: str) -> bool:
    return name != outer and (not outer or name.startswith(f"{outer}."))


def _list_name(row: OperatorRow) -> str | None:
    """Return the name for a list: that of the call, else of the kernel (`add_` under `x += y` is add)."""
    for name in (row.api_op, row.op, row.op.rstrip("_")):
        try:
            if name and resolve_name(name):
                return name
        except ValueError:
            continue
    return None


def _exact(name: str, names: Iterable[str]) -> str:
    """Return `aten::name` for a name that is also a group with another candidate in it: each is to be told apart."""
    others = frozenset().union(*(resolve_name(other) for other in names if other != name))
    return f"aten::{name}" if name in OPERATOR_GROUPS and name in OPS and OPERATOR_GROUPS[name] & others else name
