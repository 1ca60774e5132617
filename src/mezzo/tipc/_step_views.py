"""A step as the page shows it: its record, the end of its log, and the numbers in the log."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from mezzo.tipc._load import busy_reason
from mezzo.tipc._logs import one_line, read_log, tail
from mezzo.tipc._measures import Latency, LossCurve, OperatorTable, is_mixed, latencies, loss_curve, operator_table
from mezzo.tipc._record import Record
from mezzo.tipc._run_folder import RecordedRun

BAD_STATUSES = ("failed", "timeout", "interrupted")
SYMBOLS: dict[str, str] = {"failed": "✗", "timeout": "!", "interrupted": "■", "passed": "✓", "skipped": "○"}
"""Symbols of the statuses, the most severe first."""

_GROUP = ("trainer", "devices", "nodes", "autocast", "model")
_NONE = ("", "null")  # values of a setting that is not used


@dataclass(frozen=True, kw_only=True, slots=True)
class StepView:
    """A step with everything that the page shows."""

    record: Record
    anchor: str
    """Unique on the page."""
    group: tuple[tuple[str, str], ...]
    """Labels of its training: its own, or those of the step that it needs; may be empty."""
    log_href: str
    """Relative link from the page to the log; empty if there is no log."""
    tail: str
    curve: LossCurve | None
    operators: OperatorTable | None
    latencies: tuple[Latency, ...]

    @property
    def is_bad(self) -> bool:
        """Whether it failed, timed out or was interrupted."""
        return self.record.status in BAD_STATUSES

    @property
    def is_mixed(self) -> bool:
        """Whether it trains in mixed precision."""
        return is_mixed(self.record)

    @property
    def device(self) -> str:
        """Device of an inference, cpu or gpu; empty for other steps."""
        return self.record.labels.get("device", "").lower()

    @property
    def precision(self) -> str:
        """Of an inference; of a training, whether it is mixed; empty for other steps."""
        trained = ("mixed" if self.is_mixed else "fp32") if self.record.kind == "train" else ""
        return self.record.labels.get("precision", "").lower() or trained

    @property
    def busy(self) -> str:
        """Why its speed means nothing: what else ran on the machine."""
        return busy_reason(self.record.load)

    @property
    def brief(self) -> str:
        """Its reason in one line."""
        return one_line(self.record.reason)

    @property
    def labels(self) -> str:
        """Its labels in one line."""
        return ", ".join(f"{name} {value}" for name, value in self.record.labels.items() if value not in _NONE)


def view_steps(run: RecordedRun, number: int, page: Path) -> list[StepView]:
    """Read the logs of a run and return its steps; `number` is the number of the run on the page."""
    groups = _groups(run.records)
    return [
        _show(run, record, groups[record.step], f"run{number}-step{place}", page)
        for place, record in enumerate(run.records, start=1)
    ]


def _show(run: RecordedRun, record: Record, group: dict[str, str], anchor: str, page: Path) -> StepView:
    path = run.log_of(record)
    text = (read_log(path) if path else None) or ""
    trains = record.kind == "train"
    return StepView(
        record=record,
        anchor=anchor,
        group=tuple(group.items()),
        log_href=_href(path, page) if path else "",
        tail=tail(text),
        curve=loss_curve(text) if trains else None,
        operators=operator_table(text) if trains else None,
        latencies=tuple(latencies(text)) if record.kind == "infer" else (),
    )


def _groups(records: Sequence[Record]) -> dict[str, dict[str, str]]:
    """Return the labels of each step's training; missing labels come from the step that it needs."""
    groups: dict[str, dict[str, str]] = {}
    for record in records:  # a step follows those that it needs
        needed = _first(groups.get(name) for name in record.needs)
        own = {name: record.labels[name] for name in _GROUP if record.labels.get(name, "") not in _NONE}
        groups[record.step] = {**needed, **own}
    return groups


def _first(groups: Iterable[dict[str, str] | None]) -> dict[str, str]:
    return next((group for group in groups if group), {})


def _href(log: Path, page: Path) -> str:
    """Return a relative link; colons are escaped, so that it cannot have a scheme."""
    relative = os.path.relpath(os.path.realpath(log), os.path.dirname(os.path.realpath(page)))
    return quote(os.fsencode(relative))
