"""What changed in a series, and since when: verdicts, speed and accuracy."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from mezzo.report import number, plural, time_text
from mezzo.tipc.history._noise import AHEAD, NEEDED, Baseline, LevelChange, baseline, level_changes
from mezzo.tipc.history._rows import HistoryRun, HistoryStep, Series, parse_words

BAD = ("failed", "timeout")
UNDECIDED = ("skipped", "interrupted")
"""Statuses without a verdict: nothing ran, or a signal or the cluster ended it."""
What = Literal[  # the most severe first
    "broke",
    "slower",
    "less accurate",
    "maybe slower",
    "maybe less accurate",
    "mended",
    "faster",
    "more accurate",
    "not run",
    "gone",
    "new",
]
WORSE: tuple[What, ...] = ("broke", "slower", "less accurate")
"""Findings for which `compare` returns 1."""
SHORT_HASH = 10
_SMALLEST = 1e-9  # nothing that is measured here is smaller, and ratios of all others are finite
Point = tuple[HistoryRun, HistoryStep]


@dataclass(frozen=True, slots=True)
class Measure:
    """A number of a step that noise moves."""

    name: str
    of: Callable[[HistoryStep], float | None]
    """Larger is worse, as a logarithm for times; None if the step has none."""
    text: Callable[[HistoryStep], str]
    words: tuple[What, What, What]
    """For worse, better, and a suspicion."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that changed."""

    what: What
    series: Series
    step: str
    detail: str
    since: HistoryRun | None = None
    """The first run with it; None if there is no history between the two runs."""
    previous: HistoryRun | None = None
    """The run before that one."""

    @property
    def cause(self) -> str:
        """The versions that changed between `previous` and `since`."""
        if self.since is None or self.previous is None:
            return ""
        return version_changes(self.previous, self.since)


def speed_measure(steps: Sequence[HistoryStep]) -> Measure:
    """Return the best measure of speed that the steps have: latency, throughput, otherwise the duration."""
    words: tuple[What, What, What] = ("slower", "faster", "maybe slower")
    if any(step.latency_ms for step in steps):
        return Measure("latency", lambda s: _log(s.latency_ms), lambda s: f"{number(s.latency_ms)} ms", words)
    if any(step.throughput for step in steps):
        return Measure("throughput", _log_time_per_sample, lambda s: f"{number(s.throughput, 1)} samples/s", words)
    return Measure("duration", lambda s: _log(s.seconds), lambda s: time_text(s.seconds), words)


ACCURACY = Measure(
    "accuracy",
    # A share lost, on a scale on which noise has about the same size everywhere, and 0.005 is half a per cent.
    lambda step: None if step.accuracy is None else -step.accuracy,
    lambda step: f"{step.accuracy_name} {number(step.accuracy, 4)}",
    ("less accurate", "more accurate", "maybe less accurate"),
)


def _log(value: float | None) -> float | None:
    return math.log(value) if value is not None and value > _SMALLEST else None


def _log_time_per_sample(step: HistoryStep) -> float | None:
    found = _log(step.throughput)
    return None if found is None else -found


def measured(points: Sequence[Point], measure: Measure) -> list[tuple[Point, float]]:
    """Return the points that are measurements: passed, not taken from an earlier run, on a machine that was not busy."""
    kept = [point for point in points if point[1].status == "passed" and not point[1].resumed]
    if measure is not ACCURACY:
        kept = [point for point in kept if not point[1].busy]
    return [(point, value) for point in kept if (value := measure.of(point[1])) is not None]


def verdict_change(points: Sequence[Point]) -> tuple[Point, Point | None]:
    """Return the first point of the last stretch with one verdict (bad or not), and the point before it.

    Those without a verdict do not count.
    """
    counted = [point for point in points if point[1].status not in UNDECIDED] or list(points)
    first = len(counted) - 1
    while first and (counted[first - 1][1].status in BAD) == (counted[-1][1].status in BAD):
        first -= 1
    return counted[first], counted[first - 1] if first else None


def judge_since(points: Sequence[Point], measure: Measure, before: HistoryRun) -> Finding | None:
    """Compare the last measurements with what was normal up to a run; None if nothing changed, or it cannot be judged.

    Args:
        points: Of one series on one machine, the oldest first.
        measure: What is compared.
        before: The run up to which measurements are taken as normal.
    """
    found = measured(points, measure)
    past = [value for point, value in found if point[0].started <= before.started]
    later = [(point, value) for point, value in found if point[0].started > before.started]
    normal = normal_level(past)
    if normal is None or not later:
        return None
    sides = [normal.side(value) for _, value in later]
    side = sides[-1]
    if not side:
        return None
    is_confirmed = sum(each == side for each in sides[-AHEAD:]) >= NEEDED
    if side < 0 and not is_confirmed:
        return None  # one fast run is no news
    first = _first_of_stretch(sides)
    previous = later[first - 1][0][0] if first else found[len(past) - 1][0][0]
    worse, better, maybe = measure.words
    what = better if side < 0 else worse if is_confirmed else maybe
    step = later[-1][0][1]
    detail = f"{measure.name} {measure.text(step)}, {_against(normal, later[-1][1], measure)}"
    return Finding(what, step.series, step.step, detail, later[first][0][0], previous)


def _first_of_stretch(sides: Sequence[int]) -> int:
    """Return where the last stretch with the side of the end begins; a change may have two other measurements between.

    >>> _first_of_stretch([0, 1, 0, 0, 0, 1, 0, 1])
    5
    """
    first = place = len(sides) - 1
    while first - place <= AHEAD - NEEDED and place > 0:
        place -= 1
        if sides[place] == sides[-1]:
            first = place
    return first


def normal_level(values: Sequence[float], changes: Sequence[LevelChange] | None = None) -> Baseline | None:
    """Return what is normal at the end of measurements: only those since the last change of level count.

    Args:
        values: The measurements.
        changes: Of `level_changes`, if they are known.
    """
    found = level_changes(values) if changes is None else changes
    confirmed = [change.at for change in found if change.is_confirmed]
    return baseline(values[confirmed[-1] if confirmed else 0 :])


def _against(normal: Baseline, value: float, measure: Measure) -> str:
    runs, limit = plural(normal.runs, "run"), normal.limit(1 if value > normal.median else -1)
    if measure is ACCURACY:
        return f"{-value + normal.median:+.4f} against the median of {runs} (noise: {limit:.4f})"
    change, limit = math.expm1(value - normal.median), math.expm1(limit)
    return f"{change:+.1%} in time against the median of {runs} (noise: {limit:.1%})"


def version_changes(before: HistoryRun, after: HistoryRun) -> str:
    """Return the versions that differ between two runs, in one line."""
    changes = []
    if before.commit_id != after.commit_id:
        changes.append(f"commit {_commit(before)} -> {_commit(after)}")
    names = ("mezzo", "torch", "driver", "gpu")
    old, new = (
        {**parse_words(run.versions), **{name: getattr(run, name) for name in names}} for run in (before, after)
    )
    for name in dict.fromkeys((*names, *sorted(old.keys() | new.keys()))):
        if name != "commit" and old.get(name, "") != new.get(name, ""):
            changes.append(f"{name} {old.get(name) or 'none'} -> {new.get(name) or 'none'}")
    if before.code != after.code and before.commit_id == after.commit_id:
        changes.append("source files changed without a commit")
    return ", ".join(changes) or "same versions and source files"


def _commit(run: HistoryRun) -> str:
    return run.commit_id[:SHORT_HASH] or "none"
