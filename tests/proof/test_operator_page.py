"""The page of a recording: its numbers are the recording's, foreign names are text, and it shows on a phone."""

import html
import importlib.util
import re
from pathlib import Path

import pytest
import torch
from recordings import ADD, COPY, GEMM, HOSTILE, gpu_stats, operator_page
from torch import nn

from html_page import Page, cells
from mezzo import amp
from mezzo.amp.debugging import KernelRow, Leak, OperatorStats, collect_operator_stats
from mezzo.errors import MezzoError, RunError
from mezzo.proof import write_operator_page
from mezzo.report import bytes_text, security_policy, time_text
from report_browser import Browser, fits_a_phone

MOST_ROWS = 40
NAME_WIDTH = 72


def parts(text: str) -> dict[str, float]:
    """Return the width in percent of each part of the bar of work."""
    return {v["title"]: float(v["style"][6:-1]) for v in Page(text).all("i") if "style" in v}


def state(text: str) -> str:
    (verdict,) = [v["class"] for v in Page(text).all("div") if v.get("id") == "verdict"]
    return verdict.removeprefix("verdict").strip()


def recorded(**options: bool) -> OperatorStats:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4))
    with collect_operator_stats(False, **options) as stats, amp.auto_cast(level="O1"):
        loss = model(torch.randn(2, 8)).float().square().mean()
        loss.backward()
    return stats


def test_the_verdict_has_products_tensor_cores_casts_and_leaks() -> None:
    told = Page(operator_page(gpu_stats(), title="my net")).texts["verdict"]
    assert "3 of 4 products (75%) ran in half." in told
    assert "Kernels took 1.00 ms, 60% on Tensor Cores." in told
    assert "2 casts of 32 elements, 10% of the time." in told
    assert "1 float32 leak" in told
    assert "4.0 KiB" in told


def test_the_bar_has_the_time_of_each_class() -> None:
    text = operator_page(gpu_stats())
    assert parts(text) == {
        "products on Tensor Cores": 60,
        "products on ordinary units": 15,
        "casts": 10,
        "the rest": 15,
    }
    assert "products on Tensor Cores 600 µs 60%" in Page(text).texts["work"]


def test_without_times_the_bar_counts_calls_and_they_add_up() -> None:
    stats = recorded()
    text = operator_page(stats)
    calls = sum(sum(calls) for calls in stats.totals().values())
    assert sum(parts(text).values()) == pytest.approx(100, abs=0.01)
    assert parts(text)["casts"] == pytest.approx(100 * sum(row.calls for row in stats.casts) / calls, abs=0.01)
    page = Page(text)
    assert "What was called" in page.texts["work"]
    assert "not timed" in page.texts["verdict"]
    assert "kernels=True" in page.texts["kernels"]


def test_a_recording_of_a_cpu_has_times_and_no_word_of_tensor_cores() -> None:
    text = operator_page(recorded(kernels=True, leaks=True))
    page = Page(text)
    labels = ["products in half", "products in float32", "casts", "the rest"]
    assert set(parts(text)) <= set(labels)  # a part without time has no width
    assert all(label in page.texts["work"] for label in labels)
    assert sum(parts(text).values()) == pytest.approx(100, abs=0.01)
    assert "on a CPU." in page.texts["verdict"]
    assert "Tensor Cores" not in page.texts["verdict"] + page.texts["work"] + page.texts["modules"]
    assert "layer_norm" in page.texts["leaks"]
    assert state(text) == "late"


def test_operators_casts_and_leaks_are_those_of_the_recording() -> None:
    stats = recorded(leaks=True)
    text = operator_page(stats)
    found = {row[0].removesuffix(" product"): tuple(map(int, row[1:5])) for row in cells(text, "operators")}
    assert found == stats.totals()
    casts = [[int(row[4].replace(",", "")), int(row[5].replace(",", ""))] for row in cells(text, "casts")]
    assert casts == [[row.calls, row.elements] for row in stats.casts]
    ((where, op, why, then, until, _, _),) = cells(text, "leaks")
    (leak,) = stats.leaks
    assert (where, op, why) == (leak.module + leak.line, leak.op, leak.reason)
    assert (then, until) == (", ".join(leak.followers), ", ".join(leak.fed))


def modules(text: str) -> list[str]:
    """Return the paths of the tree of modules, from the top."""
    (tree,) = re.findall(r'<section id="modules">.*?</section>', text, re.DOTALL)
    return re.findall(r'<span class="name" style="--depth:\d+"><code title="(.*?)">', tree)


def multiplied(*paths: str) -> OperatorStats:
    stats, x = OperatorStats(), torch.zeros(2, 2)
    for path in paths:
        stats.count(torch.ops.aten.mm.default, (x, x), {}, x, phase="forward", module=path)
    return stats


def test_modules_are_a_tree_in_natural_order_with_the_numbers_of_by_module() -> None:
    stats = gpu_stats()
    text = operator_page(stats)
    paths = ["", "body", "body.layers", "body.layers.2", "body.layers.10", "head"]
    assert modules(text) == paths
    page = Page(text)
    assert len(page.all("details")) == 3
    lines = [line for line in page.texts["modules"].splitlines() if line.endswith("%")]
    rows = {row.module: row for row in stats.by_module()}
    for line, path in zip(lines, paths, strict=True):
        row = rows[path]
        name = path.rpartition(".")[2] or "(whole model)"
        time = "1.00 ms" if row.time_us == 1000 else f"{row.time_us} µs"
        shares = f"{row.time_us / 1000:.0%}{row.tensor_core_us / row.time_us:.0%}"
        assert line == f"{name}{row.fp16}{row.bf16}{row.fp32}{row.other}{row.casts}{time}{shares}"
    assert lines[-1] == "head00302250 µs25%0%"


