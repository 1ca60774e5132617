"""The page of a comparison: what it says, that it is harmless, and how it looks in a real browser."""

import importlib.util
import re
import struct
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
from accuracy_nets import Cancel, Large, batch, network, run
from torch import nn

from html_page import Page
from mezzo.errors import MezzoError
from mezzo.proof import AccuracyComparison, AccuracyRun, compare_accuracy, record_run
from mezzo.report import Mark, Series, decades, line_chart, render_page, security_policy


def written(found: AccuracyComparison, folder: Path) -> str:
    found.write_html(folder / "page.html")
    return (folder / "page.html").read_text("utf-8")


def chart_of(found: AccuracyComparison, folder: Path) -> str:
    (svg,) = re.findall(r'<svg class="chart".*?</svg>', written(found, folder), re.DOTALL)
    return svg


@pytest.fixture
def overflowing() -> AccuracyComparison:
    model = network(cancel=Cancel(), large=Large(), act=nn.Tanh())
    return compare_accuracy(run(model), run(model, "O2"))


def test_the_first_divergence_stands_on_top(overflowing: AccuracyComparison, tmp_path: Path) -> None:
    page = Page(written(overflowing, tmp_path))
    told = page.texts["verdict"]
    assert "first output that diverges: cancel (Cancel, output, number 2)" in told
    assert "most harm: large (Large, output, number 3)" in told
    assert "verdict failed" in [values.get("class") for values in page.all("div")]
    firsts = [overflowing.first_divergence, overflowing.first_gradient_divergence]
    assert page.texts["rows"].count("first to diverge") == sum(row is not None for row in firsts)


def test_rows_come_by_harm_and_know_their_order(overflowing: AccuracyComparison, tmp_path: Path) -> None:
    page = Page(written(overflowing, tmp_path))
    rows = [values for values in page.all("tr") if "data-harm" in values]
    assert [int(values["data-harm"]) for values in rows] == list(range(len(overflowing.rows)))
    orders = {row: place for place, row in enumerate(overflowing.in_order())}
    assert [int(values["data-order"]) for values in rows] == [orders[row] for row in overflowing.rows]
    states = [values["class"] for values in page.all("th") if values.get("scope") == "row"]
    assert states == [row.state or "none" for row in overflowing.rows]


def test_a_sound_comparison_passes_and_equal_runs_have_no_chart(tmp_path: Path) -> None:
    model = network(act=nn.GELU())
    sound = Page(written(compare_accuracy(run(model), run(model, "O1")), tmp_path))
    assert "verdict passed" in [values.get("class") for values in sound.all("div")]
    assert sound.texts["verdict"].count("none; all differences are rounding") == 2
    same = Page(written(compare_accuracy(run(model), run(model)), tmp_path))
    assert "no difference" in same.texts["depth"]
    assert not [values for values in same.all("svg") if values.get("class") == "chart"]


def test_a_comparison_that_diverges_without_nan_is_late(tmp_path: Path) -> None:
    model = network(cancel=Cancel())
    found = compare_accuracy(run(model), run(model, "O2", loss_scale=1.0))
    assert "verdict late" in [values.get("class") for values in Page(written(found, tmp_path)).all("div")]


def test_the_chart_has_both_phases_the_limit_and_where_the_runs_part(
    overflowing: AccuracyComparison, tmp_path: Path
) -> None:
    firsts = [row for row in (overflowing.first_divergence, overflowing.first_gradient_divergence) if row]
    svg = chart_of(overflowing, tmp_path)
    assert all(f'<polyline class="{style}"' in svg for style in ("outputs", "limit"))
    assert svg.count('<line class="first"') == len(firsts)
    assert "first to diverge: output cancel" in svg
    assert re.search(r"<title>output encoder: 0\.000\d+</title>", svg)
    assert "nan" not in svg
    assert "inf" not in svg


def test_what_is_excused_is_not_drawn(tmp_path: Path) -> None:
    model = network(norm=nn.BatchNorm1d(16))
    found = compare_accuracy(run(model), run(model, "O2"))
    (bias,) = [row for row in found.rows if row.name == "encoder.bias"]
    assert bias.note
    svg = chart_of(found, tmp_path)
    assert "encoder.weight" in svg
    assert "encoder.bias" not in svg


HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "{{ 7 * 7 }}",
    '"onload="x',
    "\x1b[31ma\u202e",
]


def hostile_run(name: str = "") -> AccuracyRun:
    holder = nn.Module()
    for each in HOSTILE:
        holder._modules[each] = nn.Linear(16, 4)
    x, _ = batch()
    factor = 1.0 + 1e-3 * len(name)
    step = lambda: sum((layer(x) * factor).sum() for layer in holder.children()).backward()  # noqa: E731
    return record_run(holder, step, name=f"{HOSTILE[1]}{name}")


