"""The page on releases: its table is that of the code, and it names every backend as the code does."""

import re
import tomllib
from datetime import date

import pytest
from doc_pages import ROOT
from doc_tables import Row, read_page, read_table

from mezzo.amp import support

ROWS = read_table("releases.md", "releases")


def test_the_table_has_the_releases_of_the_code() -> None:
    assert tuple(row["torch"] for row in ROWS) == support.TESTED_TORCH


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["torch"])
def test_a_row_has_counts_a_python_that_mezzo_supports_and_a_date(row: Row) -> None:
    passed, failed, skipped = (int(row[name].replace(",", "")) for name in ("passed", "failed", "skipped"))
    assert passed > 9_000  # the default suite, not a part of it
    assert failed == 0 or f"torch {row['torch']}" in read_page("releases.md"), "a failure needs its reason on the page"
    assert 0 <= skipped < 200
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    least = tuple(int(part) for part in project["requires-python"].removeprefix(">=").split("."))
    assert tuple(int(part) for part in row["python"].split("."))[:2] >= least
    assert date.fromisoformat(row["date"]) >= date(2026, 11, 18)


def test_the_lines_of_check_are_quoted_as_they_are() -> None:
    page = read_page("releases.md")
    assert support.describe_torch(support.TESTED_TORCH[-1]) in page
    assert support.describe_backends() in page


def test_every_backend_has_the_state_of_the_code() -> None:
    rows = re.findall(r"^\| ([A-Za-z, ]+) \| ((?:un)?tested.*?|refused) \|", read_page("releases.md"), flags=re.M)
    found = {name.lower(): state for names, state in rows for name in names.split(", ")}
    assert found == support.BACKENDS
