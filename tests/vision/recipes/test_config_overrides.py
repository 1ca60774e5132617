"""Options over the settings of a file."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import recipe_files
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzo.vision.recipes import RecipeError


def test_names_lead_into_blocks_and_lists(tmp_path: Path) -> None:
    opts = ["model.num_classes=2", "train_dataset.transforms.0.target_size=[16, 8]", "optimizer.weight_decay=1e-3"]
    recipe = recipe_files.load(tmp_path, recipe_files.TEXT, opts=opts)
    assert recipe.resolved["train_dataset"]["transforms"][0] == {"type": "Resize", "target_size": [16, 8]}
    assert recipe.optimizer.weight_decay == 0.001
    assert recipe.resolved["model"]["num_classes"] == 2


def test_later_options_win_and_named_ones_win_over_all(tmp_path: Path) -> None:
    opts = ["batch_size=7", "batch_size=8", "iters=50"]
    recipe = recipe_files.load(tmp_path, recipe_files.TEXT, opts=opts, batch_size=9)
    assert (recipe.batch_size, recipe.iters) == (9, 50)


def test_iterations_are_also_the_length_of_the_decay(tmp_path: Path) -> None:
    recipe = recipe_files.load(tmp_path, recipe_files.TEXT, iters=20)
    assert recipe.iters == 20
    assert recipe.resolved["lr_scheduler"]["decay_steps"] == 20
    assert recipe.schedule.lr(10) == pytest.approx(0.01 * 0.5**0.9)
    assert recipe.schedule.lr(20) == 0


def test_iterations_of_the_command_line_win_over_a_written_length_of_the_decay(tmp_path: Path) -> None:
    text = recipe_files.TEXT.replace("  power: 0.9\n", "  power: 0.9\n  decay_steps: 80\n")
    assert recipe_files.load(tmp_path, text).schedule.lr(80) == 0
    assert recipe_files.load(tmp_path, text).schedule.lr(79) > 0
    assert recipe_files.load(tmp_path, text, iters=20).schedule.lr(20) == 0


def test_learning_rate_replaces_the_first_rate(tmp_path: Path) -> None:
    recipe = recipe_files.load(tmp_path, recipe_files.TEXT, learning_rate=0.5)
    assert (recipe.schedule.lr(0), recipe.optimizer.lr) == (0.5, 0.5)


def test_the_same_fault_twice_is_told_once_and_the_option_is_left_out(tmp_path: Path) -> None:
    assert len(recipe_files.faults(tmp_path, recipe_files.TEXT, opts=["iters=[1", "iters=[1"])) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opts": ["model"]}, "--opts: 'model'"),
        ({"opts": ["model..x=1"]}, "--opts: 'model..x=1'"),
        ({"opts": ["=1"]}, "--opts: '=1'"),
        ({"opts": ["iters=[1"]}, "--opts iters: not YAML: expected ',' or ']', but got '<stream end>'"),
        ({"opts": ["iters.x=1"]}, "--opts iters.x: 'x' has no place: what is in front of it is 100, not a block"),
        (
            {"opts": ["train_dataset.transforms.9.prob=1"]},
            "--opts train_dataset.transforms.9.prob: '9' is not an index of a list of 3; indices start at 0",
        ),
        (
            {"opts": ["train_dataset.transforms.x=1"]},
            "--opts train_dataset.transforms.x: 'x' is not an index of a list of 3; indices start at 0",
        ),
        (
            {"opts": ["model.num_clases=3"]},
            "--opts model.num_clases: unknown option of 'PPHumanSegLite' 'num_clases'; did you mean 'num_classes'?",
        ),
        ({"opts": [".".join("a" * 40) + "=1"]}, f"--opts {'.'.join('a' * 40)}: 40 names, at most 32 are allowed"),
        ({"batch_size": 0}, "--batch_size: batch_size=0"),
        ({"iters": -1}, "--iters: iters=-1"),
        (
            {"learning_rate": float("nan")},
            "--learning_rate: PolynomialDecay: learning_rate=nan",
        ),
        (
            {"learning_rate": 0.1, "opts": ["lr_scheduler={type: PiecewiseDecay, boundaries: [5], values: [1, 2]}"]},
            "--learning_rate: PiecewiseDecay has a list of rates; use --opts lr_scheduler.values=[...]",
        ),
    ],
)
def test_what_is_wrong_with_an_option_is_said_at_the_option(tmp_path: Path, options: dict, message: str) -> None:
    assert message in recipe_files.faults(tmp_path, recipe_files.TEXT, **options)


NAMES = st.sampled_from(["model", "num_classes", "train_dataset", "transforms", "0", "1", "a", ""])
OPTION = st.tuples(
    st.lists(NAMES, min_size=1, max_size=4).map(".".join),
    st.sampled_from(["=1", "=2", "=[1, {a: 2}]", "={a: [0]}", "", "=["]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(OPTION.map("".join), max_size=6))
def test_any_options_are_applied_or_noted(tmp_path_factory: pytest.TempPathFactory, options: list[str]) -> None:
    folder = tmp_path_factory.getbasetemp()
    with contextlib.suppress(RecipeError):
        recipe_files.load(folder, recipe_files.TEXT, opts=options)
