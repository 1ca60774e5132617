"""Which rules of mixed precision a checkpoint was written under, and whether this run has others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mezzo.train._precision import Precision

_RECORDED = ("lists_version", "level", "dtype", "use_promote")
_UNRECORDED = {"lists_version": 1, "use_promote": False}
"""Of checkpoints from before the rules were recorded."""
_PROMOTING = ("O2", "O3")
"""Levels at which `use_promote` decides anything."""


def rules_of(precision: Precision) -> dict[str, Any] | None:
    """Return what a checkpoint records of a policy; None in float32."""
    if precision.policy is None:
        return None
    policy = precision.policy.to_dict()
    return {key: policy[key] for key in _RECORDED}


def describe_new_rules(state: Mapping[str, Any], precision: Precision, option: str) -> str | None:
    """Return a line for a run that goes on under other rules than its checkpoint was written under; None for the same.

    Args:
        state: Of the checkpoint, with `rules` unless it is an old one.
        precision: Of this run.
        option: The setting that chooses the rule, as its user writes it: `--amp_use_promote {}`.
    """
    now = rules_of(precision)
    saved = state.get("rules", _UNRECORDED)
    if now is None or saved is None:  # float32 has no rules
        return None
    then = {**_UNRECORDED, **saved} if isinstance(saved, Mapping) else _UNRECORDED
    if then["lists_version"] == now["lists_version"]:
        return None
    versions = f"written under version {then['lists_version']} of the operator lists, this is {now['lists_version']}"
    if now["level"] not in _PROMOTING:
        return f"{versions}: some operators may compute in another precision; custom lists change one back"
    if then["use_promote"] == now["use_promote"]:
        return None
    rule = "stay float32" if now["use_promote"] else "become half"
    keep = option.format(then["use_promote"])
    return f"{versions}: at {now['level']} operators on no list now {rule} where an input is float32; {keep} keeps the old rule"
