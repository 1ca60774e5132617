"""Compare two runs: what broke, what was mended, what became slower, and since which run."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from mezzo.report import markdown_table, plural
from mezzo.tipc.history._changes import (
    ACCURACY,
    BAD,
    SHORT_HASH,
    UNDECIDED,
    WORSE,
    Finding,
    Point,
    What,
    judge_since,
    measured,
    normal_level,
    speed_measure,
    verdict_change,
    version_changes,
)
from mezzo.tipc.history._noise import MIN_RUNS
from mezzo.tipc.history._rows import Filter, HistoryError, HistoryRun, HistoryStep, Series
from mezzo.tipc.history._store import HistoryContent, find_run, read_content


@dataclass(frozen=True, slots=True)
class RunComparison:
    """The differences of two runs, the most severe first."""

    before: HistoryRun
    after: HistoryRun
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    num_series: int

    @property
    def is_worse(self) -> bool:
        """Whether something broke, or became slower or less accurate beyond noise."""
        return any(finding.what in WORSE for finding in self.findings)

    def text(self) -> str:
        """Return the comparison for people."""
        lines = [
            f"before: {describe_run(self.before)}",
            f"after:  {describe_run(self.after)}",
            f"versions: {version_changes(self.before, self.after)}",
            *(f"note: {note}" for note in self.notes),
            "",
        ]
        if not self.findings:
            return "\n".join([*lines, f"No difference beyond noise in {plural(self.num_series, 'step')}."])
        rows = [["what", "step", "details", "since"]]
        for each in self.findings:
            device = " ".join(filter(None, (each.series.device, each.series.precision)))
            rows.append([each.what, f"{each.step} {device}".rstrip(), each.detail, _since(each)])
        return "\n".join([*lines, markdown_table(rows)])

    def as_json(self) -> str:
        """Return the comparison for programs."""
        findings = [{**asdict(each), "cause": each.cause} for each in self.findings]
        runs = {"before": asdict(self.before), "after": asdict(self.after)}
        content = {**runs, "is_worse": self.is_worse, "findings": findings, "notes": self.notes}
        return json.dumps(content, indent=1, ensure_ascii=False)


def describe_run(run: HistoryRun) -> str:
    """Return a run in one line."""
    name = f"run {run.id}" if run.id > 0 else run.folder
    commit = f", commit {run.commit_id[:SHORT_HASH]}" if run.commit_id else ""
    return f"{name}, {run.network} {run.mode}, {run.started[:19]}, {run.verdict}, {run.machine}{commit}"


def compare_runs(before: str, after: str, history: Path) -> RunComparison:
    """Compare two runs; the older one counts as the state before.

    Args:
        before: The folder of a run, or its id in the history.
        after: Another one.
        history: The history that tells what is noise; it may be missing if both are folders.

    Raises:
        HistoryError: An id is unknown, the history cannot be used, or the runs are not of the same network and mode.
        RunFolderError: A folder cannot be read.
    """
    (one, steps_of_one), (other, steps_of_other) = (_resolve(each, history) for each in (before, after))
    for name in ("network", "mode", "config"):
        if (first := getattr(one, name)) != (second := getattr(other, name)):
            raise HistoryError(
                f"{before} and {after}: of different {name}s, '{first}' and '{second}'; give two runs of one network, mode "
                "and text"
            )
    if one.key == other.key:
        raise HistoryError(f"{before} and {after}: are the same run; give two runs")
    if one.started > other.started:
        one, steps_of_one, other, steps_of_other = other, steps_of_other, one, steps_of_one
    content = read_content(history, Filter(network=one.network)) if history.exists() else HistoryContent({}, {})
    one, other = (_known(content, run, steps) for run, steps in ((one, steps_of_one), (other, steps_of_other)))
    return _compare(content, one, other)


def _resolve(name: str, history: Path) -> tuple[HistoryRun, list[HistoryStep]]:
    if name.isascii() and name.isdigit() and not Path(name).exists():
        return find_run(history, int(name[:18])), []
    if not Path(name).is_dir():
        raise HistoryError(f"{name}: neither a folder nor the id of a run; 'mezzo tipc history' lists the ids")
    from mezzo.tipc._run_folder import load_run
    from mezzo.tipc.history._collect import collect  # imports torch

    return collect(load_run(name))


def _known(content: HistoryContent, run: HistoryRun, steps: list[HistoryStep]) -> HistoryRun:
    """Return a run as the history knows it; a folder that is not in it joins the content under a negative id."""
    known = next((each for each in content.runs.values() if each.key == run.key), None)
    if known is not None:
        return known
    number = -1 - sum(each < 0 for each in content.runs)
    content.runs[number] = run
    for step in steps:
        content.series.setdefault(step.series, []).append((number, step))
    return run


def _compare(content: HistoryContent, before: HistoryRun, after: HistoryRun) -> RunComparison:
    notes = []
    if before.machine != after.machine:
        notes.append(f"speeds are not compared: the machines differ ({before.machine}; {after.machine})")
    findings: list[Finding] = []
    num_series = num_unjudged = num_busy = 0
    for series, entries in content.series.items():
        points = sorted(((content.runs[run], step) for run, step in entries), key=lambda point: point[0].started)
        points = [point for point in points if point[0].started <= after.started]
        old, new = (next((p for p in points if p[0].key == run.key), None) for run in (before, after))
        if old is None and new is None:
            continue
        num_series += 1
        findings += _verdicts(series, points, old, new)
        if old is None or new is None or before.machine != after.machine:
            continue
        own = [point for point in points if point[0].machine == after.machine]
        for measure in (speed_measure([step for _, step in own]), ACCURACY):
            usable = measured(own, measure)
            if not any(point[0].key == after.key for point, _ in usable):
                num_busy += bool(new[1].busy) and measure is not ACCURACY
                continue
            past = [value for point, value in usable if point[0].started <= before.started]
            num_unjudged += normal_level(past) is None and measure is not ACCURACY
            if (finding := judge_since(own, measure, before)) is not None:
                findings.append(finding)
    if num_busy:
        notes.append(f"the machine was busy in {plural(num_busy, 'step')} of the later run: its speed is not judged")
    if num_unjudged:
        notes.append(f"{plural(num_unjudged, 'step')} without {MIN_RUNS} earlier measurements: speed is not judged")
    order = get_args(What)
    findings.sort(key=lambda finding: order.index(finding.what))
    return RunComparison(before, after, tuple(findings), tuple(notes), num_series)


def _verdicts(series: Series, points: list[Point], old: Point | None, new: Point | None) -> Iterator[Finding]:
    if new is None:
        assert old is not None
        yield Finding("gone", series, old[1].step, f"was {old[1].status}; the later run has no such step")
        return
    step, reason = new[1], new[1].reason
    if old is None:
        yield Finding("new", series, step.step, f"{step.status} {reason}".rstrip())
        return
    was_bad, is_bad = old[1].status in BAD, step.status in BAD
    if step.status in UNDECIDED:
        if old[1].status not in UNDECIDED:
            yield Finding("not run", series, step.step, f"was {old[1].status}; now {step.status}: {reason}")
        return
    if is_bad == was_bad:
        return
    own = [point for point in points if point[0].machine == new[0].machine]
    first, previous = verdict_change(own)
    detail = f"{step.status}: {reason}" if is_bad else f"was {old[1].status}: {old[1].reason}"
    yield Finding("broke" if is_bad else "mended", series, step.step, detail, first[0], previous and previous[0])


def _since(finding: Finding) -> str:
    run = finding.since
    if run is None:
        return ""
    name = f"run {run.id}" if run.id > 0 else "this run"
    cause = finding.cause
    return f"{name}, {run.started[:10]}" + (f": {cause}" if cause else "")
