"""The page in a real browser: what it shows, what it asks for, and where its links lead."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from report_runs import HOSTILE, full_run, record, write_run

from mezzo.tipc import merge_reports, write_reports
from report_browser import NAMES, Browser, find_browser

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason=f"needs a browser: none of {', '.join(NAMES)} is installed")

FAILED = "#matrix a.badge.failed"


@pytest.fixture
def browser(tmp_path) -> Iterator[Browser]:
    assert PROGRAM is not None
    (tmp_path / "home").mkdir()
    with Browser(PROGRAM, tmp_path / "home") as browser:
        yield browser


@pytest.fixture
def page(tmp_path) -> Path:
    full_run(tmp_path / "runs" / "lite" / "lite_train_lite_infer")
    return merge_reports([tmp_path / "runs"], tmp_path / "all")[1]


def test_the_failed_cell_is_found_and_clicked_to_its_log(browser, page):
    browser.open(page.as_uri())
    assert browser.evaluate(f"document.querySelectorAll({FAILED!r}).length") == 1
    assert browser.evaluate(f"document.querySelector({FAILED!r}).textContent") == "✗ failed"
    browser.click(FAILED)
    browser.wait(lambda: browser.address() == f"{page.as_uri()}#run1-step7")
    assert "no half on this CPU" in browser.evaluate("document.querySelector(':target').innerText")
    browser.wait(
        lambda: browser.evaluate(
            "Math.abs(document.querySelector(':target').getBoundingClientRect().top) < innerHeight"
        )
    )
    browser.click(":target a.log")
    browser.wait(lambda: browser.address().endswith("/runs/lite/lite_train_lite_infer/infer-3.log"))
    assert "RuntimeError: <img src=x onerror=alert(1)>" in browser.evaluate("document.body.innerText")


def test_the_page_asks_for_nothing_and_the_console_is_silent(browser, page):
    browser.open(page.as_uri())
    browser.click(FAILED)
    browser.wait(lambda: "#" in browser.address())
    assert browser.requests() == [page.as_uri()]
    assert browser.complaints() == []
    assert browser.evaluate("performance.getEntriesByType('resource').length") == 0


def test_requests_and_complaints_of_another_page_are_seen(browser, tmp_path):
    path = tmp_path / "bad.html"
    path.write_text("<img src=http://127.0.0.1:9/x.png><script>console.error('a'); none.there;</script>")
    browser.open(path.as_uri())
    assert "http://127.0.0.1:9/x.png" in browser.requests()
    assert len(browser.complaints()) >= 2


def test_a_link_opens_a_step_that_is_closed(browser, page):
    browser.open(page.as_uri())
    assert not browser.evaluate("document.querySelector('#run1-step2').closest('details').open")
    browser.click("#durations a[href='#run1-step2']")
    browser.wait(lambda: browser.evaluate("document.querySelector('#run1-step2').closest('details').open"))


def test_hostile_records_and_logs_run_no_script(browser, tmp_path):
    attack = f"{HOSTILE}<img src=http://attack.invalid/x onerror=\"document.title='taken'\"><svg onload=alert(1)>"
    step = record("train-1", "failed", reason=attack, command=attack, labels={"trainer": attack}, model=attack)
    step = replace(step, cwd=str(tmp_path / "run"), log="a.log", notices=(attack,))
    write_run(tmp_path / "run", [step], {"a.log": attack}, model=attack.replace("\ud800", ""))
    page = write_reports(tmp_path / "run")[1]
    browser.open(page.as_uri())
    assert browser.evaluate("document.title").startswith("Failed: 1 step")
    assert browser.requests() == [page.as_uri()]
    assert browser.complaints() == []
    assert browser.evaluate("document.images.length") == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone_and_can_be_read_in_both_schemes(browser, page, scheme):
    browser.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.open(page.as_uri())
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    colours = browser.evaluate(
        "['body', '.badge.passed', '.badge.failed', '.badge.skipped', '.badge.timeout', '.why', 'a'].map((name) => {"
        "  const it = document.querySelector(name);"
        "  const none = 'rgba(0, 0, 0, 0)'; let behind = it;"
        "  while (getComputedStyle(behind).backgroundColor === none) behind = behind.parentElement;"
        "  return [name, getComputedStyle(it).color, getComputedStyle(behind).backgroundColor]; })"
    )
    ratios = {name: contrast(ink, paper) for name, ink, paper in colours}
    assert min(ratios.values()) >= 4.5, ratios  # what WCAG 2 asks of texts, level AA


def contrast(first: str, second: str) -> float:
    """Return the contrast of two colours as WCAG 2 defines it."""
    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in colour.partition("(")[2].rstrip(")").split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
