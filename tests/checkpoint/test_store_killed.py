"""Whenever a process is killed, a whole checkpoint is there and is found."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("killed_save.py")


def tries(tmp_path: Path, action: str) -> list[dict]:
    done = subprocess.run([sys.executable, str(PROGRAM), str(tmp_path), action], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["code"] for one in found[:-1]] == [9] * (len(found) - 1)
    assert found[-1]["code"] == 0
    assert all(one["left"] == [] for one in found), "clean() leaves something behind"
    return found


@pytest.mark.parametrize(
    ("action", "least", "latest", "best"),
    [
        ("new", 15, {3, 4}, {1}),
        ("replace", 15, {3}, {1, 2}),
        ("replace_latest", 20, {3, 33}, {1}),
        ("prune", 5, {3}, {1}),
    ],
)
def test_killed_anywhere_the_old_or_the_new_checkpoint_is_read(tmp_path, action, least, latest, best):
    found = tries(tmp_path, action)
    assert len(found) >= least  # it was killed in that many places
    for when in ("before", "after"):
        assert {one[when]["latest"] for one in found} == latest
        assert {one[when]["best"] for one in found} == best
    for one in found:
        whole = one["after"]["whole"]
        assert whole["iter_2"] == 2
        assert whole["iter_3"] in latest | {3}
        assert whole["best_model"] in best
        assert set(whole) <= {"iter_1", "iter_2", "iter_3", "iter_4", "best_model"}
