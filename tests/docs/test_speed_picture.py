"""Figures of the first picture, of the README's text and of the comparison stand in the measurements they cite."""

import json
import re

import pytest
from doc_pages import DOCS, ROOT, without_blocks
from doc_tables import read_table

SPEED = json.loads((DOCS / "figures" / "speed.json").read_text(encoding="utf-8"))
ROWS = [(network["name"], row) for network in SPEED["networks"] for row in network["rows"]]


def numbers(text: str) -> set[float]:
    """Return all numbers of a text."""
    return {float(number) for number in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\d)", text.replace(",", ""))}


@pytest.mark.parametrize(("network", "row"), ROWS, ids=lambda part: part if isinstance(part, str) else part["side"])
def test_a_bar_is_as_long_as_its_measurement_says(network: str, row: dict[str, object]) -> None:
    measured = (ROOT / str(row["source"])).read_text(encoding="utf-8")
    wanted = {float(str(row[key])) for key in ("ms", "gib") if row[key] is not None}
    first = re.split("[ -]", network)[0]
    lines = measured.splitlines()
    (start, *_) = [number for number, line in enumerate(lines) if line.startswith("|") and first in line.split("(")[0]]
    near = lines[start : start + 3]  # a network has a row per side; where its name is not repeated, they follow it
    assert any(wanted <= numbers(line) for line in near), (network, row["side"], wanted)


def test_every_network_is_compared_with_eager_torch() -> None:
    for network in SPEED["networks"]:
        assert network["rows"][0]["side"] == "eager"
        assert {row["side"] for row in network["rows"]} <= SPEED["sides"].keys()


def test_figures_in_the_text_of_the_readme_are_measured() -> None:
    text = " ".join(without_blocks(ROOT / "README.md").split())
    sources = {str(row["source"]) for _, row in ROWS}
    known = {round(number, 1) for source in sources for number in numbers((ROOT / source).read_text(encoding="utf-8"))}
    for figure in re.findall(r"([\d.]+) ms", text):
        assert float(figure) in known, figure


def test_steps_of_the_comparison_stand_in_its_measurement() -> None:
    known = numbers((ROOT / "benchmarks" / "step_h200_202611.md").read_text(encoding="utf-8"))
    for row in read_table("comparison.md", "step"):
        for cell in list(row.values())[1:]:
            assert numbers(cell) <= known, cell
