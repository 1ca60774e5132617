"""Which rules of mixed precision a checkpoint was written under, and whether this run has others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mezzo.precision import Precision

_RECORDED = ("lists_version", "level", "use_promote")
_UNRECORDED = {"lists_version": 1, "level": None, "use_promote": False}
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
    """Return a line for a run under another version of the lists than its checkpoint was written under; None for the same.

    A level or `use_promote` that the user changed is no news to the user.

    Args:
        state: Of the checkpoint, with `rules` unless it is an old one.
        precision: Of this run.
        option: The setting that chooses the rule, as its user writes it: `--amp_use_promote {}`.
    """
    now = rules_of(precision)
    saved = state.get("rules", _UNRECORDED)
    if now is None or saved is None:  # float32 has no rules
        return None
    then = _readable(saved)
    if then["lists_version"] == now["lists_version"]:
        return None
    line = (
        f"written under version {then['lists_version']} of the operator lists, this is {now['lists_version']}: some operators "
        "may compute in another precision; custom lists change one back"
    )
    promotes = now["level"] in _PROMOTING and then["level"] in (*_PROMOTING, None)
    if not promotes or then["use_promote"] == now["use_promote"]:
        return line
    rule = "stay float32" if now["use_promote"] else "become half"
    before = "" if then["level"] else "if that was at O2 or O3, "
    return (
        f"{line}; {before}operators on no list now {rule} where an input is float32: {option.format(then['use_promote'])} "
        "keeps most of the old rule"
    )


def _readable(saved: Any) -> dict[str, Any]:
    """Return recorded rules; what is damaged counts as not recorded."""
    allowed = {"lists_version": int, "level": str, "use_promote": bool}
    given = saved if isinstance(saved, Mapping) else {}
    return {
        key: given[key] if type(given.get(key)) is kind else _UNRECORDED[key]  # a bool is an int, too
        for key, kind in allowed.items()
    }
