"""Every message that docs/troubleshooting.md and docs/hardware.md quote is one that mezzo's source can produce."""

import ast
import re
from functools import cache

import pytest
from doc_pages import DOCS, ROOT, blocks

PAGES = ("troubleshooting.md", "hardware.md")
MESSAGES = [" ".join(block.code.split()) for page in PAGES for block in blocks(DOCS / page) if block.language == "text"]
LEAST_SHARE = 0.4  # of a message's letters that its template has: f"{a}: {b}" would fit anything


def pattern_of(node: ast.expr) -> tuple[str, int] | None:
    """Return a regular expression for what a string of the source becomes, and how many of its letters are fixed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.escape(node.value), len(node.value)
    if isinstance(node, ast.JoinedStr):
        parts = [pattern_of(value) or (".*", 0) for value in node.values]
        return "".join(text for text, _ in parts), sum(fixed for _, fixed in parts)
    return None


@cache
def templates() -> list[tuple[re.Pattern[str], int]]:
    """Return the strings of mezzo's source, with `.*` where a value comes, and how many of their letters are fixed."""
    found = []
    for path in sorted((ROOT / "src" / "mezzo").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.expr) and (made := pattern_of(node)) is not None:
                found.append((re.compile(made[0], flags=re.DOTALL), made[1]))
    return found


def can_be_said(message: str) -> bool:
    enough = LEAST_SHARE * len(message)
    return any(fixed >= enough and template.fullmatch(message) for template, fixed in templates())


@pytest.mark.parametrize("message", MESSAGES, ids=[message[:40] for message in MESSAGES])
def test_quoted_message_is_in_the_source(message: str) -> None:
    assert can_be_said(message)


def test_a_message_that_nobody_says_is_found_out() -> None:
    assert not can_be_said(MESSAGES[0].replace("only", "merely"))
    assert len(MESSAGES) > 30
