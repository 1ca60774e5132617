"""A checkpoint says under which rules it was written; a run that goes on under others is told, with the cure."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import person_config, train

import mezzo
from mezzo.amp import Policy
from mezzo.checkpoint import read_state, write_state
from mezzo.model.precision import make_precision
from mezzo.model.step_rules import describe_new_rules, rules_of
from mezzo.precision import Precision
from mezzo.vision.train import RunOptions
from model_loops import make_data, make_model

OPTION = "--amp_use_promote {}"
OLD = 1
NEW = Policy.create("O1").to_dict()["lists_version"]


def mixed(level: str = "O2", use_promote: bool = True) -> Precision:
    return Precision(level, "bfloat16", use_promote=use_promote)


def test_what_is_recorded_of_a_policy() -> None:
    assert rules_of(mixed()) == {"lists_version": NEW, "level": "O2", "use_promote": True}
    assert rules_of(Precision("O0")) is None


def recorded(version: Any = OLD, level: Any = "O2", use_promote: Any = False) -> dict[str, Any]:
    return {"rules": {"lists_version": version, "level": level, "use_promote": use_promote}}


CHANGED = (
    f"written under version {OLD} of the operator lists, this is {NEW}: some operators may compute in another "
    "precision; custom lists change one back"
)
PROMOTED = (
    "; operators on no list now stay float32 where an input is float32: "
    "--amp_use_promote False keeps most of the old rule"
)
PERHAPS = PROMOTED.replace("; ", "; if that was at O2 or O3, ", 1)


@pytest.mark.parametrize(
    ("state", "precision", "line"),
    [
        (recorded(), mixed(), CHANGED + PROMOTED),
        (recorded(level="O3"), mixed(), CHANGED + PROMOTED),
        ({}, mixed(), CHANGED + PERHAPS),  # from before rules were recorded
        (
            recorded(NEW + 1, use_promote=True),
            mixed("O2", False),
            CHANGED.replace(str(OLD), str(NEW + 1), 1)
            + PROMOTED.replace("stay float32", "become half").replace("promote False", "promote True"),
        ),
        # use_promote changes nothing, or brings nothing back
        ({}, mixed("O1"), CHANGED),
        (recorded(level="O1"), mixed(), CHANGED),
        (recorded(), mixed("O1"), CHANGED),
        ({}, mixed("O2", False), CHANGED),
        (recorded(), mixed("O2", False), CHANGED),
        # damaged
        ({"rules": "damaged"}, mixed(), CHANGED + PERHAPS),
        (recorded(use_promote="rm -rf /"), mixed(), CHANGED + PROMOTED),
        (recorded(version="1\n2", level=3, use_promote=1), mixed(), CHANGED + PERHAPS),
        (recorded(version=True), mixed(), CHANGED + PROMOTED),
        # nothing to say
        (recorded(NEW), mixed(), None),  # the user's own change
        (recorded(NEW, "O1"), mixed(), None),
        ({"rules": None}, mixed(), None),  # float32 before
        ({}, Precision("O0"), None),  # float32 now
    ],
)
def test_a_line_tells_of_other_rules(state: dict[str, Any], precision: Any, line: str | None) -> None:
    assert describe_new_rules(state, precision, OPTION) == line


def forget_rules(folder: Path) -> None:
    """Make a checkpoint one of an older release."""
    state = read_state(folder)
    del state["rules"]
    write_state(folder, state)


def test_a_run_that_is_resumed_under_other_rules_says_how_to_keep_the_old_ones(
    persons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = person_config(tmp_path, persons, iters=2)
    options = ["--config", config, "--precision", "bf16", "--amp_level", "O2", "--save_dir", tmp_path / "out"]
    assert train(*options, "--iters", 1, "--amp_use_promote=False") == 0
    folder = tmp_path / "out" / "iter_1"
    assert read_state(folder)["rules"] == {"lists_version": NEW, "level": "O2", "use_promote": False}
    forget_rules(folder)
    capsys.readouterr()
    resumed = [*options, "--iters", 1, "--resume", folder]
    assert train(*resumed, "--amp_use_promote") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "operator lists" in line]
    assert len(lines) == 1
    assert "--amp_use_promote False keeps most of the old rule" in lines[0]
    assert train(*resumed, "--amp-use-promote", "False") == 0
    out = capsys.readouterr().out
    assert CHANGED in out
    assert "old rule" not in out


def test_use_promote_reaches_the_policy() -> None:
    for use_promote in (True, False):
        policy = make_precision("bf16", "O2", use_promote=use_promote).policy
        assert policy == Policy.create("O2", "bfloat16", use_promote=use_promote)
    assert make_precision("bf16", "O2").policy == Policy.create("O2", "bfloat16")
    assert RunOptions(amp_use_promote=False).to_dict()["amp_use_promote"] is False


def test_use_promote_below_o2_is_said_to_have_no_effect(
    persons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = person_config(tmp_path, persons, iters=1)
    assert train("--config", config, "--amp_use_promote", "--save_dir", tmp_path / "out") == 0
    assert "--amp_use_promote has no effect below level O2" in capsys.readouterr().out


def test_a_wrong_word_for_use_promote_is_one_line_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--data-path", "x", "--amp_use_promote=maybe") == 2
    err = capsys.readouterr().err
    assert "'maybe': must be True or False" in err
    assert err.count("\n") == 1


def saved_model(folder: Path, amp_configs: Any) -> mezzo.Model:
    model = make_model(amp_configs)
    model.fit(make_data(), batch_size=4, shuffle=False, verbose=0)
    model.save(folder)
    return model


def test_a_model_warns_in_the_callers_line_when_it_goes_on_under_other_rules(tmp_path: Path) -> None:
    config = {"level": "O2", "dtype": torch.bfloat16}
    saved_model(tmp_path / "net", {**config, "use_promote": False})
    assert read_state(tmp_path / "net")["rules"]["use_promote"] is False
    make_model({**config, "use_promote": True}).load(tmp_path / "net")  # of one version: the user's own change
    forget_rules(tmp_path / "net")
    other = make_model({**config, "use_promote": True})
    with pytest.warns(UserWarning, match="amp_configs with 'use_promote': False keeps most of the old rule") as caught:
        other.load(tmp_path / "net")
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="custom lists change one back$"):  # other operators changed as well
        make_model({**config, "use_promote": False}).load(tmp_path / "net")


def test_weights_alone_are_taken_without_a_word(tmp_path: Path) -> None:
    config = {"level": "O2", "dtype": "bfloat16", "use_promote": True}
    saved_model(tmp_path / "net", config)
    forget_rules(tmp_path / "net")
    make_model(config).load(tmp_path / "net", reset_optimizer=True)
    make_model(None).load(tmp_path / "net")
