"""Measure how the documentation reads: `python tools/readability.py` prints a row per page and fails above the limits.

For each page: prose lines over 100 columns, the lengths of its sentences, terms of art that it neither explains nor links to
the glossary, and phrases that we do not use. `--details` names each place. `--revision cb5345f` measures a commit instead.
Only the standard library is used. Tables, code and headings are no prose; a piece of inline code counts as one word.
"""

from __future__ import annotations

import argparse
import io
import re
import statistics
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "examples/README.md", "docs/**/*.md")
GLOSSARY = "docs/glossary.md"

MAX_COLUMNS = 100
MAX_ROW = 200
"""Columns of a row of a table: its cells cannot be wrapped, so the lines of a reader's screen grow."""
LONG_SENTENCE = 25
"""Words. Most sentences should have less than 20."""

LIMITS = {"long lines": 0, "wide rows": 165, "median": 12, "90th": 20, "over 25": 0.5, "undefined": 5, "banned": 0}
"""The most that all pages together may have; a little above what they have. 'over 25' is a share in percent."""
PAGE_LIMITS = {"median": 15, "90th": 24}
"""The most that one page with at least `FEW` sentences may have."""
FEW = 10

BANNED = {
    r"whoever": "name the actor",
    r"nobody": "name the actor",
    r"one (?:can|may|must|should|would|needs to|has to|wants)": "name the actor",
    r"that which": "name the thing",
    r"such (?!as\b)": "'this kind of', or name the thing",
    r"of (?:yours|ours)": "'your ...', 'our ...'",
    r"as ever": "'as always', or nothing",
    r"as it is": "'unchanged'",
    r"be it": "'whether', 'either ... or'",
    r"told": "'names', 'reports'",
    r"says": "'reports', 'states', 'means'",
    r"alone": "'only'",
    r"(?:bytes|bits|ms|launches|passes|lines|copies) an? (?:parameter|step|second|operator|layer|call)": "'per ...'",
}
"""Phrases of the style guide that readers had to read twice, and what to write instead."""

EVERYDAY = {"Half", "Level", "Plan", "Profile"}
"""Glossary entries that are also everyday words; their use is not a term of art each time."""
ALSO = {
    "Black list": r"black[- ]?list(?:s|ed)?",
    "White list": r"white[- ]?list(?:s|ed)?",
    "Gray": r"gr[ae]y(?! box)",
    "Loss scale": r"loss[- ]scal(?:e|es|er|ing)",
    "Master weight": r"master(?:s| weights?| copy| copies)?(?! branch)",
    "Compact master": r"compact masters?",
    "Leak": r"leak(?:s|ed|ing)?",
    "OD": r"OD",
}
"""How terms are written, where it is not the heading with or without an s."""
KNOWN = frozenset(
    "AI API APIs CI CLI CPU CPUs CSV CUDA DLL GB GiB GPU GPUs HTML HTTP HTTPS ID IDE IEEE II IR JIT JPEG JSON KB MB MIT MPS "
    "NVIDIA OK ONNX OS PDF PNG RAM RGB SDK SHA SSD SVG TODO TOML URL URLs USB UTF XML YAML README NOTE TIPC OD AMD ROCM XPU "
    "TPU PCI ECC IO NUMA SGD GPT BERT MODEL FILE".split()
)
"""Capital letters that need no explanation here, or that the glossary has."""

