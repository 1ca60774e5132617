"""Pages, charts, tables and log lines: everything that mezzo shows."""

from mezzo.report._html import render_page, security_policy
from mezzo.report._lines import stamped
from mezzo.report._numbers import bytes_text, duration, number, percent, plural, time_text
from mezzo.report._svg import Mark, Series, decades, line_chart, nice_ticks, spark_line
from mezzo.report._tables import csv_text, markdown_table, text_table, xlsx_bytes

__all__ = [
    "render_page",
    "security_policy",
    "line_chart",
    "spark_line",
    "Series",
    "Mark",
    "decades",
    "nice_ticks",
    "text_table",
    "markdown_table",
    "csv_text",
    "xlsx_bytes",
    "duration",
    "number",
    "time_text",
    "bytes_text",
    "percent",
    "plural",
    "stamped",
]
