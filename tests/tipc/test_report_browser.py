"""The page in a real browser: what it shows, what it asks for, and where its links lead."""

from dataclasses import replace
from pathlib import Path

import pytest
from report_runs import HOSTILE, full_run, info, labelled_run, record, write_run

from mezzo.tipc import RECORDS, Record, merge_reports, write_reports

FAILED = "#matrix a.badge.failed"


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


SHOWN = (
    "Array.from(document.querySelectorAll('details.step')).filter((each) => !each.hidden)"
    ".map((each) => each.querySelector('strong').textContent)"
)


@pytest.fixture
def two_nights(tmp_path) -> Path:
    """A page about two runs of one network, of which the later one mended an inference, and one of another network."""
    for number, name in ((1, "monday"), (2, "tuesday")):
        folder = full_run(tmp_path / "runs" / name / "lite")
        lines = [Record.parse(line) for line in (folder / RECORDS).read_text().splitlines()]
        if number == 2:
            lines = [replace(each, status="passed", seconds=3.0) if each.step == "infer-3" else each for each in lines]
        text = info(start=f"2024-01-0{number}T00:00:00+00:00", result=1).text()
        (folder / "run.json").write_text(text)
        (folder / RECORDS).write_text("".join(f"{each.line()}\n" for each in lines))
    other = replace(record("train-1", labels={"trainer": "amp_train"}), model="other")
    write_run(tmp_path / "runs" / "other", [other], model="other")
    return merge_reports([tmp_path / "runs"], tmp_path / "all")[1]


def test_the_keyboard_searches_and_clears(browser, two_nights):
    browser.open(two_nights.as_uri())
    assert len(browser.evaluate(SHOWN)) == 21
    browser.press("/", *"timeout")
    assert browser.evaluate(SHOWN) == ["export-2", "export-2"]
    assert browser.evaluate("document.getElementById('shown').textContent") == "2 of 21 steps shown"
    browser.press("Escape")
    assert len(browser.evaluate(SHOWN)) == 21
    assert browser.evaluate("document.activeElement.tagName") == "BODY"


def test_the_keyboard_shows_failures_and_goes_from_step_to_step(browser, two_nights):
    browser.open(two_nights.as_uri())
    browser.press("f")
    assert browser.evaluate(SHOWN) == ["infer-3", "export-2", "export-2"]  # a timeout is a failure too
    focused = "document.activeElement.closest('details.step').querySelector('strong').textContent"
    browser.press("j", "j")
    assert browser.evaluate(focused) == "export-2"
    browser.press("k")
    assert browser.evaluate(focused) == "infer-3"
    is_open = "document.activeElement.parentElement.open"
    assert browser.evaluate(is_open) is True
    browser.press("Enter")
    browser.wait(lambda: browser.evaluate(is_open) is False)
    browser.press("f")
    assert len(browser.evaluate(SHOWN)) == 21


def test_fields_filter_steps_and_the_matrix(browser, two_nights):
    browser.open(two_nights.as_uri())
    choose = (
        "const it = document.querySelector('[data-field={}]'); it.value = '{}';"
        "it.dispatchEvent(new Event('input', {{bubbles: true}}));"
    )
    browser.evaluate(f"{{ {choose.format('network', 'other')} }}")
    assert browser.evaluate(SHOWN) == ["train-1"]
    rows = "Array.from(document.querySelectorAll('#matrix tbody tr')).filter((each) => each.checkVisibility()).length"
    assert browser.evaluate(rows) == 1
    browser.evaluate(f"{{ {choose.format('network', 'lite')} }} {{ {choose.format('precision', 'fp16')} }}")
    assert browser.evaluate(SHOWN) == ["infer-3", "infer-3"]


def test_two_runs_are_compared(browser, two_nights):
    browser.open(two_nights.as_uri())
    chosen = [browser.evaluate(f"document.getElementById('diff-{name}').value") for name in ("before", "after")]
    assert chosen == ["1", "3"]  # the two newest runs of one network, the older one first
    rows = "Array.from(document.querySelectorAll('#diff-rows tr'), (row) => Array.from(row.cells, (cell) => cell.textContent))"
    ((step, before, after, seconds, later, change, *_),) = browser.evaluate(rows)
    assert step.startswith("infer-3")
    assert (before, after, seconds, later, change) == ("✗ failed", "✓ passed", "1.50 s", "3.00 s", "+100.0 %")
    assert browser.evaluate("document.getElementById('diff-sum').textContent") == "1 of 10 steps changed their verdict"
    browser.click("#diff-only")
    assert len(browser.evaluate(rows)) == 10
    browser.click("#diff-rows a.failed")
    browser.wait(lambda: browser.address().endswith("#run1-step7"))
    assert browser.complaints() == []


def test_the_page_without_script_shows_everything(browser, two_nights):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    browser.open(two_nights.as_uri())
    assert browser.evaluate("document.getElementById('filter').checkVisibility()") is False
    assert browser.evaluate("document.getElementById('diff').checkVisibility()") is False
    assert len(browser.evaluate(SHOWN)) == 21


def test_pictures_are_shown_beside_labels(browser, tmp_path):
    folder = full_run(tmp_path / "run")
    labelled_run(folder)
    page = write_reports(folder)[1]
    browser.open(page.as_uri())
    sizes = browser.evaluate(
        "Array.from(document.querySelectorAll('#pictures img'), (each) => [each.alt, each.naturalWidth])"
    )
    assert sizes == [["image of a.png", 8], ["label of a.png", 8], ["prediction of a.png", 8]]
    assert "50.0 % of the labelled pixels are equal" in browser.evaluate(
        "document.querySelector('#pictures').innerText"
    )
    assert browser.complaints() == []
    assert [each for each in browser.requests() if not each.startswith("data:")] == [page.as_uri()]


def contrast(first: str, second: str) -> float:
    """Return the contrast of two colours as WCAG 2 defines it."""
    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in colour.partition("(")[2].rstrip(")").split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