_FENCE = re.compile(r"^ *(`{3,}|~{3,})")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|etc|et al|vs|cf|No|Fig|approx)\.")
_END = re.compile(r"(?<=[.!?])[\"')\]*_]*\s+")
_ACRONYM = re.compile(r"\b[A-Z]{2,5}s?\b(?![-_.]\w)")
_LIST_ITEM = re.compile(r"^ *(?:[*+-]|\d+[.)]) +")


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Lines of prose that belong together."""

    line: int
    """Of its first line, counted from 1."""
    text: str


@dataclass(slots=True)
class Page:
    """What was found on a page."""

    name: str
    long_lines: list[tuple[int, int]] = field(default_factory=list)
    """Line and columns."""
    wide_rows: list[tuple[int, int]] = field(default_factory=list)
    """Line and columns of rows of tables."""
    sentences: list[tuple[int, str]] = field(default_factory=list)
    """Line of the paragraph, and the sentence with code as one word."""
    undefined: list[tuple[int, str]] = field(default_factory=list)
    banned: list[tuple[int, str, str]] = field(default_factory=list)
    """Line, phrase, what to write instead."""

    @property
    def lengths(self) -> list[int]:
        """Return the numbers of words of the sentences."""
        return [len(words(sentence)) for _, sentence in self.sentences]


def words(sentence: str) -> list[str]:
    """Return the words of a sentence; a piece of code, and a number with its unit's sign, is one.

    >>> words("It takes 40.7 ms, 41 % of CODE.")
    ['It', 'takes', '40.7', 'ms', '41', 'of', 'CODE']
    """
    return re.findall(r"\w+(?:[.,'/+-]\w+)*", sentence)


def without_markup(text: str) -> str:
    """Return prose as it is read: links as their text, inline code as one word.

    >>> without_markup("Call [`step`](a.md) or **`x = 1`** at <b>O2</b>.")
    'Call CODE or CODE at O2.'
    """
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"(`+)[^`]+?\1", "CODE", text)
    text = re.sub(r"\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", text)
    text = re.sub(r"<(?:https?:[^>]*)>", "LINK", text)
    text = re.sub(r"</?[a-zA-Z][^>]*>", "", text)
    return re.sub(r"\*\*|(?<!\w)[*_](?=\w)|(?<=\w)[*_](?!\w)", "", text)


def sentences(text: str) -> list[str]:
    """Split prose without markup into sentences.

    >>> sentences("It casts, e.g. weights. Why? mezzo knows (see above). 2 of 3.")
    ['It casts, e.g. weights.', 'Why?', 'mezzo knows (see above).', '2 of 3.']
    """
    hidden = _ABBREVIATION.sub(lambda found: found[0].replace(".", "\0"), " ".join(text.split()))
    parts = (part.replace("\0", ".").strip() for part in _END.split(hidden))
    return [part for part in parts if re.search(r"[a-zA-Z]", part)]


def blank_code(text: str) -> list[str]:
    """Return the lines of a page; those of fenced blocks, of comments and of the front matter are empty."""
    text = re.sub(r"<!--.*?-->", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)
    lines = text.splitlines()
    fence = ""
    for number, line in enumerate(lines):
        found = _FENCE.match(line)
        if fence or found:
            lines[number] = ""
        if found and not fence:
            fence = found[1]
        elif found and line.strip() == fence:
            fence = ""
    return lines


def is_prose(line: str) -> bool:
    """Whether a line is neither a row of a table, a heading, a directive, nor a drawing in ASCII."""
    return not re.match(r"^ *(?:\||#{1,6} |::: |!!! |={3,}|-{3,}$|\[[^\]]+\]: )", line)


def paragraphs(lines: list[str]) -> list[Paragraph]:
    """Return the paragraphs; each item of a list is one."""
    found: list[Paragraph] = []
    current: list[str] = []
    start = 0

    def close() -> None:
        if current:
            found.append(Paragraph(start, " ".join(current)))
            current.clear()

    for number, line in enumerate(lines, start=1):
        item = _LIST_ITEM.match(line)
        if item or not line.strip() or not is_prose(line):
            close()
        if line.strip() and is_prose(line):
            start = start if current else number
            current.append(line[item.end() :] if item else line.strip().removeprefix(">").strip())
    close()
    return found


def columns(line: str) -> int:
    """Return the columns of a line, or 0 if it has only one word and so cannot be wrapped."""
    text = _LIST_ITEM.sub("", line).strip()
    is_one = " " not in re.sub(r"\[[^\]]*\]\([^)]*\)", "LINK", text)
    return 0 if is_one else len(line)


def terms(glossary: str) -> dict[str, re.Pattern[str]]:
    """Return the entries of the glossary, and how each is found in prose."""
    headings = re.findall(r"^## +(.+?) *$", glossary, flags=re.MULTILINE)
    found = {}
    for heading in headings:
        if heading in EVERYDAY:
            continue
        written = re.sub(r"\\? ", r"\\s+", ALSO.get(heading, re.escape(heading) + "s?"))  # a line may end inside a term
        flags = re.NOFLAG if heading.isupper() else re.IGNORECASE
        found[heading] = re.compile(rf"\b{written}\b", flags)
    return found


def is_explained(pattern: re.Pattern[str], source: str) -> bool:
    """Whether a page explains a term: in bold, with brackets after it, in a heading, or with a link."""
    for found in pattern.finditer(source):
        line = source[source.rfind("\n", 0, found.start()) + 1 : found.start()]
        after = source[found.end() : found.end() + 80]
        if re.match(r"#{1,6} ", line):
            return True
        if re.match(r"[\w ]{0,12}[*`'\"]*\s+\((?!#)", after):
            return True
        if line.count("**") % 2 == 1 and "**" in after:
            return True
        before = source[max(0, found.start() - 120) : found.start()]
        if before.rfind("[") > before.rfind("]") and re.match(r"[^\[\]]*\]\(", after):
            return True
    return False


def slug(heading: str) -> str:
    """Return the anchor of a heading of the glossary."""
    return re.sub(r"[^\w]+", "-", heading.lower()).strip("-")


def find_undefined(name: str, lines: list[str], known: dict[str, re.Pattern[str]]) -> Iterator[tuple[int, str]]:
    """Yield each term of art that a page uses without a word on what it is, with the line of its first use."""
    if name == GLOSSARY:
        return
    source = "\n".join(lines)
    prose = [(part.line, without_markup(part.text)) for part in paragraphs(lines)]
    for heading, pattern in known.items():
        first = next((line for line, text in prose if pattern.search(text)), None)
        if first is not None and f"glossary.md#{slug(heading)})" not in source and not is_explained(pattern, source):
            yield first, heading
    seen: set[str] = set()
    for line, text in prose:
        for acronym in _ACRONYM.findall(text.replace("CODE", "").replace("LINK", "")):
            bare = acronym.removesuffix("s")
            if bare in seen or {acronym, bare} & KNOWN or bare in known:
                continue
            seen.add(bare)
            if not is_explained(re.compile(rf"\b{bare}s?\b"), source) and f"({bare})" not in source:
                yield line, bare


def measure(name: str, text: str, known: dict[str, re.Pattern[str]]) -> Page:
    """Return what is found on a page."""
    lines = blank_code(text)
    page = Page(name)
    page.long_lines = [
        (number, columns(line))
        for number, line in enumerate(lines, start=1)
        if is_prose(line) and columns(line) > MAX_COLUMNS
    ]
    rows = [(number, len(line)) for number, line in enumerate(lines, start=1) if line.lstrip().startswith("|")]
    page.wide_rows = [(number, width) for number, width in rows if width > MAX_ROW]
    for part in paragraphs(lines):
        page.sentences += [(part.line, sentence) for sentence in sentences(without_markup(part.text))]
    page.undefined = list(find_undefined(name, lines, known))
    for number, line in enumerate(lines, start=1):
        for phrase, better in BANNED.items():
            found = re.findall(rf"\b{phrase}\b" if phrase[-1] != ")" else rf"\b{phrase}", without_markup(line), re.I)
            page.banned += [(number, each.strip(), better) for each in found]
    return page


def read_pages(revision: str | None) -> dict[str, str]:
    """Return the texts of the pages by name, from the disk or from a commit."""
    if revision is None:
        paths = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
        return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    packed = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
    texts = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for entry in archive:
            is_page = entry.name.endswith(".md") and (entry.name in PAGES or entry.name.startswith("docs/"))
            file = archive.extractfile(entry) if is_page else None
            if file is not None:
                texts[entry.name] = file.read().decode("utf-8")
    return texts


def percentile(values: list[int], share: float) -> int:
    """Return the smallest value that at least this share of the values does not exceed.

    >>> percentile([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 0.9)
    9
    """
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else 0


def figures(pages: list[Page]) -> dict[str, float]:
    """Return the figures of one page, or of several together."""
    lengths = [length for page in pages for length in page.lengths]
    return {
        "long lines": sum(len(page.long_lines) for page in pages),
        "wide rows": sum(len(page.wide_rows) for page in pages),
        "sentences": len(lengths),
        "median": statistics.median_high(lengths) if lengths else 0,
        "90th": percentile(lengths, 0.9),
        "over 25": 100 * sum(length > LONG_SENTENCE for length in lengths) / max(1, len(lengths)),
        "undefined": sum(len(page.undefined) for page in pages),
        "banned": sum(len(page.banned) for page in pages),
    }


def faults(pages: list[Page]) -> list[str]:
    """Return a line for each limit that is passed."""
    found = []
    together = figures(pages)
    for name, limit in LIMITS.items():
        if together[name] > limit:
            found.append(f"all pages: {name} is {together[name]:g}, the limit is {limit:g}")
    for page in pages:
        own = figures([page])
        if own["sentences"] < FEW:
            continue
        found += [
            f"{page.name}: {name} is {own[name]:g} words, the limit is {limit}"
            for name, limit in PAGE_LIMITS.items()
            if own[name] > limit
        ]
    return found


def table(pages: list[Page]) -> str:
    """Return the figures as a Markdown table, a row per page and one for all."""
    rows = [(page.name, figures([page])) for page in pages] + [("all pages", figures(pages))]
    lines = [
        f"| page | lines over {MAX_COLUMNS} | table rows over {MAX_ROW} | sentences | median words | 90th percentile "
        f"| over {LONG_SENTENCE} words | undefined terms | banned |",
        "|---" * 9 + "|",
    ]
    for name, row in rows:
        cells = [f"{value:.1f} %" if key == "over 25" else f"{value:g}" for key, value in row.items()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def details(page: Page) -> Iterator[str]:
    """Yield a line for each place of a page that could be better."""
    for line, width in page.long_lines:
        yield f"{page.name}:{line}: {width} columns"
    for line, width in page.wide_rows:
        yield f"{page.name}:{line}: a row of {width} columns in a table"
    for line, sentence in page.sentences:
        if (length := len(words(sentence))) > LONG_SENTENCE:
            yield f"{page.name}:{line}: {length} words: {sentence[:60]}..."
    for line, term in page.undefined:
        yield f"{page.name}:{line}: {term!r} is neither explained nor linked to {GLOSSARY}"
    for line, phrase, better in page.banned:
        yield f"{page.name}:{line}: {phrase!r}: write {better}"


def main(arguments: list[str]) -> int:
    """Print the table; return 1 if a limit is passed, 2 for a page that is not there."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="only these, such as docs/levels.md; no limits apply")
    parser.add_argument("--revision", help="measure this commit instead of the files on the disk; no limits apply")
    parser.add_argument("--details", action="store_true", help="name each place that could be better")
    parser.add_argument("--quiet", action="store_true", help="print only the row of all pages together, and faults")
    given = parser.parse_args(arguments)
    texts = read_pages(given.revision)
    known = terms(texts.get(GLOSSARY, ""))
    unknown = [name for name in given.pages if name not in texts]
    if unknown:
        print(f"readability: {unknown[0]} is not one of the {len(texts)} pages: {', '.join(PAGES)}", file=sys.stderr)
        return 2
    pages = [measure(name, text, known) for name, text in texts.items() if not given.pages or name in given.pages]
    if given.details:
        for page in pages:
            for line in details(page):
                print(line)
    lines = table(pages).splitlines()
    print("\n".join([*lines[:2], lines[-1]] if given.quiet else lines))
    if given.pages or given.revision:
        return 0
    found = faults(pages)
    for fault in found:
        print(f"readability: {fault}", file=sys.stderr)
    if found:
        print("readability: python tools/readability.py --details names each place", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