def test_foreign_names_are_text(tmp_path: Path) -> None:
    text = written(compare_accuracy(hostile_run(), hostile_run("b")), tmp_path)
    page = Page(text)
    assert not page.all("img")
    assert len(page.all("script")) == 1
    assert "{{ 7 * 7 }}" in page.texts["rows"]
    assert not any(name.startswith("on") for _, values in page.elements for name in values)
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_the_page_asks_for_nothing_and_lets_its_own_script_run_alone(
    overflowing: AccuracyComparison, tmp_path: Path
) -> None:
    text = written(overflowing, tmp_path)
    page = Page(text)
    (policy,) = [each["content"] for each in page.all("meta") if each.get("http-equiv") == "Content-Security-Policy"]
    script = text[text.index("<script>") + len("<script>") : text.index("</script>")]
    assert policy == security_policy(script)
    assert "script-src 'sha256-" in policy
    assert not re.search(r"(?:src|href)=|url\(|@import", text)


def test_missing_jinja2_is_one_line(
    overflowing: AccuracyComparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MezzoError, match=re.escape("needs jinja2: pip install 'mezzo[report]'")):
        overflowing.write_html(tmp_path / "page.html")


def test_a_name_that_nobody_gives_is_an_error() -> None:
    from jinja2 import UndefinedError

    with pytest.raises(UndefinedError, match="'title' is undefined"):
        render_page("mezzo.proof", "accuracy.html.jinja", {})


def test_a_page_without_a_script_lets_none_run() -> None:
    assert "script-src" not in security_policy("")
    assert "default-src 'none'" in security_policy("")


@pytest.mark.parametrize(
    ("values", "wanted"),
    [([0.5], [0.1, 1.0]), ([1.0], [1.0, 10.0]), ([1e-9, 1e3], [1e-9, 1e-7, 1e-5, 1e-3, 0.1, 10.0, 1000.0]), ([], [1.0, 10.0])],
)  # fmt: skip
def test_powers_of_ten_span_the_values(values: list[float], wanted: list[float]) -> None:
    assert decades(values) == wanted


def test_a_logarithmic_chart_puts_equal_ratios_at_equal_distances() -> None:
    series = Series("a", [(1, 0.001), (2, 0.01), (3, 0.1)], "outputs", names=["x", "y<", "z"])
    svg = line_chart(
        [series], title="t", x_label="depth", log_y=True, counts_x=True, marks=[Mark("<here>", 2, "first")]
    )
    heights = [float(each) for each in re.findall(r'cy="([\d.]+)"', svg)]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.11)  # written to a tenth
    assert "<title>y&lt;</title>" in svg
    assert "<title>&lt;here&gt;</title>" in svg
    labels = re.findall(r'text-anchor="middle">([^<]+)<', svg)
    assert labels == ["1", "2", "3"]


SHOWN = "Array.from(document.querySelectorAll('#rows tbody code')).map((each) => each.textContent)"


def test_the_switch_sorts_the_rows_both_ways(browser: Any, overflowing: AccuracyComparison, tmp_path: Path) -> None:
    written(overflowing, tmp_path)
    browser.open((tmp_path / "page.html").as_uri())
    assert browser.evaluate(SHOWN) == [row.name for row in overflowing.rows]
    browser.click("input[value=order]")
    assert browser.evaluate(SHOWN) == [row.name for row in overflowing.in_order()]
    browser.click("input[value=harm]")
    assert browser.evaluate(SHOWN) == [row.name for row in overflowing.rows]
    assert browser.requests() == [(tmp_path / "page.html").as_uri()]
    assert browser.complaints() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone_and_follows_the_scheme(
    scheme: str, browser: Any, overflowing: AccuracyComparison, tmp_path: Path
) -> None:
    written(overflowing, tmp_path)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.call("Emulation.setEmulatedMedia", features=features)
    browser.call("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=1, mobile=True)
    browser.open((tmp_path / "page.html").as_uri())
    assert browser.evaluate("document.documentElement.scrollWidth") <= 360
    ink, paper = (browser.evaluate(f"getComputedStyle(document.body).{each}") for each in ("color", "backgroundColor"))
    brightness = [sum(int(each) for each in re.findall(r"\d+", colour)[:3]) for colour in (ink, paper)]
    assert (brightness[0] < brightness[1]) is (scheme == "light")
    picture = b64decode(browser.call("Page.captureScreenshot", format="png")["data"])
    assert picture.startswith(b"\x89PNG")
    assert struct.unpack(">2I", picture[16:24]) == (360, 740)
