"""What the site has besides the pages of this folder: the measurements and texts that they cite.

A link to a file of the repository outside of docs/ works on the disk and on a code host. In the site such a page is put
beside the others and the link follows it; a link to anything else that exists (a script, a folder) becomes plain text.
"""

import posixpath
import re
from pathlib import Path

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

    def follow(link: re.Match[str]) -> str:
        target = (here / link["target"]).resolve()
        if target in known:
            near = posixpath.relpath(known[target], posixpath.dirname(page.file.src_uri) or ".")
            return f"{link['text']}({near}{link['anchor'] or ''})"
        is_elsewhere = target.exists() and Path(config.docs_dir) not in target.parents
        return link["text"].lstrip("!")[1:-1] if is_elsewhere else link[0]

    return _LINK.sub(follow, markdown)