def test_a_large_tree_opens_its_first_level_alone() -> None:
    page = Page(operator_page(multiplied(*(f"blocks.{number}.inner" for number in range(40)))))
    assert ["open" in values for values in page.all("details")] == [True] + [False] * 41


def test_a_name_that_sorts_between_a_module_and_its_parts_does_not_tear_the_tree() -> None:
    assert modules(operator_page(multiplied("a.b", "a-b", "a b.c"))) == ["", "a", "a.b", "a b", "a b.c", "a-b"]


def test_kernels_are_summed_over_places_with_the_full_name_in_reach() -> None:
    text = operator_page(gpu_stats())
    rows = cells(text, "kernels")
    assert rows[0][2:4] == ["3", "600 µs"]
    assert [row[-1] for row in rows] == ["yes", "no", "no", "no", "no"]
    assert [row[3] for row in rows] == ["600 µs", "150 µs", "100 µs", "90.0 µs", "60.0 µs"]
    assert "outside the dispatcher" in rows[-1][1]
    assert {GEMM, ADD, COPY} <= {values.get("title") for values in Page(text).all("code")}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (ADD, "vectorized_elementwise_kernel<4, CUDAFunctor_add<float>, array<char*, 3…"),
        (COPY, "unrolled_elementwise_kernel<direct_copy_kernel_cuda, array<char*, 2ul>,…"),
        (GEMM, f"{GEMM[:36]}…{GEMM[-35:]}"),
        ("void (anonymous namespace)::softmax<float>(float*, int)", "softmax<float>"),
        ("addmm", "addmm"),
        ("", ""),
        ("(odd", "(odd"),
    ],
)
def test_kernel_names_lose_namespaces_and_parameters(name: str, wanted: str) -> None:
    stats = gpu_stats()
    stats.kernels = [KernelRow(name, "mm", "forward", "head", "linear", "float32", False, False, 1, 150)]
    assert html.unescape(cells(operator_page(stats), "kernels")[0][0]) == wanted
    assert len(wanted) <= NAME_WIDTH


def test_what_is_too_long_to_list_is_counted() -> None:
    stats = gpu_stats()
    stats.leaks = [Leak("add", f"m{n}", "", "gray", (), ("linear",), 1, 8) for n in range(MOST_ROWS + 5)]
    text = operator_page(stats)
    assert len(cells(text, "leaks")) == MOST_ROWS
    assert "5 more" in Page(text).texts["leaks"]


def test_an_empty_recording_says_so() -> None:
    page = Page(operator_page(OperatorStats()))
    assert "Nothing was recorded." in page.texts["verdict"]
    assert "Nothing was recorded." in page.texts["work"]


def test_products_in_float32_alone_are_told() -> None:
    x = torch.randn(2, 2)
    with collect_operator_stats(False) as stats:
        x @ x
    text = operator_page(stats)
    assert state(text) == "failed"
    assert "0 of 1 product (0%) ran in half" in text
    with collect_operator_stats(False) as stats:
        x + x
    text = operator_page(stats)
    assert state(text) == ""
    assert "No matrix product or convolution ran." in text


def test_hostile_names_are_text() -> None:
    layers = nn.Module()
    for name in HOSTILE:
        layers._modules[name] = nn.Linear(4, 4)
    layers.forward = lambda x: sum(layer(x) for layer in layers.children())  # type: ignore[method-assign]
    with collect_operator_stats(False, kernels=True, leaks=True) as stats, amp.auto_cast():
        layers(torch.randn(2, 4))
    text = operator_page(stats, title=HOSTILE[1])
    page = Page(text)
    assert not page.all("img")
    assert not page.all("script")
    assert "{{ 7 * 7 }}" in page.texts["modules"]
    assert not any(name.startswith("on") for _, values in page.elements for name in values)
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_the_page_is_written_whole_and_lets_no_script_run(tmp_path: Path) -> None:
    write_operator_page(gpu_stats(), tmp_path / "new" / "page.html")
    text = (tmp_path / "new" / "page.html").read_text("utf-8")
    (policy,) = [v["content"] for v in Page(text).all("meta") if v.get("http-equiv") == "Content-Security-Policy"]
    assert policy == security_policy("")
    assert not re.search(r"(?:src|href)=|url\(|@import", text)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["page.html"]


def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    with pytest.raises(RunError, match="cannot be written"):
        write_operator_page(gpu_stats(), tmp_path / "file" / "page.html")


def test_without_jinja2_the_page_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MezzoError, match=re.escape("needs jinja2: pip install 'mezzo[report]'")):
        write_operator_page(gpu_stats(), tmp_path / "page.html")


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [(0.0, "0.00 µs"), (9.996e-6, "10.0 µs"), (9.996e-4, "1.00 ms"), (0.9996, "1.00 s"), (12.3, "12.3 s"), (200, "3 min 20 s")],
)  # fmt: skip
def test_times_have_three_digits_and_no_exponent(seconds: float, wanted: str) -> None:
    assert time_text(seconds) == wanted


def test_bytes_are_told_in_the_unit_that_fits() -> None:
    assert [bytes_text(n) for n in (0, 1023, 1024, 5 * 2**30)] == ["0 B", "1023 B", "1.0 KiB", "5.0 GiB"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone_and_modules_fold_by_a_click(scheme: str, browser: Browser, tmp_path: Path) -> None:
    write_operator_page(gpu_stats(), tmp_path / "page.html", title="net " * 20)
    fits_a_phone(browser, (tmp_path / "page.html").as_uri(), scheme)
    shown = "document.querySelectorAll('.tree .line')[3].checkVisibility({contentVisibilityAuto: true})"
    assert browser.evaluate(shown) is True
    browser.click(".tree details details > summary .name")
    assert browser.evaluate(shown) is False
