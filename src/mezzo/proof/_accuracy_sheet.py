"""Rows of a comparison as text, CSV and XLSX."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from mezzo import report
from mezzo.files import plain
from mezzo.proof._accuracy_rows import AccuracyRow

COLUMNS = (
    "name", "kind", "module", "order", "state", "harm", "error", "added", "inflow", "limit", "max_abs_error", "max_ulps",
    "cosine", "underflow", "overflows", "max_abs_a", "max_abs_b", "nan_a", "nan_b", "inf_a", "inf_b", "dtype_a", "dtype_b",
    "rounding", "shape", "diverges", "note",
)  # fmt: skip

COLOURS = {"red": "#FF9B94", "orange": "#FFC27A", "yellow": "#FFF3B0"}

_TEXT_COLUMNS = ("harm", "error", "added", "ulps", "cosine", "zeroed", "max a", "max b", "bad", "dtype", "kind", "name")
_NUMBERS = range(9)
"""Positions of the text columns with numbers."""


def csv_text(rows: Iterable[AccuracyRow]) -> str:
    """Return rows as CSV."""
    return report.csv_text(COLUMNS, map(_cells, rows))


def xlsx_bytes(rows: Sequence[AccuracyRow]) -> bytes:
    """Return rows as a workbook with one coloured sheet.

    Raises:
        MissingExtra: XlsxWriter is not installed.
    """
    return report.xlsx_bytes("accuracy", COLUMNS, list(map(_cells, rows)), [COLOURS.get(row.state) for row in rows])


def text_table(rows: Sequence[AccuracyRow], limit: int | None) -> str:
    """Return the first `limit` rows in columns; None: all."""
    shown = rows if limit is None else rows[:limit]
    lines = report.text_table([_TEXT_COLUMNS, *map(_text_cells, shown)], right=_NUMBERS)
    if len(shown) < len(rows):
        lines.append(f"... and {len(rows) - len(shown)} rows with less harm")
    return "\n".join(lines)


def short(value: float) -> str:
    """Return a number with three digits, or an empty text for NaN.

    >>> short(0.00123456), short(float("inf")), short(float("nan"))
    ('0.00123', 'inf', '')
    """
    return "" if math.isnan(value) else f"{value:.3g}"


def bad_counts(row: AccuracyRow) -> str:
    """Return the counts of NaN and inf in b, and those in a if there are any."""
    counts = [f"{count} {what}" for count, what in ((row.nan_b, "NaN"), (row.inf_b, "inf")) if count]
    if row.nan_a + row.inf_a:
        counts.append(f"({row.nan_a} NaN, {row.inf_a} inf in the reference)")
    return " ".join(counts)


def _text_cells(row: AccuracyRow) -> tuple[str, ...]:
    numbers = (row.harm, row.error, row.added, row.max_ulps)
    cosine = "" if math.isnan(row.cosine) else f"{row.cosine:.6f}"
    zeroed = "" if math.isnan(row.underflow) else f"{row.underflow:.1%}"
    name = f"{plain(row.name)}: {plain(row.note)}" if row.note else plain(row.name)
    dtypes = row.dtype_b or row.dtype_a
    return (
        *(short(value) for value in numbers), cosine, zeroed, short(row.max_abs_a), short(row.max_abs_b), bad_counts(row),
        dtypes, row.kind, name,
    )  # fmt: skip


def _cells(row: AccuracyRow) -> list[Any]:
    """Return the cells of a row: numbers, and plain text."""
    values = row.to_dict()
    values["shape"] = "x".join(str(size) for size in row.shape)
    return [plain(value) if isinstance(value, str) else value for value in (values[name] for name in COLUMNS)]
