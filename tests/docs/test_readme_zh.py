"""The Chinese README is written, not translated; its code blocks and figures are those of the English one."""

import re

from doc_pages import ROOT, blocks, links, without_blocks

ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh.md"
MEASURED = re.compile(r"(\d+(?:\.\d+)?) ?(ms|GiB|GB|%)")


def test_code_blocks_are_equal_byte_for_byte() -> None:
    assert [(block.language, block.code) for block in blocks(CHINESE)] == [
        (block.language, block.code) for block in blocks(ENGLISH)
    ]


def test_measured_figures_and_pictures_are_the_same() -> None:
    english, chinese = (sorted(set(MEASURED.findall(without_blocks(page)))) for page in (ENGLISH, CHINESE))
    assert chinese == english
    pictures = [[target for target in links(page) if target.endswith(".svg")] for page in (ENGLISH, CHINESE)]
    assert pictures[0] == pictures[1] != []


def test_each_leads_to_the_other() -> None:
    assert "README.zh.md" in links(ENGLISH)
    assert "README.md" in links(CHINESE)
