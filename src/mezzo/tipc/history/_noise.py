"""Is a run slower than the runs before it, or is it noise? A rule with median and quartiles.

The logarithms of the last 8 to 20 measurements have a median m and quartiles. Their distance, divided by 1.349, is a
standard deviation s that a few outliers cannot move. A measurement is beyond the limit if it is more than f(n) * s away
from m. Two measurements in a row beyond the limit, on the same side, are a change; one alone is only suspected.

f(n) makes the rate of false alarms the same for every number of runs n: 1 in 1,000 measurements per side, for normal noise.
docs/history.md has the reasons, and benchmarks/history.py measures false alarms and power for other kinds of noise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MIN_RUNS = 8
"""With fewer measurements the quartiles are luck: at 5, f would be 18."""
WINDOW = 20
"""Older measurements are of another time: of other versions, and of another temperature."""
SMALLEST_SPREAD = 0.005
"""Smallest s. Durations are rounded; equal measurements have no spread, and half a per cent is no news."""
FACTORS = {
    8: 4.88, 9: 5.38, 10: 4.33, 11: 3.79, 12: 3.62, 13: 3.72, 14: 3.37,
    15: 3.15, 16: 3.07, 17: 3.11, 18: 2.92, 19: 2.83, 20: 2.78,
}  # fmt: skip
"""f(n), from 4 million simulated cases each; `python benchmarks/history.py factors` computes it.

It is not monotone: quartiles are interpolated between measurements, in another way for each remainder of n by 4.
"""
_IQR_OF_NORMAL = 1.349  # distance of the quartiles of a normal distribution with standard deviation 1

Side = Literal[-1, 0, 1]


@dataclass(frozen=True, slots=True)
class Baseline:
    """What is normal: median and quartiles of earlier measurements, as logarithms, and the limit of noise."""

    runs: int
    lower: float
    median: float
    upper: float

    @property
    def limit(self) -> float:
        """Largest distance from the median that still is noise."""
        return FACTORS[self.runs] * max((self.upper - self.lower) / _IQR_OF_NORMAL, SMALLEST_SPREAD)

    def side(self, value: float) -> Side:
        """Return 1 if a measurement is above the limit of noise, -1 if below, 0 if it is within."""
        distance = value - self.median
        return 0 if abs(distance) <= self.limit else 1 if distance > 0 else -1


@dataclass(frozen=True, slots=True)
class LevelChange:
    """A place at which measurements went to another level."""

    at: int
    """The first measurement of the new level."""
    side: Side
    is_confirmed: bool
    """False: it is the last measurement, and the next one decides."""
    before: Baseline


def baseline(values: Sequence[float]) -> Baseline | None:
    """Return what is normal by the last measurements (logarithms, the oldest first); None if there are too few."""
    last = sorted(values[-WINDOW:])
    if len(last) < MIN_RUNS:
        return None
    return Baseline(len(last), *(_quantile(last, share) for share in (0.25, 0.5, 0.75)))


def level_changes(values: Sequence[float]) -> list[LevelChange]:
    """Return where measurements changed their level; after a change only the measurements of the new level count.

    >>> quiet = [math.log(10 + 0.1 * (place % 3)) for place in range(12)]
    >>> [(change.at, change.side, change.is_confirmed) for change in level_changes([*quiet, *[math.log(12)] * 3])]
    [(12, 1, True)]
    >>> level_changes([*quiet, math.log(12), *quiet])  # one slow run is no change
    []
    """
    changes: list[LevelChange] = []
    start = 0
    for at in range(MIN_RUNS, len(values)):
        normal = baseline(values[start:at])
        side = normal.side(values[at]) if normal is not None else 0
        if normal is None or not side:
            continue
        is_last = at + 1 == len(values)
        if is_last or normal.side(values[at + 1]) == side:
            changes.append(LevelChange(at, side, not is_last, normal))
            start = at
    return changes


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile by linear interpolation between the neighbours."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
