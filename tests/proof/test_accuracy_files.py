"""Runs and tables as files: whole, harmless, and refused where they are not ours."""

import csv
import importlib.machinery
import importlib.util
import io
import math
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from accuracy_nets import Large, batch, network, run
from torch import nn

from mezzo.errors import MezzoError, RunError
from mezzo.proof import AccuracyComparison, AccuracyRun, compare_accuracy, load_run, record_run

COLOURS = {"red": "FF9B94", "orange": "FFC27A", "yellow": "FFF3B0"}


@pytest.fixture
def model() -> nn.Module:
    return network(act=nn.ReLU(), large=Large())


@pytest.fixture
def found(model: nn.Module) -> AccuracyComparison:
    return compare_accuracy(run(model), run(model, "O2"))


def csv_lines(found: AccuracyComparison, folder: Path) -> list[list[str]]:
    found.write_csv(folder / "rows.csv")
    return list(csv.reader(io.StringIO((folder / "rows.csv").read_text())))


def payload_of(path: Path) -> dict[str, Any]:
    payload: dict[str, Any] = torch.load(path, weights_only=True)
    return payload


def test_a_run_comes_back_as_it_was(model: nn.Module, tmp_path: Path) -> None:
    first, second = run(model), run(model, "O2", name="half")
    first.save(tmp_path / "a.run")
    second.save(tmp_path / "b.run")
    loaded = load_run(tmp_path / "b.run")
    assert (loaded.name, loaded.loss_scale, loaded.modules) == ("half", 2.0**15, second.modules)
    assert str(loaded.loss) == str(second.loss) == "nan"
    assert str(compare_accuracy(tmp_path / "a.run", str(tmp_path / "b.run"))) == str(compare_accuracy(first, second))
    assert compare_accuracy(second, loaded).rows[0].harm == 0.0


def test_a_tensor_that_two_calls_share_is_stored_once(model: nn.Module, tmp_path: Path) -> None:
    saved = run(model)
    saved.save(tmp_path / "a.run")
    calls = {call.path: call for call in load_run(tmp_path / "a.run").calls}
    assert calls["act"].inputs[0] is calls["encoder"].outputs[0].value
    assert calls[""].outputs[0].value is calls["head"].outputs[0].value


def test_a_sampled_run_comes_back(model: nn.Module, tmp_path: Path) -> None:
    saved = run(model, max_elements=10)
    saved.save(tmp_path / "a.run")
    values = load_run(tmp_path / "a.run").calls[0].outputs[0].value
    assert torch.equal(values.values, saved.calls[0].outputs[0].value.values)
    assert values.is_sampled


