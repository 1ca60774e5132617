"""The glossary is in alphabetical order, says each word once, and other pages lead to every entry."""

import re

from doc_pages import DOCS, anchors, links, pages, slugify

GLOSSARY = DOCS / "glossary.md"
ENTRIES = re.findall(r"^## (.+)$", GLOSSARY.read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_entries_are_in_alphabetical_order_and_stand_once() -> None:
    folded = [entry.casefold() for entry in ENTRIES]
    assert folded == sorted(set(folded))


def test_every_entry_is_linked_from_a_page() -> None:
    linked = {
        target.partition("#")[2]
        for page in pages()
        for target in links(page)
        if "glossary.md#" in target or page == GLOSSARY
    }
    assert [entry for entry in ENTRIES if slugify(entry) not in linked] == []
    assert {slugify(entry) for entry in ENTRIES} <= anchors(GLOSSARY)
