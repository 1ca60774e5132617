"""The trend page: every step over its last runs, what is broken, and what became slower, since which commit or version."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mezzo.files import shown_path, write_text
from mezzo.report import render_page, spark_line
from mezzo.tipc.history._changes import (
    ACCURACY,
    BAD,
    SHORT_HASH,
    Finding,
    Measure,
    Point,
    measured,
    normal_level,
    speed_measure,
    verdict_change,
)
from mezzo.tipc.history._noise import LevelChange, level_changes
from mezzo.tipc.history._rows import Filter, HistoryRun, HistoryStep, Series, parse_words
from mezzo.tipc.history._store import HistoryContent, read_content

LAST = 60
"""Runs that are drawn for a step. Changes are looked for in these and the 40 before."""
_LOOKED_AT = 100
MAX_ROWS = 2000
MAX_CHANGES = 200
_SHOWN_LABELS = ("devices", "trainer", "batch", "threads", "trt", "check")


@dataclass(frozen=True, slots=True)
class TrendRow:
    """A step on one machine over its last runs."""

    series: Series
    machine: str
    points: tuple[Point, ...]
    measure: Measure
    findings: tuple[Finding, ...]
    svg: str
    normal: str
    """Median and quartiles, as text."""

    @property
    def last(self) -> Point:
        """The newest run."""
        return self.points[-1]

    @property
    def verdict(self) -> str:
        """Status of the newest run; bad ones count as failed for the filter."""
        return "failed" if self.last[1].status in BAD else self.last[1].status

    @property
    def label(self) -> str:
        """What makes the step different from others of its kind."""
        labels = parse_words(self.series.labels)
        return ", ".join(f"{name} {labels[name]}" for name in _SHOWN_LABELS if labels.get(name, "") not in ("", "null"))

    @property
    def value(self) -> str:
        """The newest number."""
        return self.measure.text(self.last[1]) if self.last[1].status == "passed" else ""


def write_trend_page(history: Path, page: Path, chosen: Filter | None = None) -> Path:
    """Write the page, one file that loads nothing else, and return its path.

    Raises:
        HistoryError: The history cannot be used.
        MissingExtra: jinja2 is not installed.
        RunError: The page cannot be written.
    """
    content = read_content(history, chosen, _LOOKED_AT)
    write_text(page, trend_text(content, shown_path(history)))
    return page


def trend_text(content: HistoryContent, name: str) -> str:
    """Return the page."""
    newest = {(run.network, run.mode, run.config, run.machine): run.id for run in content.runs.values()}
    rows = [row for series, entries in content.series.items() for row in _rows(content.runs, series, entries, newest)]
    rows.sort(key=lambda row: (row.series.network, row.series.mode, row.series.kind, row.last[1].step, row.machine))
    found = [(row, finding) for row in rows for finding in row.findings]
    found.sort(key=lambda each: each[1].since.started if each[1].since else "", reverse=True)
    runs = list(content.runs.values())
    values = {
        "name": name,
        "runs": runs,
        "rows": rows[:MAX_ROWS],
        "num_left_out": max(0, len(rows) - MAX_ROWS),
        "broken": [each for each in found if each[1].what == "broke"],
        "changes": [each for each in found if each[1].what != "broke"][:MAX_CHANGES],
        "last": LAST,
        "short": SHORT_HASH,
        "fields": {
            "network": _sorted(row.series.network for row in rows),
            "step": _sorted(row.series.kind for row in rows),
            "device": _sorted(row.series.device for row in rows),
            "precision": _sorted(row.series.precision for row in rows),
            "machine": _sorted(row.machine for row in rows),
            "verdict": _sorted(row.verdict for row in rows),
        },
    }
    return render_page("mezzo.tipc.history", "trend.html.jinja", values, style="trend.css", with_filter=True)


def _sorted(words: Iterator[str]) -> list[str]:
    return sorted({word for word in words if word})


def _rows(
    runs: dict[int, HistoryRun],
    series: Series,
    entries: Sequence[tuple[int, HistoryStep]],
    newest: dict[tuple[str, str, str, str], int],
) -> Iterator[TrendRow]:
    """Yield one row for each machine that ran a step; `newest` has the last run of each network, mode, text and machine."""
    machines: dict[str, list[Point]] = {}
    for run, step in entries:
        machines.setdefault(runs[run].machine, []).append((runs[run], step))
    for machine, points in machines.items():
        if all(step.status == "skipped" for _, step in points[-LAST:]):
            continue  # such as inference on a GPU that the machine does not have
        is_current = newest.get((series.network, series.mode, series.config, machine)) == points[-1][0].id
        yield _row(series, machine, points, is_current)


def _row(series: Series, machine: str, points: list[Point], is_current: bool) -> TrendRow:
    measure = speed_measure([step for _, step in points])
    findings, marks = [], []
    usable = measured(points, measure)
    changes = level_changes([value for _, value in usable])
    for each, found, changed in ((measure, usable, changes), *_accuracy_changes(points)):
        for change in changed:
            if change.is_confirmed:
                findings.append(_finding(each, change, found))
                marks += [points.index(found[change.at][0])] if each is measure else []
    ended = [point for point in points if point[1].status != "interrupted"]
    if is_current and ended and ended[-1][1].status in BAD:  # a step that the network no longer has is not broken
        findings.append(_broken(ended))
    drawn = points[-LAST:]
    skipped = len(points) - len(drawn)
    normal = normal_level([value for _, value in usable], changes)
    known = {id(point[1]): math.exp(value) for point, value in usable}
    svg = spark_line(
        [known.get(id(step)) for _, step in drawn],
        title=f"{measure.name} of the last {len(drawn)} runs; less is better",
        bad=[place for place, (_, step) in enumerate(drawn) if step.status in BAD],
        marks=[mark - skipped for mark in marks if mark >= skipped],
        band=(math.exp(normal.lower), math.exp(normal.upper)) if normal is not None else None,
    )
    spread = f"half of the runs within {math.expm1(normal.upper - normal.lower):.1%}" if normal is not None else ""
    return TrendRow(series, machine, tuple(drawn), measure, tuple(findings), svg, spread)


def _accuracy_changes(
    points: Sequence[Point],
) -> Iterator[tuple[Measure, list[tuple[Point, float]], list[LevelChange]]]:
    if found := measured(points, ACCURACY):
        yield ACCURACY, found, level_changes([value for _, value in found])


def _finding(measure: Measure, change: LevelChange, found: Sequence[tuple[Point, float]]) -> Finding:
    (run, step), value = found[change.at]
    worse, better, _ = measure.words
    if measure is ACCURACY:
        size = f"{change.before.median - value:+.4f}"
    else:
        size = f"{math.expm1(value - change.before.median):+.1%} in time"
    detail = f"{measure.name} {measure.text(step)}, {size} against the {change.before.runs} runs before"
    return Finding(
        worse if change.side > 0 else better, step.series, step.step, detail, run, found[change.at - 1][0][0]
    )


def _broken(points: Sequence[Point]) -> Finding:
    first, previous = verdict_change(points)
    step = points[-1][1]
    return Finding("broke", step.series, step.step, f"{step.status}: {step.reason}", first[0], previous and previous[0])
