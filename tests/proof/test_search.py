"""The search knows nothing of models: it is tested on sets alone."""

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.proof import minimal_set

NAMES = [f"m{i}" for i in range(50)]


class Planted:
    """Passes if all planted names are kept; counts how often it is asked."""

    def __init__(self, planted):
        self.planted, self.asked = frozenset(planted), []

    def __call__(self, kept):
        self.asked.append(kept)
        return self.planted <= kept


def bound(size, count):
    """Evaluations for `count` of `size`: none and all, a binary search and a check each, one left out each."""
    return 2 + count * (math.ceil(math.log2(size)) + 2)


@given(st.sets(st.sampled_from(NAMES), min_size=1, max_size=3))
def test_planted_set_of_up_to_three_of_fifty_is_found_exactly_in_fewer_than_60_evaluations(planted):
    passes = Planted(planted)
    result = minimal_set(passes, NAMES)
    assert set(result.kept) == planted
    assert (result.outcome, result.is_minimal) == ("found", True)
    assert result.evaluations == len(passes.asked) <= bound(50, len(planted)) < 60
    assert len(set(passes.asked)) == len(passes.asked), "nothing is asked twice"


@given(st.integers(1, 30), st.data())
def test_any_planted_set_is_found_whatever_its_size(size, data):
    names = NAMES[:size]
    planted = data.draw(st.sets(st.sampled_from(names)))
    result = minimal_set(Planted(planted), names, max_evaluations=500)
    assert set(result.kept) == planted
    assert result.is_minimal
    assert result.outcome == ("found" if planted else "nothing needed")
    assert list(result.kept) == [name for name in names if name in planted], "in the order of the candidates"


@given(st.lists(st.sets(st.sampled_from(NAMES[:8]), min_size=1), min_size=1, max_size=4))
def test_of_several_sets_that_would_do_one_is_found(sets):
    result = minimal_set(lambda kept: any(one <= kept for one in sets), NAMES[:8], max_evaluations=500)
    assert set(result.kept) in sets
    assert not any(other < set(result.kept) for other in sets)


@given(st.sets(st.sets(st.sampled_from(NAMES[:6])).map(frozenset), max_size=40), st.integers(2, 200))
def test_a_predicate_without_any_rule_still_ends_with_a_set_that_passes(passing, limit):
    """Any sets may pass, so keeping more may hurt; all kept passes, none does not."""
    passing = (passing | {frozenset(NAMES[:6])}) - {frozenset()}
    asked = []

    def passes(kept):
        asked.append(kept)
        return kept in passing

    result = minimal_set(passes, NAMES[:6], max_evaluations=limit)
    assert frozenset(result.kept) in passing
    assert result.evaluations == len(asked) <= limit
    one_less = [frozenset(part) in passing for part in combinations(result.kept, len(result.kept) - 1)]
    assert result.is_minimal == (not any(one_less) and all(frozenset(p) in asked for p in _one_less(result.kept)))
    if limit >= 2**6:  # every set could be asked
        assert result.is_minimal
        assert result.outcome == "found"


def _one_less(kept):
    return combinations(kept, len(kept) - 1)


def test_where_keeping_more_hurts_delta_debugging_goes_on():
    """The beginning abc fails and abcd passes, so d seems to be needed; yet a alone passes."""
    passing = {frozenset("a"), frozenset("ad"), frozenset("abcd")}
    result = minimal_set(lambda kept: kept in passing, list("abcd"))
    assert result.kept == ("a",)
    assert result.is_minimal


def test_the_candidate_that_stands_first_is_preferred():
    assert minimal_set(lambda kept: bool(kept & {"m3", "m9"}), NAMES).kept == ("m3",)


def test_nothing_is_needed_where_nothing_fails():
    result = minimal_set(lambda kept: True, NAMES)
    assert (result.outcome, result.kept, result.is_minimal, result.evaluations) == ("nothing needed", (), True, 1)


@pytest.mark.parametrize("names", [NAMES, []])
def test_precision_is_not_the_cause_where_all_in_float32_fails(names):
    result = minimal_set(lambda kept: False, names)
    assert (result.outcome, result.kept, result.is_minimal) == ("not the cause", (), False)
    assert result.evaluations == min(2, len(names) + 1)


@given(st.integers(2, 40))
def test_out_of_evaluations_the_best_set_that_passed_is_returned(limit):
    planted = {"m4", "m20", "m30", "m44"}
    result = minimal_set(Planted(planted), NAMES, max_evaluations=limit)
    assert planted <= set(result.kept)
    assert result.evaluations <= limit
    assert result.is_minimal == (result.outcome == "found")
    assert result.is_minimal or result.evaluations == limit
    assert limit < bound(50, 4) or result.is_minimal


def test_progress_hears_of_every_evaluation_and_of_the_limit():
    heard = []
    result = minimal_set(Planted({"m7"}), NAMES, 33, lambda done, total: heard.append((done, total)))
    assert heard == [(number, 33) for number in range(1, result.evaluations + 1)]


def test_what_is_known_is_not_asked():
    passes = Planted({"m7"})
    result = minimal_set(passes, NAMES, known={frozenset(): False, frozenset(NAMES): True})
    assert result.kept == ("m7",)
    assert frozenset() not in passes.asked
    assert frozenset(NAMES) not in passes.asked


def test_an_error_of_the_run_comes_through():
    def passes(kept):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        minimal_set(passes, NAMES)


def test_one_evaluation_is_too_few():
    with pytest.raises(ValueError, match="max_evaluations=1: must be at least 2"):
        minimal_set(lambda kept: True, NAMES, max_evaluations=1)


def test_a_candidate_stands_there_once():
    with pytest.raises(ValueError, match="candidates: 'b'"):
        minimal_set(lambda kept: True, ["a", "b", "b"])
