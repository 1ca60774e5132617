"""Numbers of the pages on when, hardware and shapes: by formula, from the code, or from the measurements they cite."""

import re

import pytest
import torch
from doc_pages import DOCS, ROOT
from doc_tables import Row, code_spans, read_page, read_table

from mezzo.amp import hardware
from mezzo.fp8 import LEAST_CAPABILITY

CITED = re.compile(r"\((\.\./benchmarks/[\w.]+\.md)\)")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def cited(text: str) -> str:
    """Return the file that a piece of a page links to."""
    found = CITED.search(text)
    assert found is not None, text
    return (DOCS / found[1]).read_text(encoding="utf-8")


def figures(cell: str) -> list[str]:
    return NUMBER.findall(cell)


def is_in(figure: str, text: str) -> bool:
    """Whether a number stands in a text, and not as a part of a longer one."""
    return re.search(rf"(?<![\d.,]){re.escape(figure)}(?!\d|[.,]\d)", text) is not None


@pytest.mark.parametrize("row", read_table("when.md", "amdahl"), ids=lambda row: row["share of products"])
def test_speed_ups_follow_from_amdahl_s_law(row: Row) -> None:
    share, *cells = row.items()
    p = float(share[1])
    for head, cell in cells:
        found = re.fullmatch(r"s = (\d+)(?:, casts ([\d.]+))?", head)
        assert found is not None, head
        step = (1 - p) + p / int(found[1]) + float(found[2] or 0)
        assert cell == f"{1 / step:.2f}", head


@pytest.mark.parametrize("row", read_table("when.md", "measured"), ids=lambda row: row["what"])
def test_measured_times_stand_in_the_files_they_cite(row: Row) -> None:
    text = cited(row["in"])
    (before,), (after,) = figures(row["float32"]), figures(row["AMP"])
    assert is_in(before, text)
    assert is_in(after, text)
    # both times were rounded, so their quotient may differ by one in the last digit shown
    assert float(row["times as fast"]) == pytest.approx(float(before) / float(after), abs=0.011)


@pytest.mark.parametrize("row", read_table("when.md", "held"), ids=lambda row: row["what"])
def test_measured_memory_stands_in_the_files_it_cites(row: Row) -> None:
    text = cited(row["in"])
    for cell in (row["float32"], row["AMP"]):
        (number,) = figures(cell)
        assert is_in(number, text)


def test_bytes_of_a_parameter_add_up_and_shrink_with_compact_masters_alone() -> None:
    half, full = torch.float16.itemsize, torch.float32.itemsize
    table = {row[""]: row for row in read_table("when.md", "memory")}
    for name, state in (("SGD", 0), ("AdamW", 2 * full)):
        plain, mixed = table[f"float32, {name}"], table[f"O2, {name}"]
        assert [int(plain[key]) for key in ("weight", "master", "gradient", "state")] == [full, 0, full, state]
        assert [int(mixed[key]) for key in ("weight", "master", "gradient", "state")] == [half, full, half, state]
        compact = table[f"O2, {name}, compact masters"]
        assert [int(compact[key]) for key in ("weight", "master", "gradient", "state")] == [half, half, half, state]
        for row in (plain, mixed, compact):
            assert int(row["together"]) == sum(int(row[key]) for key in ("weight", "master", "gradient", "state"))


def test_figures_in_the_prose_stand_in_the_files_they_cite() -> None:
    for page, number, file in (
        ("when.md", "0.66 to 0.82", "benchmarks/tipc_202611.md"),
        ("shapes.md", "39.44 ms", "benchmarks/static_h200_202611.md"),
        ("shapes.md", "38.62 ms", "benchmarks/static_h200_202611.md"),
        ("shapes.md", "31,870 and 31,790", "docs/design.md"),
        ("shapes.md", "31,800", "docs/design.md"),
        ("troubleshooting.md", "16.61 ms", "benchmarks/step_h200_202611.md"),
        ("troubleshooting.md", "19.01 ms", "benchmarks/step_h200_202611.md"),
    ):
        assert number in " ".join(read_page(page).split()), (page, number)
        assert number in (ROOT / file).read_text(encoding="utf-8"), (file, number)
    assert "(328 to 109 us)" in read_page("shapes.md")
    assert "328 and 109" in cited("(../benchmarks/static_h200_202611.md)")
    assert "5.6 times" in read_page("formats.md")
    assert "| stock TF32 | 25.20 ms | 0.42 | 1.00 | - | 5.60 |" in cited("(../benchmarks/step_h200_202611.md)")


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def test_thresholds_of_the_hardware_page_are_the_code_s() -> None:
    computes, pays, triton = read_table("hardware.md", "thresholds")
    for name, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        assert version(computes[name]) == hardware.COMPUTE_SINCE[dtype]
        assert version(pays[name]) == hardware.AMP_SINCE[dtype]
        assert version(triton[name]) == (7, 0)  # mezzo._torch.step_tier


def test_chips_of_the_hardware_page_have_what_the_code_says() -> None:
    lines = re.findall(r"^\| (\d+\.\d) \| .*$", read_page("hardware.md"), flags=re.MULTILINE)
    rows = re.findall(
        r"^\| (\d+\.\d) \| .+? \| \d{4} \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", read_page("hardware.md"), re.M
    )
    assert len(rows) == len(lines) >= 10
    for capability, float16, bfloat16, tf32, fp8 in rows:
        has = version(capability)
        assert ("Tensor Cores" in float16) == (has >= hardware.TENSOR_CORES_SINCE), capability
        assert (bfloat16 != "-") == (has >= hardware.COMPUTE_SINCE[torch.bfloat16]), capability
        assert (tf32 != "-") == (has >= hardware.TF32_SINCE), capability
        assert (fp8 != "-") == (has >= LEAST_CAPABILITY), capability
        assert has >= hardware.COMPUTE_SINCE[torch.float16]


def test_flags_of_the_hardware_page_are_those_that_mezzo_looks_for() -> None:
    flags = [flag for row in read_table("hardware.md", "cpus") for flag in code_spans(row["flag"])]
    assert sorted(flags) == sorted(hardware.CPU_HALF_INSTRUCTIONS)
    assert hardware.CPU_HALF_SLOWDOWN == 2.0  # "less than twice as long"


def test_times_of_half_on_a_cpu_stand_in_the_file_cited() -> None:
    text = cited("(../benchmarks/cpu_half_x86_202611.md)")
    for row in read_table("hardware.md", "cpu half"):
        for cell in list(row.values())[1:]:
            (number,) = figures(cell)
            assert is_in(number, text)
