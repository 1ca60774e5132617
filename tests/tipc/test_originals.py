"""The documents' own texts: planned with the release's script beside them, compared with what that script ran."""

import json
import shlex

import pytest

from mezzo.tipc import choose_profile, make_plan
from mezzo.tipc._plan import CVD
from mezzo.tipc._status import banner, status_line
from mezzo.tipc._text import evaluated
from originals import ORIGINALS, needs_originals

RECORDED = ORIGINALS / "commands.jsonl"
PAIRS = [json.loads(line) for line in RECORDED.read_text().splitlines()] if RECORDED.is_file() else []
PROFILES = {"seg-2.6": "seg-2.6", "mobilenetv3-tutorial": "tutorial"}


def planned(pair):
    root = ORIGINALS / pair["source"]
    text = (root / pair["config"]).read_text()
    profile, _ = choose_profile(None, text, root)
    return profile, make_plan(text, pair["mode"], profile)


def as_recorded(step):
    """Return a step as the recording has it: tool, arguments, card, log, kind."""
    tool, *arguments = shlex.split(evaluated(step.bare))
    recorded = {"t": tool, "a": arguments, "k": step.kind}
    if step.env.get(CVD) is not None:
        recorded["e"] = {CVD: step.env[CVD]}
    if step.output == "text":
        recorded["o"] = step.log.removeprefix("./")
    return recorded


@needs_originals
def test_every_pair_of_text_and_mode_was_recorded():
    assert len(PAIRS) == 35


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair['config'].split('/')[-2]}-{pair['mode']}")
def test_the_plan_is_what_the_release_ran_word_for_word(pair):
    profile, plan = planned(pair)
    assert profile.name == PROFILES[pair["source"]]
    assert [as_recorded(step) for step in plan.steps if step.kind != "shell"] == pair["commands"]
    lines = [banner(plan)] if plan.banner else []
    lines += [status_line(step, True) for step in plan.steps if step.status is not None]
    assert lines == pair["status"]
