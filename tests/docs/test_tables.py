"""The tables of the pages are those of the code."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from doc_pages import DOCS

from mezzo.amp import VARIANTS, Policy, black_list, white_list


@pytest.fixture(scope="module")
def tables() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "_tables.py"))


def test_tables_are_up_to_date(tables: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert tables["main"](["--check"]) == 0, capsys.readouterr().err


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"][2:]


def test_the_levels_show_what_the_policy_decides(tables: dict[str, Any]) -> None:
    found = {(row[0], row[1]): row[2:] for row in rows(tables["levels"]())}
    assert found["O1", "gray"][1:] == ["half", "float32", "float32"]
    assert found["O2", "gray"][1:] == ["half", "float32", "float32"]
    assert found["O2, `use_promote=False`", "gray"][1:] == ["half", "half", "half"]
    assert found["OD", "white"][1:] == ["float32, computed in half"] * 3
    assert found["O2", "fp32 inside, low out"][1:] == ["half, computed in float32", "float32", "float32"]
    for level in ("OD", "O1", "O2"):
        assert int(found[level, "white"][0]) == len(white_list()["float16"][level])
        counts = [int(row[0]) for (name, _), row in found.items() if name == level]
        assert sum(counts) == len(VARIANTS)
    # float32 although a list says otherwise: those of the black list without a half kernel are counted with the others.
    without_kernel = {"ctc_loss", "nuclear_norm.full", "nuclear_norm.dim"}
    assert int(found["O1", "black"][0]) == len(black_list()["float16"]["O1"] - without_kernel)


def test_every_operator_is_in_the_table_of_operators_once(tables: dict[str, Any]) -> None:
    named = [name.strip("`") for row in rows(tables["families"]()) for name in row[4].split()]
    assert sorted(named) == sorted(variant for variant in VARIANTS if not variant.startswith("_"))


@pytest.mark.parametrize("level", ["OD", "O1", "O2"])
def test_the_table_of_operators_is_what_happens(level: str, tables: dict[str, Any]) -> None:
    column = {"OD": 1, "O1": 2, "O2": 3}[level]
    half, full = torch.float16, torch.float32
    meaning = {
        "half": (half, half),
        "float32": (full, full),
        "as its inputs": (half, full),
        "half, computed in float32": (half, half),
        "as its inputs, computed in float32": (half, full),
        "float32, computed in half": (full, full),
    }
    policy = Policy.create(level)
    for row in rows(tables["families"]()):
        for name in row[4].split():
            got = tuple(policy.decide(name.strip("`"), [dtype]).dtype for dtype in (half, full))
            assert got == meaning[row[column]], (name, level)


def test_the_figure_of_the_scale_follows_the_rule(tables: dict[str, Any]) -> None:
    lines = {line[:4].strip(): line[6:] for line in tables["scale_over_time"]().splitlines() if line.startswith("2^")}
    steps = ["".join(line[i : i + 1] for line in lines.values()).strip() for i in range(96)]
    exponent = [next(int(power[2:]) for power, line in lines.items() if line[i : i + 1].strip()) for i in range(96)]
    power, good, bad = 15, 0, 0
    for i in range(96):
        assert exponent[i] == power
        is_bad = power > (13 if i < 48 else 11)
        assert steps[i] == ("x" if is_bad else "-")
        good, bad = (0, bad + 1) if is_bad else (good + 1, 0)
        if bad == 2:
            power, bad = power - 1, 0
        if good == 12:
            power, good = power + 1, 0


def test_a_page_without_its_markers_is_refused(tables: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the markers of 'levels' must stand once in the page"):
        tables["filled"]("# Levels\n", "levels", "| a |")
    marked = "a\n<!-- made by docs/_tables.py: x -->\nold\n<!-- end of x -->\nb\n"
    assert tables["filled"](marked, "x", "new") == (
        "a\n<!-- made by docs/_tables.py: x -->\n\nnew\n\n<!-- end of x -->\nb\n"
    )


def test_a_stale_page_is_named_and_then_written(
    tables: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in {page for page, _ in tables["TABLES"]}:
        text = (DOCS / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace("| O1 | gray |", "| O1 | grey |"), encoding="utf-8")
    main = tables["main"]
    main.__globals__["PAGES"] = tmp_path
    try:
        assert main(["--check"]) == 1
        said = capsys.readouterr().err
        assert said == "levels.md: its tables are not those of the code; run python docs/_tables.py\n"
        assert main([]) == 0
        assert (tmp_path / "levels.md").read_text(encoding="utf-8") == (DOCS / "levels.md").read_text(encoding="utf-8")
    finally:
        main.__globals__["PAGES"] = DOCS


def test_doctests_of_docstrings_are_fenced() -> None:
    pytest.importorskip("griffe", reason="the docs extra is not installed")
    fence = runpy.run_path(str(DOCS / "_docstrings.py"))["fence_doctests"]
    text = "Return it.\n\n>>> f(1)  # doctest: +ELLIPSIS\n1\n>>> f(2)\n2\n\nMore."
    assert fence(text) == "Return it.\n\n```pycon\n>>> f(1)\n1\n>>> f(2)\n2\n```\n\nMore."
