"""Tables: columns of text, Markdown, CSV and XLSX."""

from __future__ import annotations

import csv
import importlib
import io
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from mezzo.errors import require
from mezzo.files import one_line

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def text_table(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """Return the lines of a table of text, columns two spaces apart.

    Args:
        rows: All of the same length.
        right: Positions of the columns that are right-aligned.

    >>> text_table([["name", "ms"], ["a", "12.5"]], right={1})
    ['name    ms', 'a     12.5']
    """
    return ["  ".join(row).rstrip() for row in _padded(rows, right)]


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first row is its header.

    >>> print(markdown_table([["name", "ms"], ["a", "12.5"]]))
    | name | ms   |
    |------|------|
    | a    | 12.5 |
    """
    header, *rest = _padded([[one_line(cell) for cell in row] for row in rows])
    lines = [f"| {' | '.join(row)} |" for row in (header, *rest)]
    return "\n".join([lines[0], f"|{'|'.join('-' * (len(cell) + 2) for cell in header)}|", *lines[1:]])


def _padded(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[list[str]]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        [cell.rjust(width) if place in right else cell.ljust(width) for place, (cell, width) in enumerate(pairs)]
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    ]


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return CSV; text that a spreadsheet would read as a formula gets a leading quote.

    >>> csv_text(["name", "error"], [["=1+1", -0.5], ["-inf", "layer"]])
    "name,error\\n'=1+1,-0.5\\n-inf,layer\\n"
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([_without_formula(value) for value in row] for row in rows)
    return out.getvalue()


def _without_formula(value: Any) -> Any:
    if not isinstance(value, str) or not value.startswith(_FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def xlsx_bytes(
    title: str, header: Sequence[str], rows: Sequence[Sequence[Any]], colours: Sequence[str | None]
) -> bytes:
    """Return a workbook with one sheet; text is never read as a formula.

    Args:
        title: Of the sheet.
        header: Frozen, with a filter on every column.
        rows: Numbers and texts.
        colours: Of each row, such as `#FF9B94`; None: no colour.

    Raises:
        MissingExtra: XlsxWriter is not installed.
    """
    require("xlsxwriter", extra="xlsx")
    buffer = io.BytesIO()
    options = {"in_memory": True, "strings_to_formulas": False, "strings_to_urls": False}
    book = importlib.import_module("xlsxwriter").Workbook(buffer, options)
    sheet = book.add_worksheet(title)
    formats = {colour: book.add_format({"bg_color": colour}) for colour in colours if colour}
    sheet.write_row(0, 0, header, book.add_format({"bold": True}))
    for number, (row, colour) in enumerate(zip(rows, colours, strict=True), start=1):
        for column, value in enumerate(row):
            write = sheet.write_string if isinstance(value, str) else sheet.write
            write(number, column, value, formats[colour] if colour else None)
    sheet.freeze_panes(1, 1)
    sheet.autofilter(0, 0, max(len(rows), 1), len(header) - 1)
    book.close()
    return buffer.getvalue()
