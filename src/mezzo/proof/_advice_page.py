"""The HTML page of the doctor's report: both steps, their time, and each advice with its gain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mezzo.files import write_text
from mezzo.proof._advice import Advice
from mezzo.proof._doctor import Report
from mezzo.proof._measure import Measured
from mezzo.proof._recording_parts import TOOLS, WorkPart, work_parts
from mezzo.report import percent, render_page, time_text


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A measured step of the page."""

    label: str
    measured: Measured
    parts: list[WorkPart]
    """Microseconds of its kernels by class, and on a GPU the idle time; empty if kernels were not recorded."""


def write_advice_page(report: Report, path: Path | str) -> None:
    """Write a report as a single HTML file.

    Args:
        report: From `advise`.
        path: Written atomically; its folder is created.

    Raises:
        MissingExtra: jinja2 is not installed.
    """
    write_text(Path(path), page_text(report))


def page_text(report: Report) -> str:
    """Return the page."""
    steps = steps_of(report)
    content = {
        "tools": TOOLS,
        "report": report,
        "name": f"AMP-{report.setup.level} in {report.setup.dtype}",
        "state": "passed" if report.speedup > 1 else "late",
        "steps": steps,
        "longest_s": max(step.measured.step_s for step in steps),
        "rows": facts(steps),
        "advices": [(advice, _outcome(report, advice)) for advice in report.advices],
        "changes": changes_text(report),
    }
    return render_page("mezzo.proof", "advice.html.jinja", content, style="recording.css")


def steps_of(report: Report) -> list[MeasuredStep]:
    """Return the steps in float32, in AMP and, if measured, with the changes."""
    found = [("float32", report.full), (f"AMP-{report.setup.level}", report.amp)]
    if report.changed is not None:
        found.append(("with the changes", report.changed))
    return [MeasuredStep(label, measured, _parts(measured)) for label, measured in found]


def _parts(measured: Measured) -> list[WorkPart]:
    if not measured.stats.kernels:
        return []
    idle_us = 1e6 * measured.idle_share * measured.step_s
    idle = [WorkPart("no kernel runs", "idle", idle_us)] if measured.is_cuda else []
    return [*work_parts(measured.stats), *idle]


def facts(steps: Sequence[MeasuredStep]) -> list[tuple[str, list[str]]]:
    """Return the rows of the table of steps: a label, and a text per step."""
    measured = [step.measured for step in steps]
    is_cuda = any(each.is_cuda for each in measured)
    rows = [
        ("step, median", [time_text(each.step_s) for each in measured]),
        ("interquartile range", [time_text(each.timing.spread_s) for each in measured]),
        ("kernels" if is_cuda else "operators", [time_text(each.busy_s) for each in measured]),
        ("products", [_share(each.product_s, each) for each in measured]),
        ("casts", [_share(each.cast_s, each) for each in measured]),
        ("last loss", [f"{each.losses[-1]:.6g}" if each.losses else "" for each in measured]),
    ]
    if is_cuda:
        cores = [each.stats.tensor_core_share for each in measured]
        rows[2:2] = [
            ("host time to queue it", [time_text(each.host_s) for each in measured]),
            ("kernels launched", [f"{each.num_launches:,}" for each in measured]),
        ]
        rows[-1:-1] = [
            ("on Tensor Cores", ["" if share is None else f"{share:.0%} of the kernels" for share in cores]),
            ("no kernel runs", [f"{each.idle_share:.0%} of the step" for each in measured]),
        ]
    return rows


def _share(seconds: float, of: Measured) -> str:
    return f"{time_text(seconds)}, {percent(seconds, of.busy_s)}"


def _outcome(report: Report, advice: Advice) -> str:
    """Return the time of an AMP step now and after the change, by the measured gain if there is one."""
    gain = advice.measured_gain or advice.gain
    return "" if gain is None else f"{time_text(report.amp.step_s)} → {time_text(report.amp.step_s / gain)}"


def changes_text(report: Report) -> str:
    """Return the file of changes, or an empty text without changes."""
    return "" if report.changes.are_none else report.changes.to_yaml()
