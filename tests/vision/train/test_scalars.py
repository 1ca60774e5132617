"""Logged numbers survive a kill and are dropped where a run goes back."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mezzo.errors import RunError
from mezzo.vision.train import ScalarLog, ScalarLogError, read_scalars


def open_log(folder: Path, **options) -> ScalarLog:
    return ScalarLog(folder, with_tensorboard=False, **options)


names = st.text(st.characters(codec="utf-8"), max_size=6).filter(lambda name: name not in ("step", "self"))
points = st.lists(st.tuples(st.integers(0, 20), st.dictionaries(names, st.floats(), max_size=3)), max_size=8)


def as_bits(entries) -> str:
    return repr(entries)  # repr of a float is exact, and nan is nan


@given(points, points, st.none() | st.integers(0, 20))
def test_points_come_back_and_those_from_the_resumed_step_on_are_dropped(tmp_path_factory, first, second, step):
    folder = tmp_path_factory.mktemp("log")
    with open_log(folder) as log:
        for at, values in first:
            log.add(at, **values)
    kept = [(at, values) for at, values in first if step is None or at < step]
    with open_log(folder, resume_at=step) as log:
        assert log.is_empty == (not kept)
        for at, values in second:
            log.add(at, **values)
        expected = [{"step": at, **values} for at, values in [*kept, *second]]
        assert as_bits(log.read()) == as_bits(expected)
    assert as_bits(ScalarLog.read_file(folder)) == as_bits(expected)
    assert [path.name for path in folder.iterdir()] == ["scalars.jsonl"]


def test_every_line_is_strict_json(tmp_path):
    with open_log(tmp_path) as log:
        log.add(3, loss=math.nan, lr=math.inf, top1=0.1, low=-math.inf)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    (line,) = (tmp_path / "scalars.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=refuse) == {
        "step": 3,
        "loss": "nan",
        "lr": "inf",
        "top1": 0.1,
        "low": "-inf",
    }


def test_tensors_and_whole_numbers_are_numbers_too(tmp_path):
    with open_log(tmp_path) as log:
        log.add(1, a=torch.tensor(0.5), b=2)
        assert log.read() == [{"step": 1, "a": 0.5, "b": 2.0}]


def test_a_killed_run_leaves_all_its_points(tmp_path):
    code = "\n".join(
        [
            "import os, sys",
            "from pathlib import Path",
            "from mezzo.vision.train import ScalarLog",
            "log = ScalarLog(Path(sys.argv[1]), with_tensorboard=False)",
            "for step in range(5): log.add(step, loss=step / 3)",
            "os.kill(os.getpid(), 9)",
        ]
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == -9
    assert ScalarLog.read_file(tmp_path) == [{"step": step, "loss": step / 3} for step in range(5)]


def test_a_line_that_was_cut_is_dropped_and_the_next_one_is_whole(tmp_path):
    path = tmp_path / "scalars.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert read_scalars(path) == [{"step": 1, "loss": 2.0}]
    with open_log(tmp_path) as log:
        log.add(2, loss=3.0)
    assert path.read_text() == '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 3.0}\n'


@pytest.mark.parametrize(
    "line", ["", "x", "[1]", "{}", '{"step": -1}', '{"step": true}', '{"step": 1, "a": []}', '{"step": 1, "a": "one"}']
)
def test_a_line_that_is_no_point_is_named(tmp_path, line):
    path = tmp_path / "scalars.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(ScalarLogError, match=r"scalars\.jsonl:2: .* is not a logged point; delete this line"):
        read_scalars(path)
    huge = f'{{"step": 1, "a": {10**400}}}\n'
    path.write_text(huge + "[" * 100_000 + "\n")
    with pytest.raises(ScalarLogError, match=r"scalars\.jsonl:1: "):
        read_scalars(path)


def test_mistakes_are_named(tmp_path):
    log = open_log(tmp_path)
    for step in (-1, 1.5, True):
        with pytest.raises(ValueError, match=f"step={step}: must be a whole number, 0 or more"):
            log.add(step, loss=1.0)
    log.close()
    log.close()
    with pytest.raises(ValueError, match=r"scalars\.jsonl: is closed; call add"):
        log.add(1, loss=1.0)
    with pytest.raises(ScalarLogError, match=r"scalars\.jsonl: no such file; give the file"):
        ScalarLog.read_file(tmp_path / "no")
    with pytest.raises(RunError, match=r"scalars\.jsonl: cannot be written: "):
        open_log(tmp_path / "scalars.jsonl")


def test_tensorboard_gets_the_same_points(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with ScalarLog(tmp_path) as log:
        for step in range(3):
            log.add(step, loss=step / 4)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 0.0), (1, 0.25), (2, 0.5)]


def test_without_tensorboard_there_is_one_notice(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    notices: list[str] = []
    with ScalarLog(tmp_path, notice=notices.append) as log:
        log.add(1, loss=1.0)
    assert ["scalars.jsonl" in notice and "TensorBoard" in notice for notice in notices] == [True]
    assert not (tmp_path / "tensorboard").exists()
