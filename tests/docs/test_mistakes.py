"""Every row of docs/mistakes.md, and every deliberate difference of docs/migration.md, is held by a test that exists.

The names of the tests stand in a comment below each table, one line for each row.
"""

import re

import pytest
from doc_tables import Row, functions_of, read_page, read_table, table_names


def rows_with_tests(page: str, table: str) -> list[tuple[Row, list[str]]]:
    """Return the rows of a table, each with the tests that hold it."""
    found = re.search(rf"<!-- tests of {re.escape(table)}, row by row:\n(.*?)\n-->", read_page(page), flags=re.DOTALL)
    assert found is not None, f"{page}: no tests below the table {table!r}"
    return [(row, line.split()) for row, line in zip(read_table(page, table), found[1].splitlines(), strict=True)]


MISTAKES = [held for name in table_names("mistakes.md") for held in rows_with_tests("mistakes.md", name)]
DIFFERENCES = rows_with_tests("migration.md", "differences")


@pytest.mark.parametrize(
    ("row", "tests"),
    [*MISTAKES, *DIFFERENCES],
    ids=lambda value: next(iter(value.values()))[:50] if isinstance(value, dict) else "",
)
def test_the_row_is_held_by_a_test(row: Row, tests: list[str]) -> None:
    assert all(row.values())
    assert tests
    for reference in tests:
        path, _, function = reference.partition("::")
        assert function in functions_of(path), reference


@pytest.mark.parametrize("rows", [MISTAKES, DIFFERENCES])
def test_no_row_stands_twice(rows: list[tuple[Row, list[str]]]) -> None:
    first = [next(iter(row.values())) for row, _ in rows]
    assert len(set(first)) == len(first)
