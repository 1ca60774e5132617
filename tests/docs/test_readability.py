"""The readability check counts what it claims to count, and fails where a page gets worse."""

import runpy
from typing import Any

import pytest
from doc_pages import ROOT

TOOL: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "readability.py"))
KNOWN = TOOL["terms"]("# Glossary\n\n## Leak\nx\n\n## Master weight\nx\n\n## OD\nx\n\n## Half\nx\n")


def measured(text: str) -> Any:
    return TOOL["measure"]("docs/page.md", text, KNOWN)


def test_lines_of_prose_are_measured_and_code_tables_and_links_are_not() -> None:
    wide = "word " * 30
    page = measured(
        f"{wide}\n\n```python\n{wide}\n```\n\n| {wide} |\n\n<https://example.com/{'x' * 120}>\n\n# {wide}\n"
    )
    assert page.long_lines == [(1, len(wide))]


def test_sentences_cross_lines_and_end_with_items_of_lists() -> None:
    page = measured("It reads `a.b(c)` and\nwrites [two words](x.md). Then it\nstops:\n\n* first item\n* second one\n")
    assert [sentence for _, sentence in page.sentences] == [
        "It reads CODE and writes two words.",
        "Then it stops:",
        "first item",
        "second one",
    ]
    assert page.lengths == [7, 3, 2, 2]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A leak costs time.", ["Leak"]),
        ("A [leak](../glossary.md#leak) costs time.", []),
        ("A leak (a float32 result in a half part) costs time.", []),
        ("A **leak** is a float32 result.", []),
        ("Masters are float32.", ["Master weight"]),
        ("At OD, sums are float32. An odd sum is not.", ["OD"]),
        ("An odd sum. Half of it.", []),
        ("The ELU is slow.", ["ELU"]),
        ("The exponential linear unit (ELU) is slow. ELUs are not on the GPU.", []),
        ("`leak` is code.", []),
    ],
)
def test_terms_without_an_explanation_are_found(text: str, found: list[str]) -> None:
    assert [term for _, term in measured(text).undefined] == found


@pytest.mark.parametrize(
    "text", ["Whoever wants it", "float16 alone", "14 bytes a parameter", "one must cast", "it says so"]
)
def test_phrases_that_readers_read_twice_are_found(text: str) -> None:
    assert len(measured(text).banned) == 1


@pytest.mark.parametrize("text", ["such as this", "one step may cast", "code: `says`", "along, twofold"])
def test_phrases_that_only_look_like_them_are_not(text: str) -> None:
    assert measured(text).banned == []


def test_a_page_that_is_hard_to_read_is_a_fault() -> None:
    long = " ".join(["word"] * 40) + "."
    assert TOOL["faults"]([measured("A short one.\n" * 20)]) == []
    faults = TOOL["faults"]([measured("\n\n".join([long.capitalize()] * 20))])
    assert any("docs/page.md" in fault and "40" in fault for fault in faults)
    assert any("long lines is 20" in fault for fault in faults)


def test_the_pages_of_this_tree_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert TOOL["main"](["--quiet"]) == 0, capsys.readouterr().err


def test_a_page_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert TOOL["main"](["docs/lvels.md"]) == 2
    assert "docs/lvels.md" in capsys.readouterr().err
