"""Line charts of the pages."""

from hypothesis import given
from hypothesis import strategies as st

from mezzo.report import Series, line_chart, nice_ticks


@given(st.lists(st.floats(-1e38, 1e38), min_size=1))
def test_ticks_are_few_and_span_the_values(values):
    ticks = nice_ticks(values)
    assert 2 <= len(ticks) <= 9
    slack = 1e-6 * (ticks[-1] - ticks[0])
    assert ticks[0] - slack <= min(values) <= max(values) <= ticks[-1] + slack


def test_chart_draws_a_single_point_and_leaves_out_empty_lines():
    svg = line_chart([Series("<one>", [(1, 2)], "amp0"), Series("none", [], "fp320")], title="a & b", x_label="step")
    assert svg.count("<circle") == 1
    assert "<polyline" not in svg
    assert "&lt;one&gt;" in svg
    assert 'aria-label="a &amp; b"' in svg
    assert "nan" not in line_chart([], title="", x_label="")