def test_a_run_of_nothing_but_integers_can_be_saved(tmp_path: Path) -> None:
    class Count(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    counted = Count()
    saved = record_run(counted, lambda: int(counted(torch.arange(3)).sum()))
    saved.save(tmp_path / "a.run")
    assert load_run(tmp_path / "a.run").calls[0].outputs == ()


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none.run: no such file"):
        load_run(tmp_path / "none.run")


@pytest.mark.parametrize("data", [b"", b"rubbish", b"PK\x03\x04", b"\x80\x02."])
def test_what_is_no_file_of_torch_is_one_line(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.run").write_bytes(data)
    with pytest.raises(ValueError, match=r"^[^\n]*x.run: not a run of AccuracyRun.save: [^\n]+$"):
        load_run(tmp_path / "x.run")


class Evil:
    """Leaves a file behind if it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self._path,))


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    torch.save({"format": Evil(tmp_path / "ran")}, tmp_path / "x.run")
    with pytest.raises(ValueError, match=r"not a run of AccuracyRun\.save"):
        load_run(tmp_path / "x.run")
    assert not (tmp_path / "ran").exists()


def put(*keys: Any) -> Any:
    """Return a change: the last argument goes to where the others lead."""
    *path, last, value = keys

    def change(payload: dict[str, Any]) -> None:
        place: Any = payload
        for key in path:
            place = place[key]
        place[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put("format", "other"), "its format is 'other', version 1"),
        (put("version", 2), "its format is 'mezzo accuracy run', version 2"),
        (put("name", 3), "name: int in place of str"),
        (put("loss", "0"), "loss: str in place of float"),
        (put("loss_scale", None), "loss_scale: NoneType in place of float"),
        (put("max_elements", True), "max_elements: bool in place of int"),
        (put("max_elements", -1), "max_elements is -1, loss_scale 1.0"),
        (put("loss_scale", 0.0), "max_elements is 65536, loss_scale 0.0"),
        (put("loss_scale", math.nan), "max_elements is 65536, loss_scale nan"),
        (put("records", 0, 0, [2**40, 2**40]), r"a shape is \(1099511627776, 1099511627776\)"),
        (put("modules", []), "modules: list in place of dict"),
        (put("modules", 3, "x"), "a path: int in place of str"),
        (put("values", torch.zeros(3)), "values are missing"),
        (put("values", torch.zeros(1).expand(10**12)), "unpacks to 4000000000000 bytes"),
        (put("values", torch.zeros(1).expand(10)), "values are not one flat float32 tensor"),
        (put("values", torch.zeros(3, dtype=torch.float64)), "values are not one flat float32 tensor"),
        (put("records", -1, 0, [10**9, 10**9]), "values are missing"),
        (put("records", 0, 0, [-1, -512]), r"a shape is \(-1, -512\)"),
        (put("records", 0, 0, ["x"]), "a size: str in place of int"),
        (put("records", 0, 4, "x"), "a magnitude: str in place of float"),
        (put("calls", 0, "inputs", [10**6]), "a position is 1000000 of "),
        (put("calls", 0, "inputs", [-1]), "a position is -1 of "),
        (put("calls", 0, "inner", [0]), "a position is 0 of 0"),
        (put("calls", 0, "outputs", [7]), "an output: int in place of dict"),
        (put("calls", 0, "path", 7), "a path: int in place of str"),
        (put("parameters", 0, "grad", None), "a position: NoneType in place of int"),
        (put("parameters", 7), "parameters: int in place of list"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_as_it_was_written_is_refused(
    change: Any, reason: str, model: nn.Module, tmp_path: Path
) -> None:
    run(model).save(tmp_path / "x.run")
    payload = payload_of(tmp_path / "x.run")
    change(payload)
    torch.save(payload, tmp_path / "x.run")
    with pytest.raises(ValueError, match=f"x.run: not a run of AccuracyRun.save: {reason}"):
        load_run(tmp_path / "x.run")


def test_a_run_that_cannot_be_written_is_one_line(model: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        run(model).save(tmp_path / "file" / "a.run")


COLUMNS = (
    "name kind module order state harm error added inflow limit max_abs_error max_ulps cosine underflow overflows "
    "max_abs_a max_abs_b nan_a nan_b inf_a inf_b dtype_a dtype_b rounding shape diverges note"
).split()


def test_the_csv_has_a_line_a_row_by_harm(found: AccuracyComparison, tmp_path: Path) -> None:
    found.write_csv(tmp_path / "rows.csv")
    lines = list(csv.DictReader(io.StringIO((tmp_path / "rows.csv").read_text())))
    assert list(lines[0]) == COLUMNS  # other programs read the file
    assert [line["name"] for line in lines] == [row.name for row in found.rows]
    assert (lines[0]["name"], lines[0]["harm"], lines[0]["state"], lines[0]["shape"]) == (
        "large",
        "inf",
        "red",
        "32x16",
    )
    assert [float(line["error"]) for line in lines] == [row.error for row in found.rows]


HOSTILE = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(1)", "\tx", 'a"b', "a,b", "a\nb", "\x1b[31mred"]


def hostile_run(names: list[str]) -> AccuracyRun:
    """Return a run of a model whose modules have names that no one would give."""
    holder = nn.Module()
    for name in names:
        holder._modules[name] = nn.Linear(16, 4)
    x, _ = batch()
    return record_run(holder, lambda: sum(layer(x).sum() for layer in holder.children()).backward(), name=names[0])


def test_no_cell_of_the_csv_is_a_formula(tmp_path: Path) -> None:
    found = compare_accuracy(hostile_run(HOSTILE), hostile_run(HOSTILE))
    cells = [cell for line in csv_lines(found, tmp_path) for cell in line]
    for cell in cells:
        assert not cell.startswith(("=", "+", "-", "@", "\t", "\r")) or math.isfinite(float(cell))
        assert "\x1b" not in cell
    assert {"'=1+1", "'-2+3", "'@SUM(1)", "'\tx", "red"} <= set(cells)


def test_without_xlsxwriter_the_sheet_is_an_error_that_names_it(
    found: AccuracyComparison, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MezzoError, match=r"XlsxWriter.*mezzo\[xlsx\]"):
        found.write_xlsx(tmp_path / "rows.xlsx")
    assert not (tmp_path / "rows.xlsx").exists()


class Book:
    """What the sheet asks of XlsxWriter, noted down."""

    def __init__(self, buffer: io.BytesIO, options: dict[str, bool]) -> None:
        self.buffer, self.options = buffer, options
        self.cells: dict[tuple[int, int], tuple[Any, Any]] = {}
        Book.last = self

    last: "Book"

    def add_worksheet(self, name: str) -> "Book":
        return self

    def add_format(self, form: dict[str, Any]) -> Any:
        return form.get("bg_color")

    def write_row(self, row: int, column: int, values: Any, form: Any) -> None:
        for place, value in enumerate(values):
            self.cells[row, column + place] = (value, form)

    def write(self, row: int, column: int, value: Any, form: Any) -> None:
        assert not isinstance(value, str), "a text goes through write_string, which makes no formula of it"
        self.cells[row, column] = (value, form)

    def write_string(self, row: int, column: int, value: str, form: Any) -> None:
        self.cells[row, column] = (value, form)

    def freeze_panes(self, *place: int) -> None: ...

    def autofilter(self, *place: int) -> None: ...

    def close(self) -> None:
        self.buffer.write(b"book")


def test_the_sheet_has_the_rows_in_their_colours(found: AccuracyComparison, tmp_path: Path, monkeypatch: Any) -> None:
    spec = importlib.machinery.ModuleSpec("xlsxwriter", None, origin="xlsxwriter.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "xlsxwriter" else None)
    monkeypatch.setitem(sys.modules, "xlsxwriter", types.SimpleNamespace(Workbook=Book))
    found.write_xlsx(tmp_path / "rows.xlsx")
    assert (tmp_path / "rows.xlsx").read_bytes() == b"book"
    book = Book.last
    assert book.options["strings_to_formulas"] is False
    assert [value for (row, _), (value, _) in book.cells.items() if row == 0] == csv_lines(found, tmp_path)[0]
    for number, row in enumerate(found.rows, start=1):
        assert book.cells[number, 0] == (row.name, f"#{COLOURS[row.state]}" if row.state else None)


def test_the_sheet_can_be_read_back(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl", reason="openpyxl reads the sheet back")
    pytest.importorskip("xlsxwriter")
    model = network(large=Large())
    for found in (compare_accuracy(run(model), run(model, "O2")), compare_accuracy(*[hostile_run(HOSTILE)] * 2)):
        found.write_xlsx(tmp_path / "rows.xlsx")
        sheet = openpyxl.load_workbook(tmp_path / "rows.xlsx").active
        assert [cell.value for cell in sheet[1]] == csv_lines(found, tmp_path)[0]
        for line, row in zip(list(sheet.rows)[1:], found.rows, strict=True):
            assert line[0].data_type == "s"
            assert line[0].value == re.sub("\x1b\\[31m", "", row.name)
            assert line[6].value == (row.error if math.isfinite(row.error) else str(row.error))
            assert line[0].fill.start_color.rgb[2:] == (COLOURS[row.state] if row.state else "000000")


def test_a_table_that_cannot_be_written_is_one_line(found: AccuracyComparison, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MezzoError, match="cannot be written"):
        found.write_csv(tmp_path / "file" / "rows.csv")


def test_importing_proof_loads_no_extra() -> None:
    code = "import sys, mezzo.proof; print([n for n in ('jinja2', 'xlsxwriter', 'rich') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
