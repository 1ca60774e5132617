"""The best classes and the lines that say them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mezzo.export import DeployError
from mezzo.vision.infer.classes import ClassScore, format_classes, top_classes


@given(images=st.integers(0, 4), classes=st.integers(1, 9), k=st.integers(1, 12), seed=st.integers(0, 99))
def test_classes_and_scores_are_those_of_torch_topk(images: int, classes: int, k: int, seed: int) -> None:
    scores = np.random.default_rng(seed).permutation(images * classes).reshape(images, classes).astype(np.float32)
    found = top_classes(scores, k)
    expected = torch.from_numpy(scores).topk(min(k, classes))
    assert [[each.index for each in row] for row in found] == expected.indices.tolist()
    assert [[each.score for each in row] for row in found] == expected.values.tolist()


def test_of_equal_scores_the_smaller_index_is_first() -> None:
    (row,) = top_classes(np.array([[0.2, 0.4, 0.4]]), 2)
    assert [each.index for each in row] == [1, 2]


def test_half_precision_scores_are_taken() -> None:
    assert top_classes(np.array([[1, 3]], np.float16), 1) == [[ClassScore(1, None, 3.0)]]


@pytest.mark.parametrize("names", [None, ()])
def test_name_is_none_where_names_are_not_known(names: tuple[str, ...] | None) -> None:
    assert top_classes(np.array([[0.2, 0.8]]), 1, names)[0][0].name is None


def test_line_names_file_class_and_score() -> None:
    line = format_classes(Path("pets", "tom.jpg"), [ClassScore(7, "cat", 0.93124)])
    assert line == "image_name: pets/tom.jpg, class_id: 7, class_name: cat, score: 0.9312"


def test_unknown_name_is_left_out_and_further_classes_are_indented() -> None:
    (row,) = top_classes(np.array([[0.1, 0.7, 0.2]]), 3)
    assert format_classes("a.jpg", row).split("\n") == [
        "image_name: a.jpg, class_id: 1, score: 0.7000",
        "  class_id: 2, score: 0.2000",
        "  class_id: 0, score: 0.1000",
    ]


def test_less_than_one_class_is_an_error() -> None:
    with pytest.raises(ValueError, match="k=0: must be at least 1"):
        top_classes(np.zeros((1, 3)), 0)


def test_output_of_another_shape_is_an_error() -> None:
    with pytest.raises(DeployError) as error:
        top_classes(np.zeros((1, 3, 1, 1)), 1)
    assert str(error.value) == "the network gives an array (1, 3, 1, 1); a classifier gives (images, classes)"


def test_names_of_another_number_of_classes_are_an_error() -> None:
    with pytest.raises(DeployError) as error:
        top_classes(np.zeros((1, 3)), 1, ["a", "b"])
    assert str(error.value) == "2 class names, but the network gives 3 scores an image"


def test_names_cannot_write_lines_of_their_own_or_command_a_terminal() -> None:
    name = "cat\nimage_name: b.jpg, class_id: 1, class_name: dog\x1b]0;x\x07"
    line = format_classes(f"a.jpg\r\n{name}", [ClassScore(7, name, 0.5)])
    assert line.isprintable()
    assert "[bold]x[/bold]" in format_classes("a", [ClassScore(0, "[bold]x[/bold]", 1.0)])
