"""Every reader of foreign files, on the same few hundred inputs each time; and on what broke an earlier version."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fuzzing import Target, judge, run
from targets import all_targets

TARGETS = all_targets()
CORPUS = sorted((Path(__file__).parent / "corpus").glob("*/*"))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of all targets, from a process of its own: autograd does not survive a fork of one that has used it."""
    path = tmp_path_factory.mktemp("fuzz") / "results.json"
    command = [sys.executable, "run.py", "--count", "40", "--first", "0", "--jobs", "1", "--json", str(path)]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert path.exists(), done.stdout + done.stderr
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", TARGETS)
def test_hostile_input_is_read_or_refused_in_one_line(results, name):
    result = results[name]
    assert not result["defects"], "\n".join(result["defects"])
    assert result["tried"] >= 3
    assert result["refused"] > 0, "no input was refused: the generator makes nothing hostile"


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_broke_an_earlier_version_is_read_or_refused(path):
    outcome, reason, _ = judge(TARGETS[path.parent.name], path)
    assert outcome != "defect", reason


def crash(path: Path) -> None:
    import ctypes

    ctypes.string_at(0)


def hoard(path: Path) -> None:
    bytearray(1 << 31)


def hang(path: Path) -> None:
    while True:
        pass


def leak(path: Path) -> None:
    raise KeyError("a traceback")


def test_a_generator_that_raises_is_named():
    result = run(Target("x", lambda rng, folder: folder / 1, leak), count=1)
    (defect,) = result.defects
    assert "the generator raised TypeError" in defect


@pytest.mark.parametrize(("read", "word"), [(crash, "died"), (hoard, "MiB"), (hang, "more than"), (leak, "KeyError")])
def test_the_harness_notices_every_kind_of_defect(read, word):
    target = Target("x", lambda rng, folder: folder, read, seconds=0.3, megabytes=64)
    result = run(target, count=2)
    assert result.tried == 2
    assert len(result.defects) == 2
    assert all(word in defect for defect in result.defects)
