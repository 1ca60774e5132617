"""What the site has besides the pages of this folder: links to the glossary, and the measurements that pages cite.

The first use of a term on a page leads to the glossary, unless the page has that link already.

A link to a file of the repository outside of docs/ works on the disk and on a code host. In the site such a page is put
beside the others and the link follows it; a link to anything else that exists (a script, a folder) becomes plain text.
"""

import posixpath
import re
import runpy
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = (
    "benchmarks/*.md",
    "benchmarks/*.png",
    "examples/README.md",
    "test_tipc/README.md",
    "test_tipc/docs/*.md",
    "CONTRIBUTING.md",
)

_READABILITY: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "readability.py"))
_NO_PROSE = re.compile(
    r"^ *(?P<fence>`{3,}|~{3,}).*?^ *(?P=fence) *$|<!--.*?-->|^#{1,6} .*?$|^ *\|.*?$|^ *:::.*?$|(?P<tick>`+)[^`]+?(?P=tick)"
    r"|!?\[[^\]]*\]\([^)]*\)|<[^>\n]+>",
    flags=re.MULTILINE | re.DOTALL,
)
_LINK = re.compile(r"(?P<text>!?\[[^\]]*\])\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and images from outside of docs/."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            uri = path.relative_to(ROOT).as_posix()
            files.append(File(uri, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links that leave docs/, or come into it, lead to where their target is in the site."""
    assert page.file.abs_src_path is not None
    here = Path(page.file.abs_src_path).parent
    known = {Path(file.abs_src_path): file.src_uri for file in files if file.abs_src_path is not None}

    if Path(config.docs_dir) in here.parents or here == Path(config.docs_dir):
        markdown = link_terms(markdown, page.file.src_uri)

    def follow(link: re.Match[str]) -> str:
        target = (here / link["target"]).resolve()
        if target in known:
            near = posixpath.relpath(known[target], posixpath.dirname(page.file.src_uri) or ".")
            return f"{link['text']}({near}{link['anchor'] or ''})"
        is_elsewhere = target.exists() and Path(config.docs_dir) not in target.parents
        return link["text"].lstrip("!")[1:-1] if is_elsewhere else link[0]

    return _LINK.sub(follow, markdown)


def link_terms(markdown: str, uri: str) -> str:
    """Return a page with the first use of each term as a link to the glossary."""
    if uri == "glossary.md" or uri.startswith("reference/"):
        return markdown
    glossary = posixpath.relpath("glossary.md", posixpath.dirname(uri) or ".")
    terms = _READABILITY["terms"]((ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"))
    for term in sorted(terms, key=len, reverse=True):  # 'compact master' before 'master'
        target = f"{glossary}#{_READABILITY['slug'](term)}"
        if f"({target})" in markdown:
            continue
        end = 0
        for found in [*_NO_PROSE.finditer(markdown), None]:
            use = terms[term].search(markdown, end, found.start() if found else len(markdown))
            if use is not None:
                markdown = f"{markdown[: use.start()]}[{use[0]}]({target}){markdown[use.end() :]}"
                break
            end = found.end() if found else len(markdown)
    return markdown
