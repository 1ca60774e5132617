"""Compares the `[PRECISION]` lines of two runs, which `TensorCheckerConfig(output_dir=...)` writes.

Paddle writes the same lines, so a run of Paddle can be compared with one of mezzo. Where runs have the same modules,
`mezzo.proof.compare_accuracy` says more: it compares tensors, not their ranges.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mezzo._arguments import check_number
from mezzo.dtypes import PRECISION_DTYPES
from mezzo.errors import require
from mezzo.files import FileError, MiB, plain, read_text, shown_path, write_file, write_text
from mezzo.record._tensor_numbers import FLOAT16_INF_FROM
from mezzo.report import csv_text, xlsx_bytes

State = Literal["red", "orange", "yellow", ""]

TOLERANCE = 0.05
"""A larger difference, relative to the largest magnitude of the reference, is marked."""
MAX_DUMP = 256 * MiB
"""Of one file: over a million lines."""
_COLOURS = {"red": "#FF9B94", "orange": "#FFC27A", "yellow": "#FFF3B0"}
_HALVES = [word for word, name in PRECISION_DTYPES.items() if name != "float32"]
_CASTS = ("_to_copy", "cast")
_NUMBER = r"[-+.\w]{1,32}"
_LINE = re.compile(
    r"\[PRECISION\] (?:\[ERROR\] )?in \[device=[^,\]]*, op=(?P<op>[^,\]]*), tensor=(?P<tensor>.*), dtype=(?P<dtype>\w+)\], "
    r"numel=(?P<numel>\d{1,18}), num_nan=(?P<num_nan>\d{1,18}), num_inf=(?P<num_inf>\d{1,18}), "
    rf"num_zero=(?P<num_zero>\d{{1,18}}), max=(?P<max>{_NUMBER}), min=(?P<min>{_NUMBER}), mean=(?P<mean>{_NUMBER})"
)


@dataclass(frozen=True, slots=True)
class DumpedTensor:
    """The numbers of one line."""

    dtype: str
    """As in the line: fp32, fp16, bf16."""
    numel: int
    num_nan: int
    num_inf: int
    num_zero: int
    max: float
    min: float
    mean: float

    @property
    def max_abs(self) -> float:
        """Largest magnitude of a finite value; NaN if there is none."""
        return max(abs(self.max), abs(self.min))


@dataclass(frozen=True, slots=True)
class DumpRow:
    """A tensor of two dumps; `a` is the reference. None: that dump has no such line."""

    worker: str
    """The file in the first dump."""
    op: str
    tensor: str
    number: int
    """Which line of this operator and tensor it is, from 1."""
    a: DumpedTensor | None
    b: DumpedTensor | None
    scale: float
    """The loss scale in the values of `b`: 1 unless it is a gradient."""

    @property
    def error(self) -> float:
        """Largest difference of max, min and mean, relative to the largest magnitude of `a`.

        It is inf if only one of two numbers is finite, and NaN if a dump has no such line.
        """
        if self.a is None or self.b is None:
            return math.nan
        pairs = [(getattr(self.a, name), getattr(self.b, name) / self.scale) for name in ("max", "min", "mean")]
        apart = max(_distance(a, b) for a, b in pairs)
        if apart == 0 or math.isinf(apart):
            return apart
        return apart / self.a.max_abs if self.a.max_abs else math.inf

    @property
    def state(self) -> State:
        """Red: new NaN or inf, or beyond float16's range. Orange: differs by over 5 %, or missing. Yellow: half.

        A cast that only one run has is no difference.
        """
        if self.a is None or self.b is None:
            return "" if self.op in _CASTS else "orange"
        if self.b.num_nan + self.b.num_inf > self.a.num_nan + self.a.num_inf:
            return "red"
        if self.b.dtype == "fp16" and self.a.max_abs * self.scale >= FLOAT16_INF_FROM:
            return "red"
        if self.error > TOLERANCE or self.a.numel != self.b.numel:
            return "orange"
        return "yellow" if self.b.dtype in _HALVES else ""


def _distance(a: float, b: float) -> float:
    """Return how far two numbers are apart; 0 for two NaNs or equal infinities, inf if they cannot be subtracted."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(b - a) if math.isfinite(a) and math.isfinite(b) else math.inf


