"""The page about one or more runs: a single HTML file that loads nothing else.

`mezzo.report` escapes all text of records and logs.
"""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mezzo.files import write_text
from mezzo.report import Series, line_chart, render_page
from mezzo.tipc._matrix import inference_support, stage_matrix, training_support, verdict
from mezzo.tipc._pictures import ShownPictures, read_pictures
from mezzo.tipc._run_folder import CertificateCheck, RecordedRun
from mezzo.tipc._step_views import SYMBOLS, StepView, view_steps

MAX_BARS = 40
"""Largest number of bars in the chart of durations."""

MAX_CURVES = 8
"""Largest number of lines in a chart of losses."""

MAX_FULL = 20
"""With more runs, passed steps show only what is needed to find them: 200 runs stay below 5 MB."""

LOG_CHARS = 400_000
"""Characters of logs on the page. Failed steps are served first; the others share what is left."""

PICTURE_CHARS = 600_000
"""Characters of pictures on the page."""

CURVE_POINTS = 30_000
"""Points of all loss curves together."""


@dataclass(frozen=True, slots=True)
class LossChart:
    """The loss curves of a model: AMP and FP32, if both exist."""

    model: str
    svg: str
    lines: tuple[tuple[str, StepView], ...]
    """Style and step of each line."""
    num_left_out: int

    @property
    def compares(self) -> bool:
        """Whether both precisions are drawn."""
        return len({step.is_mixed for _, step in self.lines}) == 2


@dataclass(frozen=True, slots=True)
class RunView:
    """A run as the page shows it."""

    number: int
    run: RecordedRun
    directory: str
    """Relative to the page."""
    steps: tuple[StepView, ...]

    @property
    def state(self) -> str:
        """Verdict of steps and certificate; `unfinished` if nothing has failed and the runner has not ended."""
        state = verdict([step.record.status for step in self.steps])
        if any(check.passed is False for check in self.run.checks) or self.run.info.result not in (0, None):
            state = "failed"
        return "unfinished" if state != "failed" and self.run.info.result is None else state

    @property
    def seconds(self) -> float:
        """Time of all steps together."""
        return sum(step.record.seconds for step in self.steps)


def write_page(runs: Sequence[RecordedRun], path: Path | str) -> None:
    """Write one self-contained HTML page about runs, with relative links to their logs.

    Raises:
        MissingExtra: jinja2 is not installed.
        RunError: The page cannot be written.
    """
    write_text(Path(path), page_text(runs, Path(path)))


def page_text(runs: Sequence[RecordedRun], path: Path) -> str:
    """Return the page for a path; its links to logs are relative."""
    views = [_view(run, number, path) for number, run in enumerate(runs, start=1)]
    content = _content(_with_short_logs(views))
    return render_page("mezzo.tipc", "page.html.jinja", content, style="page.css", script="page.js", with_filter=True)


def _content(views: Sequence[RunView]) -> dict[str, Any]:
    steps = [step for view in views for step in view.steps]
    cards, trainings = training_support(steps)
    pictures, num_pictures_left_out = _pictures(views)
    return {
        "is_compact": len(views) > MAX_FULL,
        "pictures": pictures,
        "num_pictures_left_out": num_pictures_left_out,
        "keys": _keys(views),
        "filters": {
            "network": _sorted(step.record.model for step in steps),
            "step": _sorted(step.record.kind for step in steps),
            "device": _sorted(step.device for step in steps),
            "precision": _sorted(step.precision for step in steps),
            "verdict": _sorted("failed" if step.is_bad else step.record.status for step in steps),
        },
        "symbols": SYMBOLS,
        "state": overall_verdict(views),
        "counts": Counter(step.record.status for step in steps),
        "steps": steps,
        "views": views,
        "failures": [step for step in steps if step.is_bad],
        "failed_checks": [(view, check) for view in views for check in view.run.checks if check.passed is False],
        "checks": [(view, check) for view in views for check in view.run.checks],
        "check_state": check_state,
        "matrix": stage_matrix([(view.run, view.steps) for view in views]),
        "cards": cards,
        "trainings": trainings,
        "inferences": inference_support(steps),
        "longest": sorted(steps, key=lambda step: -step.record.seconds)[:MAX_BARS],
        "longest_s": max([step.record.seconds for step in steps], default=0) or 1,
        "charts": _charts(steps),
        "latencies": [(step, latency) for step in steps for latency in step.latencies],
        "slowest_ms": max([latency.inference_ms for step in steps for latency in step.latencies], default=0) or 1,
        "operators": [(step, step.operators) for step in steps if step.operators],
        "notices": _notices(views),
    }


def _sorted(words: Iterable[str]) -> list[str]:
    return sorted({word for word in words if word})


