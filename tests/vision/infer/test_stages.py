"""Times of the stages, on a clock that the test moves."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.errors import MezzoError
from mezzo.vision.infer import Percentiles, StageTimer, percentiles

RTOL = 1e-9  # sums and differences of float64 seconds

stage_s = st.floats(0, 1e3, allow_nan=False).map(lambda value: round(value, 6))
cycles = st.lists(st.tuples(stage_s, stage_s, stage_s, st.integers(1, 64)), min_size=1, max_size=30)


class FakeClock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s

    def pass_time(self, seconds):
        self.now_s += seconds


def timed(durations, warmup=0):
    """Return a timer after cycles of (pre-processing s, inference s, post-processing s, samples)."""
    clock = FakeClock()
    timer = StageTimer(warmup=warmup, clock=clock)
    for pre_s, infer_s, post_s, samples in durations:
        clock.pass_time(5.0)  # between two cycles: nobody's
        with timer.cycle(samples):
            clock.pass_time(pre_s)
            timer.stamp()
            clock.pass_time(infer_s)
            timer.stamp()
            clock.pass_time(post_s)
    return timer


def run_cycle(timer, stamps):
    with timer.cycle():
        for _ in range(stamps):
            timer.stamp()


def test_each_stage_has_its_mean_and_the_total_is_a_sum():
    times = timed([(0.5, 2.0, 0.25, 4), (1.5, 4.0, 0.75, 4)]).times()
    assert (times.preprocess_ms, times.inference_ms, times.postprocess_ms) == (1000.0, 3000.0, 500.0)
    assert (times.cycles, times.warmup, times.total_s) == (2, 0, 9.0)
    assert times.samples_per_s == 8 / 9
    assert times.inference == Percentiles(p50_ms=3000.0, p95_ms=3900.0, p99_ms=3980.0)
    assert times.cycle.p50_ms == 4500.0


def test_warmup_counts_as_cycles_and_in_nothing_else():
    slow, fast = (100.0, 100.0, 100.0, 64), (1.0, 2.0, 3.0, 1)
    with_warmup, without = timed([slow, slow, fast], warmup=2).times(), timed([fast]).times()
    assert (with_warmup.cycles, with_warmup.warmup) == (3, 2)
    assert with_warmup.total_s == without.total_s
    assert with_warmup.inference == without.inference
    assert with_warmup.samples_per_s == without.samples_per_s


@given(cycles, st.integers(0, 40))
def test_statistics_are_those_of_numpy(durations, warmup):
    timer = timed(durations, warmup)
    if len(durations) <= warmup:
        with pytest.raises(MezzoError):
            timer.times()
        return
    times = timer.times()
    table = np.array(durations[warmup:])
    whole_s = table[:, :3].sum(axis=1)
    means_ms = (times.preprocess_ms, times.inference_ms, times.postprocess_ms)
    np.testing.assert_allclose(means_ms, table[:, :3].mean(axis=0) * 1e3, rtol=RTOL, atol=1e-6)
    np.testing.assert_allclose(times.total_s, whole_s.sum(), rtol=RTOL, atol=1e-9)
    assert_percentiles(times.inference, table[:, 1] * 1e3)
    assert_percentiles(times.cycle, whole_s * 1e3)
    if times.total_s > 1e-3:  # below that, the clock's own rounding is in the quotient
        assert times.samples_per_s == pytest.approx(table[:, 3].sum() / whole_s.sum(), rel=1e-6)


def assert_percentiles(found, values):
    expected = np.percentile(values, [50, 95, 99])
    np.testing.assert_allclose((found.p50_ms, found.p95_ms, found.p99_ms), expected, rtol=RTOL, atol=1e-6)


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=300))
def test_percentiles_are_those_of_numpy_and_within_the_values(values):
    found = percentiles(values)
    assert_percentiles(found, values)
    assert min(values) <= found.p50_ms <= found.p95_ms <= found.p99_ms <= max(values)


def test_throughput_is_none_if_the_clock_stood_still():
    assert timed([(0.0, 0.0, 0.0, 8)]).times().samples_per_s is None


def test_a_cycle_that_raises_is_not_counted_and_the_next_one_is():
    timer = timed([(1.0, 1.0, 1.0, 1)])
    with suppress(KeyError), timer.cycle():
        timer.stamp()
        raise KeyError
    run_cycle(timer, stamps=2)
    assert timer.times().cycles == 2


def test_real_clock_moves():
    timer = StageTimer()
    with timer.cycle():
        timer.stamp()
        sum(range(1000))
        timer.stamp()
    assert 0 < timer.times().inference_ms <= timer.times().total_s * 1e3


@pytest.mark.parametrize(
    ("cycles", "warmup", "message"),
    [
        (0, 0, "0 batch(es) timed, none left after warmup=0; time at least 1"),
        (0, 3, "0 batch(es) timed, none left after warmup=3; time at least 4"),
        (1, 1, "1 batch(es) timed, none left after warmup=1; time at least 2, or set warmup to 0 or less"),
        (4, 9, "4 batch(es) timed, none left after warmup=9; time at least 10, or set warmup to 3 or less"),
    ],
)
def test_no_cycle_after_the_warmup_is_an_error_that_says_what_to_do(cycles, warmup, message):
    with pytest.raises(MezzoError) as caught:
        timed([(1.0, 1.0, 1.0, 1)] * cycles, warmup).times()
    assert str(caught.value) == message


@pytest.mark.parametrize("stamps", [0, 1, 3])
def test_cycle_needs_two_stamps(stamps):
    timer = StageTimer()
    message = rf"^a cycle had {stamps} stamps; it needs 2: after pre-processing, and after inference$"
    with pytest.raises(ValueError, match=message):
        run_cycle(timer, stamps)
    with pytest.raises(MezzoError, match=r"^0 batch"):
        timer.times()


def test_stamp_needs_a_cycle():
    with pytest.raises(ValueError, match=r"^stamp\(\) outside of a cycle; call it in `with timer.cycle\(\):`$"):
        timed([(1.0, 1.0, 1.0, 1)]).stamp()


def test_cycles_do_not_nest():
    timer = StageTimer()
    with timer.cycle():
        timer.stamp()
        with pytest.raises(ValueError, match=r"^a cycle is running already; end it before the next$"):
            run_cycle(timer, stamps=2)
        timer.stamp()
    assert timer.times().cycles == 1


def test_cycle_needs_a_sample():
    with pytest.raises(ValueError, match=r"^samples=0: a cycle needs at least 1$"), StageTimer().cycle(0):
        pass


def test_warmup_must_not_be_negative():
    with pytest.raises(ValueError, match=r"^warmup=-1: must be 0 or more$"):
        StageTimer(warmup=-1)
