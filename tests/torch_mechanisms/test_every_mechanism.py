"""Each file of mezzo._torch says what it is for, and has a test of its own here."""

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted((HERE.parents[1] / "src" / "mezzo" / "_torch").glob("[!_]*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_mechanism_says_why_since_when_and_what_breaks_without_it(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    for heading in ("Why:", "Releases:", "Without "):
        assert f"\n{heading}" in text, f"the docstring of {path.name} lacks a line that starts with {heading!r}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_mechanism_has_a_test_file(path: Path) -> None:
    assert (HERE / f"test_{path.stem}.py").is_file(), f"write tests/torch_mechanisms/test_{path.stem}.py"