def _keys(views: Sequence[RunView]) -> dict[str, int]:
    """Return a number for each step, by its anchor: the same number for the same step of another run."""
    numbers: dict[tuple[object, ...], int] = {}
    keys = {}
    for view in views:
        seen: Counter[tuple[object, ...]] = Counter()
        for step in view.steps:
            same = (step.record.kind, *sorted(step.record.labels.items()))
            seen[same] += 1
            keys[step.anchor] = numbers.setdefault((*same, seen[same]), len(numbers))
    return keys


def _with_short_logs(views: Sequence[RunView]) -> list[RunView]:
    """Return the views with the ends of their logs cut to what fits on the page."""
    steps = [step for view in views for step in view.steps]
    left = LOG_CHARS
    kept: dict[str, str] = {}
    for bad in (True, False):  # those that failed first
        group = [step for step in steps if step.is_bad is bad]
        for place, step in enumerate(sorted(group, key=lambda step: len(step.tail))):
            share = max(0, left // (len(group) - place))  # short ones leave the rest of theirs to the long ones
            kept[step.anchor] = _last_lines(step.tail, share)
            left -= len(kept[step.anchor])
    return [replace(view, steps=tuple(replace(step, tail=kept[step.anchor]) for step in view.steps)) for view in views]


def _last_lines(text: str, chars: int) -> str:
    r"""Return the last whole lines of a text that have at most so many characters.

    >>> _last_lines("one\ntwo\nthree", 10)
    'two\nthree'
    """
    return text if len(text) <= chars else text[len(text) - chars :].partition("\n")[2] if chars > 0 else ""


def _pictures(views: Sequence[RunView]) -> tuple[list[tuple[RunView, ShownPictures]], int]:
    """Return the pictures that fit on the page, first one of each run, then the second ones; and how many do not."""
    found = [(place, view, each) for view in views for place, each in enumerate(read_pictures(view.run))]
    kept, left = [], PICTURE_CHARS
    for place, view, each in sorted(found, key=lambda row: (row[0], row[1].number)):
        left -= each.size
        if left < 0:
            break
        kept.append((view.number, place, view, each))
    kept.sort(key=lambda row: row[:2])
    return [(view, each) for _, _, view, each in kept], len(found) - len(kept)


def overall_verdict(views: Sequence[RunView]) -> str:
    """Return the verdict of all runs: failed, unfinished, passed, skipped or empty."""
    states = {view.state for view in views}
    return next((state for state in ("failed", "unfinished", "passed", "skipped") if state in states), "empty")


def check_state(check: CertificateCheck) -> str:
    """Return the status that the page shows for a check."""
    return "skipped" if check.passed is None else "passed" if check.passed else "failed"


def _view(run: RecordedRun, number: int, path: Path) -> RunView:
    directory = os.path.relpath(os.path.realpath(run.directory), os.path.dirname(os.path.realpath(path)))
    return RunView(number, run, directory, tuple(view_steps(run, number, path)))


def _charts(steps: Sequence[StepView]) -> list[LossChart]:
    curves: dict[str, list[StepView]] = {}
    for step in steps:
        if step.curve:
            curves.setdefault(step.record.model, []).append(step)
    points = max(20, CURVE_POINTS // max(1, sum(min(len(own), MAX_CURVES) for own in curves.values())))
    return [_chart(model, own, points) for model, own in curves.items()]


def _chart(model: str, steps: Sequence[StepView], points: int) -> LossChart:
    mixed, full = ([step for step in steps if step.is_mixed is wanted] for wanted in (True, False))
    drawn = [*mixed[: MAX_CURVES // 2], *full[: MAX_CURVES // 2]]
    styles = [
        f"{name}{place}" for name, of in (("amp", mixed), ("fp32", full)) for place in range(len(of[: MAX_CURVES // 2]))
    ]
    lines = tuple(zip(styles, drawn, strict=True))
    series = [
        Series(f"{step.record.step} {step.labels}", step.curve.thinned(points), style)
        for style, step in lines
        if step.curve
    ]
    svg = line_chart(series, title=f"Loss of {model} over its steps", x_label="step")
    return LossChart(model, svg, lines, len(steps) - len(drawn))


def _notices(views: Sequence[RunView]) -> dict[str, list[str]]:
    """Return each notice with its runs and steps."""
    notices: dict[str, list[str]] = {}
    for view in views:
        info = view.run.info
        whole = f"{info.model} {info.mode}"
        for notice in (*view.run.notes, *info.notices):
            notices.setdefault(notice, []).append(whole)
        for step in view.steps:
            for notice in step.record.notices:
                notices.setdefault(notice, []).append(f"{whole}: {step.record.step}")
    return notices
