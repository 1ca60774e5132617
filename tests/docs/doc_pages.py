"""The documentation as tests see it: pages, their code blocks, commands, headings and links.

A fenced block in `python` is run, one in `pycon` is a doctest; `title="name.py"` makes it a file that a command of the page
runs. A block that no machine of ours can run says so above it: `<!-- not run: the reason -->`.
"""

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
READMES = (ROOT / "README.md", ROOT / "README.zh.md")
EXAMPLES = ROOT / "examples" / "README.md"

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}) *(?P<language>[\w+-]*)(?P<info>.*)$")
_REASON = re.compile(r"<!-- not run: *(?P<reason>.*?) *-->\s*$")
_TITLE = re.compile(r'title="([^"]+)"')
_HEADING = re.compile(r"^(#{1,6}) +(.*?) *(?:\{#([\w-]+)\})? *$")
_BLOCK = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2 *$", flags=re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)(?: \"[^\"]*\")?\)")


def pages() -> list[Path]:
    """Return the pages of docs/, integrations and reference included, and the READMEs of the tree and its examples."""
    folders = (DOCS, DOCS / "integrations", DOCS / "reference")
    return [*READMES, EXAMPLES, *(page for folder in folders for page in sorted(folder.glob("*.md")))]


def name_of(page: Path) -> str:
    """Return the path of a page in the repository."""
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block."""

    page: Path
    line: int
    """Of its first line of code, counted from 1."""
    language: str
    title: str | None
    code: str
    is_marked: bool
    """Whether the fence says `.no-run`."""
    reason: str | None
    """Why it is not run."""

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    found = []
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        number += 1
        if opening is None:
            continue
        end = number
        while lines[end].strip() != opening["fence"]:
            end += 1
        above = "\n".join(lines[: number - 1]).rstrip()
        reason = _REASON.search(above)
        title = _TITLE.search(opening["info"])
        code = "\n".join(line.removeprefix(opening["indent"]) for line in lines[number:end]) + "\n"
        found.append(
            Block(
                page=page,
                line=number + 1,
                language=opening["language"],
                title=title[1] if title else None,
                code=code,
                is_marked="no-run" in opening["info"],
                reason=reason["reason"] if reason else None,
            )
        )
        number = end + 1
    return found


def commands(page: Path) -> list[str]:
    """Return the shell commands of a page, each on one line, without comments."""
    found = []
    for block in blocks(page):
        if block.language == "bash":
            joined = re.sub(r" *\\\n\s*", " ", block.code)
            found += [re.sub(r"(^|\s+)#.*$", "", line).strip() for line in joined.splitlines()]
    return [command for command in found if command]


def links(page: Path) -> Iterator[str]:
    """Yield the targets of a page's links and images."""
    text = re.sub(r"(?<!\[)`[^`\n]+`(?!\])", "", without_blocks(page))  # inline code, unless it is the text of a link
    yield from (found[1] for found in _LINK.finditer(text))
    yield from re.findall(r"(?:src|href)=\"([^\"]+)\"", text)


def without_blocks(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as the site makes them."""
    found: set[str] = set()
    for line in without_blocks(page).splitlines():
        heading = _HEADING.match(line)
        if heading is None:
            continue
        slug = plain = heading[3] or slugify(heading[2])
        number = 1
        while slug in found:
            slug, number = f"{plain}_{number}", number + 1
        found.add(slug)
    return found


def slugify(heading: str) -> str:
    """Return the anchor of a heading.

    >>> slugify("What `O2` does, and why")
    'what-o2-does-and-why'
    """
    plain = html.unescape(re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading)).lower()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain)).strip("-")
