"""Rows of a comparison as text, CSV and XLSX."""

from __future__ import annotations

import csv
import importlib
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

from mezzo.errors import require
from mezzo.files import plain
from mezzo.proof._accuracy_rows import Row

COLUMNS = (
    "name", "kind", "module", "order", "state", "harm", "error", "added", "inflow", "limit", "max_abs_error", "max_ulps",
    "cosine", "underflow", "overflows", "max_abs_a", "max_abs_b", "nan_a", "nan_b", "inf_a", "inf_b", "dtype_a", "dtype_b",
    "rounding", "shape", "diverges", "note",
)  # fmt: skip

COLOURS = {"red": "FF9B94", "orange": "FFC27A", "yellow": "FFF3B0"}

_FORMULA = ("=", "+", "-", "@", "\t", "\r")

_TEXT_COLUMNS = ("harm", "error", "added", "ulps", "cosine", "zeroed", "max a", "max b", "bad", "dtype", "kind", "name")
_NUMBERS = 9
"""The first so many text columns are right-aligned."""


def csv_text(rows: Iterable[Row]) -> str:
    """Return rows as CSV."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([harmless(value) for value in _cells(row)] for row in rows)
    return out.getvalue()


def harmless(value: Any) -> Any:
    """Return a cell that no spreadsheet reads as a formula: text that looks like one gets a leading quote.

    >>> harmless("=1+1"), harmless("-0.5"), harmless(-0.5), harmless("-inf"), harmless("layer")
    ("'=1+1", '-0.5', -0.5, '-inf', 'layer')
    """
    if not isinstance(value, str) or not value.startswith(_FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def xlsx_bytes(rows: Sequence[Row]) -> bytes:
    """Return rows as a workbook with one coloured sheet.

    Raises:
        MissingExtra: XlsxWriter is not installed.
    """
    require("xlsxwriter", extra="xlsx")
    buffer = io.BytesIO()
    options = {"in_memory": True, "strings_to_formulas": False, "strings_to_urls": False}
    book = importlib.import_module("xlsxwriter").Workbook(buffer, options)
    sheet = book.add_worksheet("accuracy")
    bold = book.add_format({"bold": True})
    fills = {state: book.add_format({"bg_color": f"#{colour}"}) for state, colour in COLOURS.items()}
    sheet.write_row(0, 0, COLUMNS, bold)
    for number, row in enumerate(rows, start=1):
        for column, value in enumerate(_cells(row)):
            write = sheet.write_string if isinstance(value, str) else sheet.write
            write(number, column, value, fills.get(row.state))
    sheet.freeze_panes(1, 1)
    sheet.autofilter(0, 0, max(len(rows), 1), len(COLUMNS) - 1)
    book.close()
    return buffer.getvalue()


def text_table(rows: Sequence[Row], limit: int | None) -> str:
    """Return the first `limit` rows in columns; None: all."""
    shown = rows if limit is None else rows[:limit]
    cells = [_TEXT_COLUMNS, *(_text_cells(row) for row in shown)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_TEXT_COLUMNS))]
    lines = ["  ".join(_aligned(line, widths)).rstrip() for line in cells]
    if len(shown) < len(rows):
        lines.append(f"... and {len(rows) - len(shown)} rows with less harm")
    return "\n".join(lines)


def short(value: float) -> str:
    """Return a number with three digits, or an empty text for NaN.

    >>> short(0.00123456), short(float("inf")), short(float("nan"))
    ('0.00123', 'inf', '')
    """
    return "" if math.isnan(value) else f"{value:.3g}"


def bad_counts(row: Row) -> str:
    """Return the counts of NaN and inf in b, and those in a if there are any."""
    counts = [f"{count} {what}" for count, what in ((row.nan_b, "NaN"), (row.inf_b, "inf")) if count]
    if row.nan_a + row.inf_a:
        counts.append(f"({row.nan_a} NaN, {row.inf_a} inf in the reference)")
    return " ".join(counts)


def _text_cells(row: Row) -> tuple[str, ...]:
    numbers = (row.harm, row.error, row.added, row.max_ulps)
    cosine = "" if math.isnan(row.cosine) else f"{row.cosine:.6f}"
    zeroed = "" if math.isnan(row.underflow) else f"{row.underflow:.1%}"
    name = f"{plain(row.name)}: {plain(row.note)}" if row.note else plain(row.name)
    dtypes = row.dtype_b or row.dtype_a
    return (
        *(short(value) for value in numbers), cosine, zeroed, short(row.max_abs_a), short(row.max_abs_b), bad_counts(row),
        dtypes, row.kind, name,
    )  # fmt: skip


def _aligned(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    pairs = list(zip(line, widths, strict=True))
    return [text.rjust(width) for text, width in pairs[:_NUMBERS]] + [
        text.ljust(width) for text, width in pairs[_NUMBERS:]
    ]


def _cells(row: Row) -> list[Any]:
    """Return the cells of a row: numbers, and plain text."""
    values = row.to_dict()
    values["shape"] = "x".join(str(size) for size in row.shape)
    return [plain(value) if isinstance(value, str) else value for value in (values[name] for name in COLUMNS)]
