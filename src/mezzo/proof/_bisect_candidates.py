"""Candidates of a bisection: modules and operators that ran in half."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from torch import nn

from mezzo.amp import OPERATOR_GROUPS, OPS, resolve_list, resolve_name
from mezzo.fp8 import FP8_LINEAR
from mezzo.record import OperatorRow

Stages = tuple[tuple[str, ...], ...]
"""Candidates by preference; a later stage is added only if all earlier ones do not help."""


def module_stages(rows: Iterable[OperatorRow], call_order: Sequence[str], *, in_fp8: bool = False) -> Stages:
    """Return the modules that ran operators in half, or products in FP8; containers of such modules come last.

    Keeping a container also keeps the modules inside it. Modules that were called later are preferred: at O1 the
    float32 result of a module makes later operators float32 too, so a module before the culprit would seem to help.
    """
    ran = {row.module for row in rows if (is_fp8_forward(row) if in_fp8 else _is_half(row))}
    names = [name for name in reversed(call_order) if name in ran]
    outer = {name for name in names if any(_is_inside(other, name) for other in names)}
    stages = (tuple(n for n in names if n not in outer), tuple(n for n in names if n in outer))
    return stages if outer else stages[:1]


def operator_stages(rows: Iterable[OperatorRow]) -> Stages:
    """Return the operators that ran in half, by names that operator lists accept; white-listed ones come last.

    At O1 a white operator in float32 makes later operators float32 too, so it would often seem to help.
    """
    whites: dict[str, bool] = {}
    for row in rows:
        name = _list_name(row)
        if name is not None and _is_half(row):
            whites[name] = whites.get(name, False) or row.reason.endswith("white list")
    names = sorted(whites, key=lambda name: (whites[name], name))
    return (tuple(_exact(name, names) for name in names),)


def check_candidates(candidates: Iterable[str], by: str, model: nn.Module) -> Stages:
    """Return the user's candidates as one stage.

    Raises:
        ValueError: The model has no such module, or there is no such operator.
    """
    names = tuple(dict.fromkeys(candidates))
    if by == "ops":
        resolve_list(names, "candidates")
        return (names,)
    known = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "dict(model.named_modules()) lists all"
            raise ValueError(f"candidates: the model has no module {name!r}; {hint}")
    return (names,)


def is_fp8_forward(row: OperatorRow) -> bool:
    """Return whether a row is an FP8 product of the forward pass."""
    return row.phase == "forward" and row.op == FP8_LINEAR


def _is_half(row: OperatorRow) -> bool:
    """Return whether a row computed in half, or would on a device with half units; casts do not count."""
    if row.phase != "forward" or row.op == "_to_copy":
        return False
    return row.fp16 + row.bf16 > 0 or row.reason.endswith("white list")


def _is_inside(name: str, outer: str) -> bool:
    return name != outer and (not outer or name.startswith(f"{outer}."))


def _list_name(row: OperatorRow) -> str | None:
    """Return the name for an operator list: that of the call, otherwise of the kernel (`add` for `add_`)."""
    for name in (row.api_op, row.op, row.op.rstrip("_")):
        try:
            if name and resolve_name(name):
                return name
        except ValueError:
            continue
    return None


def _exact(name: str, names: Iterable[str]) -> str:
    """Return `aten::name` for a name that is also the group of another candidate, to select only the operator."""
    others = frozenset().union(*(resolve_name(other) for other in names if other != name))
    return f"aten::{name}" if name in OPERATOR_GROUPS and name in OPS and OPERATOR_GROUPS[name] & others else name
