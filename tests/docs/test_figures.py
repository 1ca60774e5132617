"""The committed figures are what docs/figures/draw.py writes, with texts that fit, and numbers that are those of the pages."""

import importlib.util
import math
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from doc_pages import DOCS, pages
from doc_tables import read_table

from test_layers import ROWS

FOLDER = DOCS / "figures"
SVG = "{http://www.w3.org/2000/svg}"
WIDEST_LETTER = 0.53  # of the font's size: the mean of the widest usual sans-serif (DejaVu Sans) over our texts


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw", FOLDER / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DRAW = load_script()


def test_committed_figures_are_what_the_script_writes(tmp_path: Path) -> None:
    DRAW.write_figures(tmp_path)
    assert {path.name for path in FOLDER.glob("*.svg")} == {path.name for path in tmp_path.iterdir()}
    for drawn in tmp_path.iterdir():
        committed = (FOLDER / drawn.name).read_bytes()
        assert committed == drawn.read_bytes(), f"{drawn.name}: run python docs/figures/draw.py"


@pytest.mark.parametrize("name", DRAW.FIGURES)
def test_figures_are_self_contained_with_text_as_text_in_two_themes(name: str) -> None:
    source = (FOLDER / name).read_text(encoding="utf-8")
    root = ElementTree.fromstring(source)
    assert root.find(f"{SVG}title") is not None
    assert len(list(root.iter(f"{SVG}text"))) > 10
    assert not list(root.iter(f"{SVG}image"))
    assert "prefers-color-scheme:dark" in source
    assert re.findall(r"(?:href|src|url)\W+http", source) == []
    page = next(
        root.iter(f"{SVG}rect")
    )  # opaque and first: whatever the site's own theme is, it does not shine through
    assert page.get("class") == "page"
    assert (page.get("width"), page.get("height")) == (root.get("width"), root.get("height"))


@pytest.mark.parametrize("name", DRAW.FIGURES)
def test_no_text_runs_out_of_its_figure(name: str) -> None:
    root = ElementTree.fromstring((FOLDER / name).read_text(encoding="utf-8"))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for text in root.iter(f"{SVG}text"):
        size = 13 if text.get("class") in ("text", "name") else 12
        length = len(text.text or "") * size * WIDEST_LETTER
        before = {"start": 0.0, "middle": 0.5, "end": 1.0}[text.get("text-anchor", "start")]
        start = float(text.get("x", 0)) - before * length
        assert start >= 0, text.text
        assert start + length <= width, text.text
        assert size <= float(text.get("y", 0)) <= height, text.text


def test_box_texts_fit_into_their_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    widest = []

    def measure(figure: object, role: str, x: float, y: float, width: float, height: float, lines: list[str]) -> None:
        widest.extend((len(line) * 12 * WIDEST_LETTER / width, line) for line in lines)

    monkeypatch.setattr(DRAW.Figure, "box", measure)
    for draw in DRAW.FIGURES.values():
        draw()
    assert max(widest)[0] <= 1, max(widest)


def test_numbers_of_the_figures_are_those_of_the_tables() -> None:
    layout = read_table("formats.md", "layout")
    drawn = [(name, exponent, fraction) for name, exponent, fraction, _ in DRAW.FORMATS]
    assert drawn == [(row["format"], int(row["exponent bits"]), int(row["fraction bits"])) for row in layout]
    of_page = {row["format"]: row for row in read_table("formats.md", "range")}
    for name, subnormal, normal, top, least, most in DRAW.RANGES:
        if name not in of_page:
            continue
        row = of_page[name]
        assert row["smallest subnormal"].startswith(f"2^{subnormal} ")
        assert row["smallest normal"].startswith(f"2^{normal} ")
        assert least == f"2^{subnormal}"
        assert float(most) == pytest.approx(float(row["largest"]), rel=0.02)  # 3.4e38 has two digits
        assert round(math.log2(float(row["largest"]))) == top


def test_the_window_under_a_scale_is_that_of_float16_moved_down() -> None:
    ranges = {name: numbers for name, *numbers in DRAW.RANGES}
    subnormal, normal, top, *_ = ranges["float16"]
    assert ranges["float16, scale 2^15"][:3] == [subnormal - 15, normal - 15, top - 15]


def test_every_figure_stands_on_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in pages())
    for name in DRAW.FIGURES:
        assert f"](figures/{name})" in text


def test_the_picture_of_the_layers_has_the_order_of_the_test_of_layers() -> None:
    drawn = [set(packages) for _, rows in DRAW.LAYERS for _, packages, _ in rows]
    shown = set().union(*drawn)
    in_test = [row for each in ROWS if (row := set(each) & shown)]
    depth = {package: number for number, row in enumerate(in_test) for package in row}
    order = [max(depth[package] for package in row) for row in drawn]
    assert order == sorted(order)
    assert {package for row in ROWS for package in row if not package.startswith("_")} <= shown
