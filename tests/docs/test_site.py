"""Links lead somewhere, the navigation has every page, and the site builds without a warning and without the outside."""

import importlib
import os
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from doc_pages import DOCS, ROOT, anchors, links, name_of, pages, slugify

OUTWARD = re.compile(r"^(https?:|mailto:)")
HOSTS = re.compile(r"(?:src|href)=\"?((?:https?:)?//[^\"\s>]+)")


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml; its tags name Python objects, which nothing here needs."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def navigation() -> list[tuple[str, str]]:
    """Return the titles and pages of the navigation, in order."""

    def walk(entries: list[Any]) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for entry in entries:
            ((title, inside),) = entry.items()
            found += walk(inside) if isinstance(inside, list) else [(title, inside)]
        return found

    config = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=_Loader)  # ours
    return walk(config["nav"])


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_links_and_images_lead_to_what_is_there(page: Path) -> None:
    for target in links(page):
        if OUTWARD.match(target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name_of(page)}: {target}"
        assert ROOT in (there, *there.parents), f"{name_of(page)}: {target} leaves the repository"
        if anchor:
            assert there.suffix == ".md", f"{name_of(page)}: {target}"
            assert anchor in anchors(there), f"{name_of(page)}: {target}: has {sorted(anchors(there))}"


def test_the_navigation_has_every_page_once() -> None:
    listed = [page for _, page in navigation()]
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in pages() if DOCS in page.parents)
    assert len(set(listed)) == len(listed)


def test_a_newcomer_meets_the_pages_in_this_order() -> None:
    listed = [
        page.removesuffix(".md") for _, page in navigation() if not page.startswith(("reference/", "integrations/"))
    ]
    wanted = (
        "index quickstart install formats when hardware releases precision amp levels lists loss_scaling master_weights "
        "mistakes accumulation distributed model static fp8 training export certification clusters models "
        "doctor debugging numerics "
        "accuracy bisect troubleshooting shapes migration glossary documents design"
    )
    assert listed == wanted.split()


def test_every_page_begins_with_one_heading() -> None:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        assert text.startswith("# "), name_of(page)


def test_the_readme_points_to_the_documentation() -> None:
    targets = set(links(ROOT / "README.md"))
    assert {"docs/index.md", "docs/amp.md", "CONTRIBUTING.md"} <= targets


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("Prove it", "prove-it"),
        ("What `decorate` does, and when", "what-decorate-does-and-when"),
        ("Loss-scale: 2^15", "loss-scale-215"),
        ("[Levels](levels.md) and lists", "levels-and-lists"),
    ],
)
def test_anchors_are_those_of_the_site(heading: str, anchor: str) -> None:
    sites = pytest.importorskip("markdown.extensions.toc", reason="the docs extra is not installed").slugify
    plain = re.sub(r"`|\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    assert slugify(heading) == anchor == sites(plain, "-")


def test_links_out_of_the_documentation_follow_their_targets_into_the_site() -> None:
    pytest.importorskip("mkdocs", reason="the docs extra is not installed")
    follow = runpy.run_path(str(DOCS / "_site.py"))["on_page_markdown"]
    page = SimpleNamespace(
        file=SimpleNamespace(abs_src_path=str(DOCS / "reference" / "amp.md"), src_uri="reference/amp.md")
    )
    measured = SimpleNamespace(abs_src_path=str(ROOT / "benchmarks" / "a.md"), src_uri="benchmarks/a.md")
    text = "[a](../../benchmarks/a.md#b), [script](../../train.py), [page](../amp.md), [gone](../../gone.md), [w](https://w.org)"
    assert follow(text, page=page, config=SimpleNamespace(docs_dir=str(DOCS)), files=[measured]) == (
        "[a](../benchmarks/a.md#b), script, [page](../amp.md), [gone](../../gone.md), [w](https://w.org)"
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    pytest.importorskip("mkdocs", reason="the docs extra is not installed")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert "WARNING" not in built.stdout + built.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_strictly(site: Path) -> None:
    made = {path.relative_to(site).with_suffix(".md").as_posix() for path in site.rglob("*.html")}
    assert {page for _, page in navigation()} <= made
    assert "benchmarks/step_h200_202611.md" in made, "measurements are part of the site"
    assert not list(site.rglob("*.py"))


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", text)
        for tag in loaded:
            assert not HOSTS.search(tag) or 'rel="canonical"' in tag, f"{page.name}: {tag}"


REFERENCE = [title for title, page in navigation() if page.startswith("reference/")]


@pytest.mark.slow
@pytest.mark.parametrize("module", REFERENCE)
def test_the_reference_has_the_public_names_and_no_others(module: str, site: Path) -> None:
    imported = importlib.import_module(module)
    pages_made = [path.read_text(encoding="utf-8") for path in (site / "reference").glob("*.html")]
    (text,) = [text for text in pages_made if f"<title>{module} - mezzo</title>" in text]
    shown = set(re.findall(rf'id="{re.escape(module)}\.(\w+)"', text))
    public = {name: getattr(imported, name) for name in imported.__all__}
    assert shown <= public.keys()
    wanted = {name for name, value in public.items() if isinstance(value, type | types.FunctionType)}
    assert wanted - shown == set()
    assert "<summary>Source code" not in text
