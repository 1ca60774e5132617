"""Curves are drawn as PNG files that show the data."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mezzo.errors import RunError
from mezzo.vision.train import ScalarLogError, plot_curves, plot_run


def log(folder: Path, *points: dict) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / "scalars.jsonl"
    path.write_text("".join(json.dumps(point) + "\n" for point in points))
    return path


def steps(*losses: float) -> list[dict]:
    return [{"step": n, "loss": loss, "lr": 0.1 / (n + 1), "ips": 100.0} for n, loss in enumerate(losses)]


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        assert image.format == "PNG"
        image.load()
        return np.asarray(image.convert("RGB"))


def test_a_run_is_a_png_with_a_panel_a_kind_of_number(tmp_path):
    plot_run(log(tmp_path / "a", *steps(3, 2, 1)), tmp_path / "two.png")
    plot_run(log(tmp_path / "a", *steps(3, 2, 1), {"step": 3, "mIoU": 0.5}), tmp_path / "three.png")
    two, three = pixels(tmp_path / "two.png"), pixels(tmp_path / "three.png")
    assert two.shape[1] == three.shape[1] >= 1000
    assert three.shape[0] * 2 == two.shape[0] * 3
    assert not (two == 255).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "three.png", "two.png"]


def test_other_numbers_give_another_picture_and_the_same_give_the_same(tmp_path):
    for name, last in (("one", 1), ("same", 1), ("other", 9)):
        plot_run(log(tmp_path / "run", *steps(3, 2, last)), tmp_path / name)
    one, same, other = ((tmp_path / name).read_bytes() for name in ("one", "same", "other"))
    assert one == same
    assert one != other


def test_numbers_that_are_not_finite_leave_a_gap(tmp_path):
    words = [{"step": 9, "loss": "nan"}, {"step": 10, "loss": "inf"}, {"step": 11, "loss": math.pi}]
    plot_run(log(tmp_path / "run", *steps(3, 2), *words), tmp_path / "gap.png")
    plot_run(log(tmp_path / "nothing_else", words[0]), tmp_path / "empty.png")
    assert pixels(tmp_path / "gap.png").shape[0] > pixels(tmp_path / "empty.png").shape[0]


def test_runs_are_compared_in_one_panel(tmp_path):
    runs = {"fp32": log(tmp_path / "a", *steps(3, 2, 1)), "O1 $\\alpha": log(tmp_path / "b", *steps(3, 2, 1.1))}
    plot_curves(runs, tmp_path / "both.png", "loss")
    plot_curves({"fp32": runs["fp32"]}, tmp_path / "one.png", "loss")
    assert (pixels(tmp_path / "both.png") != pixels(tmp_path / "one.png")).any()


def test_a_log_with_nothing_to_draw_is_one_clear_error(tmp_path):
    for points in ([], [{"step": 1, "ips": 5.0, "batch_cost": 1.0}]):
        with pytest.raises(ScalarLogError, match=r"scalars\.jsonl: has no loss, learning rate or metric to draw"):
            plot_run(log(tmp_path, *points), tmp_path / "x.png")
    with pytest.raises(ScalarLogError, match=r"scalars\.jsonl: is empty; nothing was logged yet"):
        plot_curves({"a": log(tmp_path)}, tmp_path / "x.png", "loss")
    assert not (tmp_path / "x.png").exists()


def test_an_unknown_number_is_named_with_the_nearest(tmp_path):
    with pytest.raises(ScalarLogError, match=r"unknown metric 'los'; did you mean 'loss'\? allowed: ips, loss, lr"):
        plot_curves({"a": log(tmp_path, *steps(1))}, tmp_path / "x.png", "los")
    with pytest.raises(ValueError, match=r"runs=\{\}: give at least one run to draw"):
        plot_curves({}, tmp_path / "x.png", "loss")
    with pytest.raises(RunError, match=r"x\.png: cannot be written: "):
        plot_run(log(tmp_path, *steps(1)), tmp_path / "scalars.jsonl" / "x.png")


def test_a_missing_library_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ScalarLogError, match=r"^plots need the package matplotlib: pip install 'mezzo\[vision\]'$"):
        plot_run(log(tmp_path, *steps(1)), tmp_path / "x.png")
