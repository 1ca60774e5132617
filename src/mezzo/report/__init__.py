"""Pages, charts and log lines: what mezzo shows."""

from mezzo.report._html import duration, number, render_page
from mezzo.report._lines import stamped
from mezzo.report._svg import Mark, Series, line_chart

__all__ = ["render_page", "duration", "number", "line_chart", "Series", "Mark", "stamped"]
