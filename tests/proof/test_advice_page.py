"""The page of the doctor's report: both steps, each advice, the changes, and the recorded step behind them."""

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from recordings import HOSTILE, advice_page, gpu_report, measured
from torch import nn

from html_page import Page, cells
from mezzo.amp.debugging import OperatorStats
from mezzo.errors import MezzoError
from mezzo.proof import Advice, Changes, Report, advise, write_advice_page
from mezzo.report import security_policy
from report_browser import Browser, fits_a_phone


@pytest.fixture(scope="module")
def cpu_report() -> Report:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
    return advise(model, torch.randn(4, 30), torch.randint(4, (4,)), nn.functional.cross_entropy, device="cpu", steps=1)


def test_the_verdict_and_the_bars_have_the_measured_times() -> None:
    page = Page(advice_page(gpu_report()))
    assert "A step takes 4.00 ms in float32 and 2.00 ms in AMP: 2.00 times as fast." in page.texts["verdict"]
    assert "With the changes made it takes 1.60 ms: 1.25 times as fast as AMP" in page.texts["verdict"]
    widths = [values["style"] for values in page.all("i") if "style" in values]
    assert widths[:3] == ["width:100.000%", "width:50.000%", "width:40.000%"]
    assert all(text in page.texts["steps"] for text in ("4.00 ms", "2.00 ms", "1.60 ms"))


def table_of_steps(report: Report) -> dict[str, list[str]]:
    return {label: texts for label, *texts in cells(advice_page(report), "work")}


def test_where_the_time_goes_adds_up_to_the_step() -> None:
    page = Page(advice_page(gpu_report()))
    widths = [float(v["style"][6:-1]) for v in page.all("i") if v.get("title")]
    assert [sum(widths[first : first + 5]) for first in (0, 5, 10)] == pytest.approx([100] * 3, abs=0.01)
    assert [v["title"] for v in page.all("i") if v.get("title")][4::5] == ["no kernel runs"] * 3
    assert "no kernel runs 1.00 ms 50%" in page.texts["work"]
    assert "products on Tensor Cores 600 µs 30%" in page.texts["work"]


def test_the_table_of_steps_has_the_host_launches_and_losses() -> None:
    rows = table_of_steps(gpu_report())
    assert rows["host time to queue it"] == ["1.50 ms"] * 3
    assert rows["kernels launched"] == ["8"] * 3
    assert rows["products"] == ["750 µs, 75%"] * 3
    assert rows["on Tensor Cores"] == ["60% of the kernels"] * 3
    assert rows["no kernel runs"] == ["75% of the step", "50% of the step", "38% of the step"]
    assert rows["last loss"] == ["2.25"] * 3


def test_each_advice_is_a_card_with_its_gains_in_the_order_of_the_report() -> None:
    report = gpu_report()
    text = advice_page(report)
    found = re.findall(r'<li class="card">.*?</li>', text, re.DOTALL)
    cards = [re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", card)) for card in found]
    assert len(cards) == len(report.advices)
    for card, advice in zip(cards, report.advices, strict=True):
        assert all(part in card for part in (advice.kind, advice.where, advice.seen, advice.todo, advice.benefit))
    assert "2.00x predicted" in cards[0]
    assert "2.00 ms → 1.00 ms" in cards[0]
    assert "1.10x predicted, 1.25x measured" in cards[1]
    assert "2.00 ms → 1.60 ms" in cards[1]  # by what was measured
    assert "→" not in cards[2]


def test_the_changes_are_those_of_the_file(tmp_path: Path) -> None:
    report = gpu_report()
    report.changes.write(tmp_path / "changes.yml")
    written = (tmp_path / "changes.yml").read_text("utf-8")
    assert written in Page(advice_page(report)).texts["changes"]


def test_a_report_without_advice_and_changes_has_no_cards_and_no_file() -> None:
    text = advice_page(replace(gpu_report(), advices=(), changes=Changes(), changed=None))
    assert 'class="card"' not in text
    assert "channels_last" not in Page(text).texts["changes"]
    assert "With the changes" not in Page(text).texts["verdict"]


def test_a_slower_amp_is_marked() -> None:
    report = replace(gpu_report(), full=measured(1e-3))
    page = Page(advice_page(report))
    assert "verdict late" in [values.get("class") for values in page.all("div")]
    assert "0.50 times as fast" in page.texts["verdict"]


def test_a_step_that_was_not_recorded_says_so() -> None:
    report = replace(gpu_report(), changed=measured(1e-3, stats=OperatorStats()))
    assert "not recorded" in Page(advice_page(report)).texts["work"]


def test_a_report_of_a_cpu_has_no_idle_share_and_no_tensor_cores(cpu_report: Report) -> None:
    page = Page(advice_page(cpu_report))
    rows = table_of_steps(cpu_report)
    assert not {"no kernel runs", "on Tensor Cores", "kernels launched"} & rows.keys()
    assert "Tensor Cores" not in page.texts["work"]
    assert "no kernel runs" not in page.texts["work"]
    assert all(advice.seen in page.texts["advice"] for advice in cpu_report.advices)


def test_the_recorded_step_is_shown_by_the_parts_of_the_operator_page(cpu_report: Report) -> None:
    text = advice_page(cpu_report)
    found = {row[0].removesuffix(" product"): tuple(map(int, row[1:5])) for row in cells(text, "operators")}
    assert found == cpu_report.amp.stats.totals()
    assert "layer_norm" in Page(text).texts["leaks"]


def test_hostile_texts_are_text() -> None:
    for hostile in HOSTILE:
        report = gpu_report(hostile)
        advice = Advice(kind="leak", where=hostile, seen=hostile, todo=hostile)
        text = advice_page(replace(report, advices=(advice,)))
        page = Page(text)
        assert not page.all("img")
        assert not page.all("script")
        assert not any(name.startswith("on") for _, values in page.elements for name in values)
        assert "\x1b" not in text
        assert "\u202e" not in text


def test_the_report_is_one_file_that_lets_no_script_run(tmp_path: Path) -> None:
    write_advice_page(gpu_report(), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text("utf-8")
    (policy,) = [v["content"] for v in Page(text).all("meta") if v.get("http-equiv") == "Content-Security-Policy"]
    assert policy == security_policy("")
    assert not re.search(r"(?:src|href)=|url\(|@import", text)


def test_without_jinja2_the_report_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MezzoError, match=re.escape("needs jinja2: pip install 'mezzo[report]'")):
        write_advice_page(gpu_report(), tmp_path / "page.html")


def test_the_documentation_has_every_kind_of_advice() -> None:
    text = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text("utf-8")
    kinds = re.findall(r"^\| `([a-z0-9-]+)`", text.split("## What is advised")[1], re.MULTILINE)
    assert set(kinds) == set(get_args(get_type_hints(Advice)["kind"]))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_fits_a_phone_and_follows_the_scheme(scheme: str, browser: Browser, tmp_path: Path) -> None:
    write_advice_page(gpu_report("a.very." * 20), tmp_path / "page.html")
    fits_a_phone(browser, (tmp_path / "page.html").as_uri(), scheme)
