"""The HTML page of a comparison, with a chart of the error over depth."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mezzo.proof._accuracy_rows import AccuracyRow, Kind, as_computed
from mezzo.proof._accuracy_sheet import bad_counts, short
from mezzo.report import Mark, Series, line_chart, render_page

WORDS = {"red": "overflow, NaN or inf", "orange": "beyond rounding", "yellow": "half", "": ""}


def page_text(
    *,
    title: str,
    summary: Sequence[str],
    rows: Sequence[AccuracyRow],
    first: AccuracyRow | None,
    first_gradient: AccuracyRow | None,
) -> str:
    """Return the page.

    Args:
        title: Names of both runs.
        summary: Lines of text.
        rows: Sorted by harm.
        first: The first diverging output.
        first_gradient: The first diverging gradient.
    """
    firsts = [row for row in (first, first_gradient) if row is not None]
    orders = {id(row): place for place, row in enumerate(sorted(rows, key=as_computed))}
    content = {
        "title": title,
        "summary": summary,
        "state": "failed" if any(math.isinf(row.harm) for row in rows) else "late" if firsts else "passed",
        "rows": [(row, orders[id(row)], any(row is each for each in firsts)) for row in rows],
        "chart": chart(rows, firsts),
        "words": WORDS,
        "short": short,
        "bad_counts": bad_counts,
    }
    return render_page("mezzo.proof", "accuracy.html.jinja", content, style="accuracy.css", script="accuracy.js")


def chart(rows: Sequence[AccuracyRow], firsts: Sequence[AccuracyRow]) -> str:
    """Return the chart as SVG, or an empty text if there is no difference to draw."""
    known = [row for row in rows if row.depth and math.isfinite(row.error) and not row.note]
    positive = [row.error for row in known if row.error > 0]
    if not positive:
        return ""
    floor = 10.0 ** math.floor(math.log10(min(positive)))
    kinds: tuple[tuple[Kind, str], ...] = (
        ("output", "outputs"),
        ("output gradient", "gradients"),
        ("parameter gradient", "parameters"),
    )
    series = [_series([row for row in known if row.kind == kind], style, floor) for kind, style in kinds]
    outputs = sorted((row for row in known if row.kind == "output" and row.limit > 0), key=lambda row: row.depth)
    limits = Series("what rounding explains, outputs", [(row.depth, row.limit) for row in outputs], "limit")
    marks = [Mark(f"first to diverge: {row.kind} {row.name}", row.depth, "first") for row in firsts if row.depth]
    return line_chart(
        [*series, limits],
        title="Error of outputs and gradients over depth",
        x_label="depth: modules in the order of the forward",
        log_y=True,
        counts_x=True,
        marks=marks,
    )


def _series(rows: Sequence[AccuracyRow], style: str, floor: float) -> Series:
    """Return a line over depth."""
    rows = sorted(rows, key=lambda row: (row.depth, row.order))
    points = [(float(row.depth), max(row.error, floor)) for row in rows]
    names = [f"{row.kind} {row.name}: {row.error:.3g}" for row in rows]
    return Series(style, points, style, names)
