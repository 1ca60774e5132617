"""The documents' own texts: planned with the release's script beside them, compared with what that script ran."""

import json

import pytest
from tipc_plans import planned_lines

from mezzo.tipc import choose_profile, make_plan
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
    tool, *arguments = step.words
    recorded = {"t": tool, "a": arguments, "k": step.kind}
    card = step.env.get("CUDA_VISIBLE_DEVICES")
    if card is not None:
        recorded["e"] = {"CUDA_VISIBLE_DEVICES": card}
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
    assert planned_lines(plan) == pair["status"]
