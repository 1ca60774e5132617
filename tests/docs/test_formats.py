"""Every number of docs/formats.md follows from the formats themselves: torch.finfo, their bits, the casts."""

import math
import re
from dataclasses import dataclass

import pytest
import torch
from doc_tables import Row, code_spans, read_table, table_names

PAGE = "formats.md"


@dataclass(frozen=True)
class Format:
    """A format built from its two numbers of bits, as IEEE 754 builds them."""

    exponent: int
    fraction: int
    dtype: torch.dtype | None
    has_inf: bool = True

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent - 1) - 1

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        return 2.0 ** (1 - self.bias - self.fraction)

    @property
    def largest(self) -> float:
        if self.has_inf:  # the top exponent is inf's and NaN's
            return (2 - 2.0**-self.fraction) * 2.0**self.bias
        return (2 - 2 * 2.0**-self.fraction) * 2.0 ** (self.bias + 1)  # of the top exponent one number alone is NaN

    def spacing_at(self, value: float) -> float:
        return 2.0 ** (max(math.floor(math.log2(value)), 1 - self.bias) - self.fraction)


FORMATS = {
    "float32": Format(8, 23, torch.float32),
    "TF32": Format(8, 10, None),
    "float16": Format(5, 10, torch.float16),
    "bfloat16": Format(8, 7, torch.bfloat16),
    "FP8 E4M3": Format(4, 3, torch.float8_e4m3fn, has_inf=False),
    "FP8 E5M2": Format(5, 2, torch.float8_e5m2),
}
OF_TORCH = [name for name, form in FORMATS.items() if form.dtype is not None]
# Printed with four digits, so a number of the page is off by up to half of the last of them.
FOUR_DIGITS = pytest.approx


def rows(table: str) -> dict[str, Row]:
    return {next(iter(row.values())): row for row in read_table(PAGE, table)}


def power(text: str) -> float:
    """Return 2^-14 as a number."""
    found = re.fullmatch(r"2\^(-?\d+)", text)
    assert found is not None, text
    return 2.0 ** int(found[1])


def test_all_tables_of_the_page_are_checked_here() -> None:
    assert table_names(PAGE) == ["layout", "range", "spacing", "values", "scale", "launches"]


@pytest.mark.parametrize("name", OF_TORCH)
def test_formats_built_from_their_bits_are_torch_s(name: str) -> None:
    form = FORMATS[name]
    assert form.dtype is not None
    info = torch.finfo(form.dtype)
    assert (info.max, info.smallest_normal, info.eps) == (form.largest, form.smallest_normal, form.spacing_at(1))
    assert info.bits == 1 + form.exponent + form.fraction
    integers = {8: torch.uint8, 16: torch.int16, 32: torch.int32}[info.bits]
    assert torch.ones((), dtype=integers).view(form.dtype).double().item() == form.smallest_subnormal


def test_layout_table() -> None:
    table = rows("layout")
    assert list(table) == list(FORMATS)
    for name, row in table.items():
        form = FORMATS[name]
        numbers = (int(row["bits"]), int(row["exponent bits"]), int(row["fraction bits"]))
        assert numbers == (1 + form.exponent + form.fraction, form.exponent, form.fraction)
        named = code_spans(row["torch dtype"])
        assert named == ([] if form.dtype is None else [str(form.dtype).removeprefix("torch.")])
        stored = torch.float32 if form.dtype is None else form.dtype  # TF32 is computed with, not stored
        assert int(row["bytes in memory"]) == stored.itemsize


def test_range_table() -> None:
    table = rows("range")
    assert list(table) == list(FORMATS)
    for name, row in table.items():
        form = FORMATS[name]
        assert float(row["largest"]) == FOUR_DIGITS(form.largest, rel=5e-4)
        for column, exact in (
            ("smallest normal", form.smallest_normal),
            ("smallest subnormal", form.smallest_subnormal),
        ):
            found = re.fullmatch(r"(2\^-\d+) \((.+)\)", row[column])
            assert found is not None, row[column]
            assert power(found[1]) == exact
            assert float(found[2]) == FOUR_DIGITS(exact, rel=5e-4)


@pytest.mark.parametrize("name", ["float32", "TF32", "float16", "bfloat16"])
def test_spacing_table(name: str) -> None:
    for value, row in rows("spacing").items():
        assert float(row[name]) == FOUR_DIGITS(FORMATS[name].spacing_at(float(value)), rel=5e-4)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_spacing_is_the_distance_of_two_neighbours(name: str) -> None:
    form = FORMATS[name]
    assert form.dtype is not None
    for value in (float(cell) for cell in rows("spacing")):
        here = torch.tensor(value).to(form.dtype)
        after = (here.view(torch.int16) + 1).view(form.dtype)
        assert (after.double() - here.double()).item() == form.spacing_at(value)


def test_updates_of_half_a_spacing_are_lost_and_larger_ones_are_not() -> None:
    for dtype, lost in ((torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)):
        one = torch.ones((), dtype=dtype).double()
        assert (one + lost).to(dtype).item() == 1
        assert (one + lost * 1.01).to(dtype).item() > 1


@pytest.mark.parametrize(("dtype", "whole"), [(torch.float16, 2048), (torch.bfloat16, 256)])
def test_sums_stall_where_the_page_says(dtype: torch.dtype, whole: int) -> None:
    exact = torch.arange(whole + 1).to(dtype).double()
    assert torch.equal(exact, torch.arange(whole + 1).double())
    assert (torch.tensor(whole).to(dtype) + torch.tensor(1).to(dtype)).item() == whole


def test_values_table() -> None:
    for value, row in rows("values").items():
        for column, dtype in (("in float16", torch.float16), ("in bfloat16", torch.bfloat16)):
            cast = torch.tensor(float(value), dtype=torch.float64).to(dtype).double().item()
            is_whole = math.isinf(cast) or cast == round(cast)  # shown with all digits, others with four
            assert float(row[column]) == pytest.approx(cast, rel=0 if is_whole else 5e-4), (value, column)


def test_e4m3_has_no_infinity_and_e5m2_has_two() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    assert not every.view(torch.float8_e4m3fn).float().isinf().any()
    assert every.view(torch.float8_e5m2).float().isinf().sum() == 2


def test_scale_table() -> None:
    half = torch.float16
    for text, row in rows("scale").items():
        scale = 1.0 if text == "1" else power(text)
        full, zero, over = power(row["full precision from"]), power(row["zero up to"]), float(row["overflow from"])

        def survives(true: float, scale: float = scale) -> float:
            return torch.tensor(true * scale, dtype=torch.float64).to(half).double().item() / scale

        assert full * scale == torch.finfo(half).smallest_normal
        assert survives(zero) == 0
        assert survives(zero * 1.01) > 0
        assert math.isinf(survives(over * 1.001))  # `over` is shown with four or five digits
        assert math.isfinite(survives(over * 0.999))


def test_launches_table_adds_up() -> None:
    half, full = torch.float16.itemsize, torch.float32.itemsize
    table = rows("launches")
    check = half
    update = {"SGD": half + 2 * full + half}  # gradient, master read and written, half copy
    update["AdamW"] = update["SGD"] + 2 * 2 * full  # two moments, read and written
    for name, bytes_ in update.items():
        column = f"bytes per parameter, {name}"
        assert int(table["check"][column]) == check
        assert int(table["update"][column]) == bytes_
        assert int(table["together"][column]) == check + bytes_ + int(table["rescale"][column])
