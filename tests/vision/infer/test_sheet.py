"""The sheet that a person looks at first: where the pictures stand, and that the legend has what occurs."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mezzo.vision.infer._sheet import (
    _GAP,
    _LINE,
    CELL,
    SHOWN,
    SheetRow,
    _class_text,
    _places,
    _shortened,
    _text_width,
    contact_sheet,
)
from mezzo.vision.infer.maps import class_colors, overlay


def result(name: str = "a.png", width: int = 24, height: int = 16, classes: tuple[int, ...] = (0, 1)) -> SheetRow:
    image = np.full((height, width, 3), (90, 160, 230), np.uint8)
    labels = np.resize(np.array(classes, np.uint8), (height, width))
    return name, image, labels


def sheet(tmp_path: Path, rows: list[SheetRow], num_classes: int, names: tuple[str, ...] = ()) -> np.ndarray:
    target = tmp_path / "out" / "sheet.png"
    contact_sheet(rows, target, num_classes=num_classes, class_names=names)
    return np.array(Image.open(target))


def has_colour(pixels: np.ndarray, colour: np.ndarray) -> bool:
    return bool((pixels == colour).all(axis=2).any())


def test_image_stands_beside_its_overlay(tmp_path: Path) -> None:
    name, image, _ = result()
    labels = np.ones(image.shape[:2], np.uint8)
    pixels = sheet(tmp_path, [(name, image, labels)], 2)
    row = _GAP + _LINE + 80
    assert (pixels[row, _GAP + CELL // 2] == image[0, 0]).all()
    assert (pixels[row, _GAP + CELL + _GAP // 2 + CELL // 2] == overlay(image, labels, num_classes=2)[0, 0]).all()


def test_legend_has_the_classes_that_occur_and_no_others(tmp_path: Path) -> None:
    rows = [result(classes=(1, 4)), result(classes=(4, 11))]
    legend = sheet(tmp_path, rows, 19)[-(_LINE + 2 * _GAP) :]
    shown = [index for index in range(19) if has_colour(legend, class_colors(19)[index])]
    assert shown == [1, 4, 11]


@pytest.mark.parametrize(
    ("index", "num_classes", "names", "expected"),
    [
        (1, 2, ("background", "person"), "1 person"),
        (0, 2, ("background", "person"), "0 background (left as it is)"),
        (0, 3, ("road", "car", "sky"), "0 road"),
        (7, 9, (), "class 7"),
    ],
)
def test_legend_says_the_name_of_a_class(index: int, num_classes: int, names: tuple[str, ...], expected: str) -> None:
    assert _class_text(index, num_classes, names) == expected


def test_results_after_the_twelfth_are_left_out(tmp_path: Path) -> None:
    rows = [result()] * SHOWN
    full = sheet(tmp_path, rows, 2)
    assert (sheet(tmp_path, [*rows, result(classes=(1,))], 2) == full).all()
    assert full.shape[1] == 4 * (CELL + _GAP) + 2 * _GAP


@pytest.mark.parametrize(("width", "height"), [(1, 400), (3000, 2), (1, 1)])
def test_odd_sizes_fit(tmp_path: Path, width: int, height: int) -> None:
    pixels = sheet(tmp_path, [result(width=width, height=height)], 2)
    assert pixels.shape[0] <= CELL + 2 * _LINE + 4 * _GAP


def test_all_names_of_many_classes_fit(tmp_path: Path) -> None:
    every = np.arange(150, dtype=np.uint8).reshape(10, 15)
    image = np.zeros((10, 15, 3), np.uint8)
    pixels = sheet(tmp_path, [("a", image, every)], 150, tuple(f"a thing of kind {index}" for index in range(150)))
    assert has_colour(pixels[-(_LINE + 2 * _GAP) :], class_colors(150)[149])


def test_name_in_any_script_is_drawn(tmp_path: Path) -> None:
    sheet(tmp_path, [result("人/ñandú.png")], 2, ("фон", "人"))


def test_long_name_keeps_its_end() -> None:
    short = _shortened("folder/" * 40 + "cat.png", 2 * CELL)
    assert short.startswith("...")
    assert short.endswith("folder/cat.png")
    assert _text_width(short) <= 2 * CELL


@given(widths=st.lists(st.integers(1, 300), min_size=1, max_size=30), width=st.integers(100, 600))
def test_entries_of_the_legend_do_not_overlap_and_leave_the_line_only_when_alone(widths: list[int], width: int) -> None:
    places = list(_places(widths, width))
    ends = [left + wide for (left, _), wide in zip(places, widths, strict=True)]
    for (left, line), before_end, (_, before_line) in zip(places[1:], ends, places, strict=False):
        assert (left, line) in ((before_end, before_line), (0, before_line + 1))
    assert all(end <= width or left == 0 for end, (left, _) in zip(ends, places, strict=True))


def test_sheet_of_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sheet\.png: no result to show on a sheet$"):
        contact_sheet([], tmp_path / "sheet.png", num_classes=2)


@pytest.mark.parametrize("name", ["two\nlines", "\x1b[31mred\r\x00", "\ud800", "x" * 300_000])
def test_odd_names_are_drawn_on_one_line(tmp_path: Path, name: str) -> None:
    sheet(tmp_path, [result(f"{name}.png")], 3, ("a", name, name))


def test_legend_of_very_many_classes_is_cut(tmp_path: Path) -> None:
    labels = np.arange(100_000, dtype=np.int32).reshape(250, 400)
    pixels = sheet(tmp_path, [("a", np.zeros((250, 400, 3), np.uint8), labels)], 2**31)
    assert pixels.shape[0] < 5_000
