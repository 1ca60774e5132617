"""Steps of a history as a table, CSV and JSON."""

import json
from collections.abc import Sequence

from mezzo.report import csv_text, duration, number, text_table
from mezzo.tipc.history._changes import SHORT_HASH, Point
from mezzo.tipc.history._rows import HistoryStep

_HEADER = ("run started network mode step device precision verdict seconds latency_ms throughput accuracy accuracy_name "
           "busy reason host mezzo torch commit gpu driver machine folder").split()  # fmt: skip

_OF_STEP = "step seconds latency_ms throughput accuracy accuracy_name busy reason host".split()


def steps_table(points: Sequence[Point], count: int) -> str:
    """Return a table for people; `count` is the number of steps that the filter chooses."""
    rows = [["run", "started", "network", "step", "device", "precision", "verdict", "time", "ms", "samples/s",
             "accuracy", "mezzo", "torch", "commit"]]  # fmt: skip
    for run, step in points:
        score = f"{step.accuracy_name} {number(step.accuracy)}".strip()
        rows.append(
            [str(run.id), run.started[:16].replace("T", " "), run.network, step.step, step.series.device,
             step.series.precision, f"{step.status}{_remark(step)}",
             duration(step.seconds) if step.seconds else "",
             number(step.latency_ms, 2), number(step.throughput, 1), score, run.mezzo, run.torch,
             run.commit_id[:SHORT_HASH]]
        )  # fmt: skip
    lines = text_table(rows, right={0, 7, 8, 9})
    if count > len(points):
        lines.append(f"{count - len(points)} older steps are not shown; --limit 0 shows all")
    return "\n".join(lines)


def _remark(step: HistoryStep) -> str:
    """Return why a step is no measurement of speed."""
    return " (earlier run)" if step.resumed else " (busy)" if step.busy else ""


def steps_csv(points: Sequence[Point]) -> str:
    """Return CSV with all columns."""
    return csv_text(_HEADER, (list(row.values()) for row in map(_row, points)))


def steps_json(points: Sequence[Point]) -> str:
    """Return one JSON object per line, with all columns."""
    return "\n".join(json.dumps(_row(point), ensure_ascii=False) for point in points)


def _row(point: Point) -> dict[str, object]:
    run, step = point
    own = {"run": run.id, "network": run.network, "mode": run.mode, "device": step.series.device}
    own |= {"precision": step.series.precision, "verdict": step.status, "commit": run.commit_id}
    return {name: own[name] if name in own else getattr(step if name in _OF_STEP else run, name) for name in _HEADER}
