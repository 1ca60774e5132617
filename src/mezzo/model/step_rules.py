"""The mixed-precision rules that a checkpoint records, compared with those of this run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mezzo.precision import Precision

_RECORDED = ("lists_version", "level", "use_promote")
_UNRECORDED = {"lists_version": 1, "level": None, "use_promote": False}
"""Rules of older checkpoints, which do not record them."""
_PROMOTING = ("O2", "O3")
"""Levels at which `use_promote` has an effect."""


def rules_of(precision: Precision) -> dict[str, Any] | None:
    """Return the rules that a checkpoint records; None in float32."""
    if precision.policy is None:
        return None
    policy = precision.policy.to_dict()
    return {key: policy[key] for key in _RECORDED}


def describe_new_rules(state: Mapping[str, Any], precision: Precision, option: str) -> str | None:
    """Return a line if checkpoint and run use different versions of the lists, otherwise None.

    If only the level or `use_promote` differs, there is no line: the user made that change.

    Args:
        state: State of the checkpoint, with `rules` unless it is old.
        precision: Precision of this run.
        option: The setting that selects the rule, as the user writes it: `--amp_use_promote {}`.
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
    """Return the recorded rules; replaces invalid values by those of _UNRECORDED."""
    allowed = {"lists_version": int, "level": str, "use_promote": bool}
    given = saved if isinstance(saved, Mapping) else {}
    return {
        key: given[key] if type(given.get(key)) is kind else _UNRECORDED[key]  # not isinstance: a bool is an int
        for key, kind in allowed.items()
    }
