"""The Chinese README is the English one's twin: the same headings, code, links, tables and numbers."""

import re

from doc_pages import ROOT, blocks, links

ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh.md"


def headings(text: str) -> list[int]:
    """Return the levels of the headings, in order."""
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [len(marks) for marks in re.findall(r"^(#+) ", outside, flags=re.MULTILINE)]


def rows(text: str) -> list[int]:
    """Return the number of cells in each row of each table."""
    return [line.count("|") for line in text.splitlines() if line.startswith("|")]


def numbers(text: str) -> list[list[str]]:
    """Return the numbers of each row of a table; a sentence has its own order in each language."""
    return [sorted(re.findall(r"\d+(?:\.\d+)?", line)) for line in text.splitlines() if line.startswith("|")]


def test_headings_and_tables_have_the_same_shape() -> None:
    english, chinese = (page.read_text(encoding="utf-8") for page in (ENGLISH, CHINESE))
    assert headings(chinese) == headings(english)
    assert rows(chinese) == rows(english)


def test_code_blocks_are_equal_byte_for_byte() -> None:
    assert [(block.language, block.code) for block in blocks(CHINESE)] == [
        (block.language, block.code) for block in blocks(ENGLISH)
    ]


def test_rows_of_tables_have_the_same_numbers() -> None:
    english, chinese = (page.read_text(encoding="utf-8") for page in (ENGLISH, CHINESE))
    assert numbers(chinese) == numbers(english)


def test_links_are_the_same_and_each_leads_to_the_other() -> None:
    english, chinese = list(links(ENGLISH)), list(links(CHINESE))
    assert english[0] == "README.zh.md"
    assert chinese[0] == "README.md"
    assert sorted(chinese[1:]) == sorted(english[1:])


def test_it_is_written_in_chinese() -> None:
    text = CHINESE.read_text(encoding="utf-8")
    for title in re.findall(r"^## (.*)$", text, flags=re.MULTILINE):
        assert re.search(r"[\u4e00-\u9fff]", title), title
