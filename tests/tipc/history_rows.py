"""Runs for the tests of the history, without running anything."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from mezzo.tipc.history import HistoryRun, HistoryStep
from mezzo.tipc.history._rows import Series
from mezzo.tipc.history._store import add_rows

MACHINE = "Made-up 9000, 2 cores"
FIRST = datetime(2026, 1, 1, tzinfo=UTC)


def run_row(number: int, **values: object) -> HistoryRun:
    """Return the run of a night."""
    row = HistoryRun(
        id=0,
        key=f"key-{number}-{values.get('network', 'net')}",
        network="net",
        mode="lite_train_lite_infer",
        config="train_infer",
        profile="mezzo",
        folder=f"/runs/{number}",
        started=(FIRST + timedelta(days=number)).isoformat(timespec="milliseconds"),
        ended="",
        result=0,
        verdict="passed",
        machine=MACHINE,
        gpu="",
        driver="",
        mezzo="0.2.0",
        torch="2.11.0",
        commit_id="a" * 40,
        code="c0de",
        versions=json.dumps({"torch": "2.11.0"}),
    )
    return replace(row, **values)  # type: ignore[arg-type]


def step_row(kind: str = "infer", network: str = "net", **values: object) -> HistoryStep:
    """Return a step."""
    labels = json.dumps({"device": "cpu", "precision": "fp32"})
    series = Series(network, "lite_train_lite_infer", "train_infer", kind, labels, 0, "cpu", "fp32")
    row = HistoryStep(series, f"{kind}-1", "passed", "", False, 2.0, 10.0, 100.0, None, "")
    return replace(row, **values)  # type: ignore[arg-type]


def nights(path: Path, latencies: list[float], **values: object) -> None:
    """Add one run per latency, each a night after the one before; `values` are of all runs."""
    for number, latency in enumerate(latencies):
        add_rows(path, run_row(number, **values), [step_row(latency_ms=latency)])
