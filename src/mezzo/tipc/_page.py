"""The page about one or more runs: a single HTML file that loads nothing else.

`mezzo.report` escapes all text of records and logs.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mezzo.files import write_text
from mezzo.report import Series, line_chart, render_page
from mezzo.tipc._matrix import inference_support, stage_matrix, training_support, verdict
from mezzo.tipc._run_folder import CertificateCheck, RecordedRun
from mezzo.tipc._step_views import SYMBOLS, StepView, view_steps

MAX_BARS = 40
"""Largest number of bars in the chart of durations."""

MAX_CURVES = 8
"""Largest number of lines in a chart of losses."""


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
    return render_page("mezzo.tipc", "page.html.jinja", _content(views), style="page.css", script="page.js")


def _content(views: Sequence[RunView]) -> dict[str, Any]:
    steps = [step for view in views for step in view.steps]
    cards, trainings = training_support(steps)
    return {
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
    return [_chart(model, own) for model, own in curves.items()]


def _chart(model: str, steps: Sequence[StepView]) -> LossChart:
    mixed, full = ([step for step in steps if step.is_mixed is wanted] for wanted in (True, False))
    drawn = [*mixed[: MAX_CURVES // 2], *full[: MAX_CURVES // 2]]
    styles = [
        f"{name}{place}" for name, of in (("amp", mixed), ("fp32", full)) for place in range(len(of[: MAX_CURVES // 2]))
    ]
    lines = tuple(zip(styles, drawn, strict=True))
    series = [
        Series(f"{step.record.step} {step.labels}", step.curve.points, style) for style, step in lines if step.curve
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