def compare_dumps(
    dump_path: str | os.PathLike[str],
    another_dump_path: str | os.PathLike[str],
    output_filename: str | os.PathLike[str],
    loss_scale: float = 1,
    dump_all_tensors: bool = False,
) -> list[DumpRow]:
    """Compare the lines of two folders of the tensor checker and write them side by side as a coloured sheet.

    Lines belong together if operator, tensor and occurrence are equal; files if their names are, or their devices.

    Args:
        dump_path: Folder of the reference, usually float32; its files are named `worker_*`.
        another_dump_path: Folder of the run under test.
        output_filename: An XLSX file, or with the ending `.csv` a CSV file.
        loss_scale: Gradients of the second run are divided by it; those of the first run are taken as they are.
        dump_all_tensors: Not supported: the lines hold ranges, not tensors.

    Returns:
        The rows of the sheet, in the order of the first run.

    Raises:
        FileError: A folder or file cannot be read, or its lines are not those of a tensor checker.
        MissingExtra: XlsxWriter is not installed.
        ValueError: `dump_all_tensors` is on, or `loss_scale` is not a number above 0.
    """
    if dump_all_tensors:
        raise ValueError(
            "dump_all_tensors=True: the files hold ranges, not tensors; mezzo.proof.compare_accuracy compares tensors"
        )
    scale = check_number("loss_scale", loss_scale, above=0)
    target = Path(output_filename)
    is_csv = target.suffix.lower() == ".csv"
    if not is_csv:
        require("xlsxwriter", extra="xlsx")
    rows = [
        row
        for first, second in _pairs(Path(dump_path), Path(another_dump_path))
        for row in _compared(first.name, _read(first), _read(second), scale)
    ]
    cells = list(map(_cells, rows))
    if is_csv:
        write_text(target, csv_text(_COLUMNS, cells))
    else:
        write_file(target, xlsx_bytes("accuracy", _COLUMNS, cells, [_COLOURS.get(row.state) for row in rows]))
    return rows


def _pairs(first: Path, second: Path) -> list[tuple[Path, Path]]:
    """Return the files that belong together: by name, otherwise by device, otherwise the only ones."""
    a, b = _workers(first), _workers(second)
    if len(a) == len(b) == 1:
        return [(a[0], b[0])]
    for end in (None, "."):  # the whole name, then only the device: process numbers differ between runs
        by_a, by_b = ({path.name.partition(end)[0] if end else path.name: path for path in files} for files in (a, b))
        if len(by_a) == len(a) and len(by_b) == len(b) and by_a.keys() == by_b.keys():
            return [(by_a[name], by_b[name]) for name in by_a]
    names = "; ".join(", ".join(path.name for path in files[:4]) for files in (a, b))
    raise FileError(
        f"{shown_path(first)} and {shown_path(second)}: their files do not match ({names}): both runs need the same devices "
        "and number of processes, and several processes need the variable RANK"
    )


def _workers(folder: Path) -> list[Path]:
    try:
        found = sorted(path for path in folder.iterdir() if path.name.startswith("worker_"))
    except OSError as error:
        raise FileError(f"{shown_path(folder)}: cannot be read as a folder: {error.strerror}") from error
    if not found:
        raise FileError(f"{shown_path(folder)}: no file worker_*: give the output_dir of TensorCheckerConfig")
    return found


Dump = dict[tuple[str, str, int], DumpedTensor]


def _read(path: Path) -> Dump:
    """Return the tensors of a file by operator, name and occurrence, in order."""
    found: Dump = {}
    seen: Counter[tuple[str, str]] = Counter()
    for number, line in enumerate(read_text(path, limit=MAX_DUMP).splitlines(), start=1):
        if "[PRECISION]" not in line:  # Paddle writes other lines too
            continue
        match = _LINE.search(line)
        try:
            if match is None:
                raise ValueError("other fields than expected")
            counts = [int(match[name]) for name in ("numel", "num_nan", "num_inf", "num_zero")]
            values = [float(match[name]) for name in ("max", "min", "mean")]
        except ValueError as error:
            raise FileError(f"{shown_path(path)}:{number}: not a line of a tensor checker: {error}") from error
        key = (plain(match["op"]), plain(match["tensor"]))
        seen[key] += 1
        found[(*key, seen[key])] = DumpedTensor(match["dtype"], *counts, *values)
    return found


def _compared(worker: str, first: Dump, second: Dump, loss_scale: float) -> list[DumpRow]:
    rows = []
    for key in dict.fromkeys((*first, *second)):
        op, tensor, number = key
        is_gradient = "@GRAD" in tensor or op.endswith("_grad")
        scale = loss_scale if is_gradient else 1.0
        rows.append(DumpRow(plain(worker), op, tensor, number, first.get(key), second.get(key), scale))
    return rows


_FIELDS = ("dtype", "numel", "num_nan", "num_inf", "num_zero", "max", "min", "mean")
_COLUMNS = ("worker", "op", "tensor", "number", "state", "error", "scale", *(f"{f}_{s}" for s in "ab" for f in _FIELDS))


def _cells(row: DumpRow) -> list[Any]:
    """Return the cells of a row; numbers that a sheet cannot hold become words."""
    values = [row.worker, row.op, row.tensor, row.number, row.state, row.error, row.scale]
    for side in (row.a, row.b):
        values += [""] * len(_FIELDS) if side is None else [getattr(side, name) for name in _FIELDS]
    return [str(value) if isinstance(value, float) and not math.isfinite(value) else value for value in values]
