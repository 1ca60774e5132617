"""Is a run slower than the runs before it, or is it noise? A rule with median and quartiles.

The logarithms of the last 10 to 40 measurements have a median m and quartiles. The distance of the quartiles, divided by
1.349, is a standard deviation s that outliers hardly move; if the quartile on one side is further from m than the other, twice
that distance counts on that side, because times have a longer tail above. A measurement is beyond the limit if it is more than
f(n) * s away from m. Three of five measurements in a row beyond the limit, on the same side, are a change; fewer are only
suspected.

f(n) makes the rate of false alarms the same for every number n of measurements: 2 in 100,000 per side, for normal noise.
docs/history.md has the reasons, and benchmarks/history.py measures false alarms and power for other kinds of noise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MIN_RUNS = 10
"""With fewer measurements the quartiles are luck: with 6, f would be 30."""
WINDOW = 40
"""Older measurements are of another time: of other versions, and of another temperature."""
NEEDED, AHEAD = 3, 5
"""A change is so many of so many measurements beyond the limit, the first of them among them."""
SMALLEST_SPREAD = 0.005
"""Smallest s. Durations are rounded; equal measurements have no spread, and half a per cent is no news."""
FACTORS = {
    10: 9.29, 11: 7.18, 12: 6.36, 13: 7.03, 14: 5.74, 15: 5.15, 16: 4.86, 17: 5.06,
    18: 4.57, 19: 4.24, 20: 4.11, 21: 4.20, 22: 3.95, 23: 3.76, 24: 3.66, 25: 3.72,
    26: 3.54, 27: 3.42, 28: 3.37, 29: 3.41, 30: 3.30, 31: 3.20, 32: 3.18, 33: 3.19,
    34: 3.11, 35: 3.05, 36: 3.04, 37: 3.05, 38: 2.98, 39: 2.94, 40: 2.92,
}  # fmt: skip
"""f(n); `python benchmarks/history.py factors` computes it.

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

    def limit(self, side: Side) -> float:
        """Return the largest distance above (1) or below (-1) the median that still is noise."""
        half = self.upper - self.median if side > 0 else self.median - self.lower
        spread = max((self.upper - self.lower) / _IQR_OF_NORMAL, 2 * half / _IQR_OF_NORMAL, SMALLEST_SPREAD)
        return FACTORS[self.runs] * spread

    def side(self, value: float) -> Side:
        """Return 1 if a measurement is above the limit of noise, -1 if below, 0 if it is within."""
        side: Side = 1 if value > self.median else -1
        return side if abs(value - self.median) > self.limit(side) else 0


@dataclass(frozen=True, slots=True)
class LevelChange:
    """A place at which measurements went to another level."""

    at: int
    """The first measurement of the new level."""
    side: Side
    is_confirmed: bool
    """False: it is near the end, and the next measurements decide."""
    before: Baseline


def baseline(values: Sequence[float]) -> Baseline | None:
    """Return what is normal by the last measurements (logarithms, the oldest first); None if there are too few."""
    last = sorted(values[-WINDOW:])
    if len(last) < MIN_RUNS:
        return None
    return Baseline(len(last), *(_quantile(last, share) for share in (0.25, 0.5, 0.75)))


def level_changes(values: Sequence[float]) -> list[LevelChange]:
    """Return where measurements changed their level; after a change only the measurements of the new level count.

    >>> quiet = [math.log(10 + 0.1 * (place % 3)) for place in range(20)]
    >>> [(change.at, change.side, change.is_confirmed) for change in level_changes([*quiet, *[math.log(12)] * 3])]
    [(20, 1, True)]
    >>> level_changes([*quiet, math.log(12), math.log(12), *quiet])  # two slow runs are no change
    []
    """
    changes: list[LevelChange] = []
    if not values or max(values) - min(values) <= SMALLEST_SPREAD * min(FACTORS.values()):
        return changes  # no limit is narrower
    start = 0
    for at in range(MIN_RUNS, len(values)):
        normal = baseline(values[max(start, at - WINDOW) : at])  # none just after a change
        side = normal.side(values[at]) if normal is not None else 0
        if normal is None or not side:
            continue
        ahead = [normal.side(value) == side for value in values[at : at + AHEAD]]
        if sum(ahead) >= NEEDED:
            start = _first_of_level(values, at, normal, side)
            changes.append(LevelChange(start, side, True, normal))
        elif len(ahead) < AHEAD and ahead[-1]:
            return [*changes, LevelChange(at, side, False, normal)]
    return changes


def _first_of_level(values: Sequence[float], at: int, normal: Baseline, side: Side) -> int:
    """Return where a level begins: not at an outlier just before it, which has fewer of the new level after it."""

    def hits(place: int) -> int:
        beyond = [normal.side(value) == side for value in values[place : place + AHEAD]]
        return sum(beyond) if beyond and beyond[0] else 0

    return max(range(at, at + AHEAD - NEEDED + 1), key=lambda place: (hits(place), -place))


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile by linear interpolation between the neighbours."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
