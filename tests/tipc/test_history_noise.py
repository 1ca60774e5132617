"""The rule that tells a change from noise: how often it is wrong, and what it finds."""

import math

import numpy as np
import pytest

from mezzo.tipc.history._noise import FACTORS, MIN_RUNS, WINDOW, baseline, level_changes


def changes(values):
    return [(each.at, each.side) for each in level_changes(list(values)) if each.is_confirmed]


def test_false_alarms_are_as_rare_as_promised():
    noise = 0.03 * np.random.default_rng(0).standard_normal((1000, 100))
    alarms = sum(len(changes(row)) for row in noise)
    # 2 in 100,000 per side: 3.6 are expected in 90,000 judged measurements; more than 10 have a chance of 0.2 %
    assert alarms <= 10


@pytest.mark.parametrize(("before", "size", "share"), [(40, 0.2, 0.97), (15, 0.3, 0.9), (10, 0.5, 0.75)])
def test_real_changes_are_found_at_once_or_a_few_runs_later(before, size, share):
    noise = 0.03 * np.random.default_rng(1).standard_normal((300, before + 5))
    noise[:, before:] += math.log1p(size)
    found = sum(any(before - 2 <= at < before + 3 and side == 1 for at, side in changes(row)) for row in noise)
    assert found / len(noise) >= share


def test_a_fixed_limit_of_5_per_cent_would_cry_wolf():
    """The reason for the rule: the noise of a busy machine is larger than the changes that a fixed limit looks for."""
    noise = 0.03 * np.random.default_rng(2).standard_normal((100, 100))
    fixed = (np.diff(noise) > math.log(1.05)).mean()
    assert fixed > 0.1
    assert sum(len(changes(row)) for row in noise) <= 3


def test_quartiles_are_those_of_numpy():
    values = np.random.default_rng(3).standard_normal(60)
    for count in (MIN_RUNS, 13, 27, WINDOW):
        found = baseline(list(values[:count]))
        assert found is not None
        assert (found.lower, found.median, found.upper) == pytest.approx(np.quantile(values[:count], (0.25, 0.5, 0.75)))
    assert baseline(list(values[: MIN_RUNS - 1])) is None
    last = baseline(list(values))
    assert last is not None
    assert (last.runs, last.median) == (WINDOW, pytest.approx(np.median(values[-WINDOW:])))


def test_the_factors_give_the_promised_rate():
    """Exact for given quartiles: the first measurement is beyond the limit, and two of the next four are."""
    rng = np.random.default_rng(4)
    tail = np.vectorize(lambda x: 0.5 * math.erfc(x / math.sqrt(2)))
    for count in (12, 20, 40):
        drawn = rng.standard_normal((100_000, count))
        lower, median, upper = np.quantile(drawn, (0.25, 0.5, 0.75), axis=1)
        beyond = tail(median + FACTORS[count] * np.maximum(upper - lower, 2 * (upper - median)) / 1.349)
        rate = (beyond * (1 - (1 - beyond) ** 4 - 4 * beyond * (1 - beyond) ** 3)).mean()
        # One standard error of the mean is 14 % with 12 measurements, and less with more: three of them.
        assert rate == pytest.approx(2e-5, rel=0.42)


def test_an_outlier_just_before_a_change_does_not_move_its_beginning():
    quiet = [0.01 * (place % 5) for place in range(20)]
    assert changes([*quiet, 0.5, 0.02, *[0.5] * 6]) == [(22, 1)]


def test_after_a_change_the_new_level_is_normal():
    low, high = [0.01 * (place % 5) for place in range(20)], [0.3 + 0.01 * (place % 5) for place in range(20)]
    assert changes([*low, *high]) == [(20, 1)]
    assert changes([*low, *high, *low]) == [(20, 1), (40, -1)]


def test_equal_measurements_have_a_smallest_spread():
    assert changes([*[1.0] * 20, *[1.0 + 0.5 * FACTORS[20] * 0.005] * 5]) == []
    assert changes([*[1.0] * 20, *[1.0 + 1.1 * FACTORS[20] * 0.005] * 5]) == [(20, 1)]


def test_the_end_is_only_suspected():
    quiet = [0.01 * (place % 5) for place in range(20)]
    (one,) = level_changes([*quiet, 0.5])
    assert (one.at, one.is_confirmed) == (20, False)
    (two,) = level_changes([*quiet, 0.5, 0.5])
    assert (two.at, two.is_confirmed) == (20, False)
    (three,) = level_changes([*quiet, 0.5, 0.5, 0.5])
    assert (three.at, three.is_confirmed) == (20, True)
