"""Every row of docs/mistakes.md, and every deliberate difference of docs/migration.md, names a test that exists."""

import pytest
from doc_tables import Row, code_spans, functions_of, read_table, table_names

MISTAKES = [row for name in table_names("mistakes.md") for row in read_table("mistakes.md", name)]
DIFFERENCES = read_table("migration.md", "differences")


@pytest.mark.parametrize("row", [*MISTAKES, *DIFFERENCES], ids=lambda row: next(iter(row.values()))[:50])
def test_the_row_is_held_by_a_test(row: Row) -> None:
    assert all(row.values())
    references = code_spans(row["test"])
    assert references
    for reference in references:
        path, _, function = reference.partition("::")
        assert function in functions_of(path), reference


@pytest.mark.parametrize("rows", [MISTAKES, DIFFERENCES])
def test_no_row_stands_twice(rows: list[Row]) -> None:
    first = [next(iter(row.values())) for row in rows]
    assert len(set(first)) == len(first)
