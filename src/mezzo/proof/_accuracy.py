"""`compare_accuracy`: two runs of one model, layer by layer: the first divergence, and the layer that causes it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mezzo.files import plain, write_file, write_text
from mezzo.proof._accuracy_page import page_text
from mezzo.proof._accuracy_pairs import Pairing
from mezzo.proof._accuracy_rows import AccuracyRow, as_computed, by_harm
from mezzo.proof._accuracy_run import AccuracyRun, load_run
from mezzo.proof._accuracy_sheet import csv_text, text_table, xlsx_bytes

INPUTS_DIFFER = 2.0**-8
"""A larger error of the model's inputs means different data: rounding to bfloat16 makes less."""

NEVER_CALLED_SHOWN = 12


def compare_accuracy(
    run_a: AccuracyRun | str | os.PathLike[str], run_b: AccuracyRun | str | os.PathLike[str]
) -> AccuracyComparison:
    """Compare the outputs and gradients of two runs of one model, layer by layer.

    Args:
        run_a: The reference, usually float32: a run or its file.
        run_b: The run under test.

    Raises:
        ValueError: The runs are of different models or keep samples of different sizes, or a file is not a run.
    """
    a, b = (each if isinstance(each, AccuracyRun) else load_run(each) for each in (run_a, run_b))
    pairing = Pairing(a, b)
    rows = tuple(sorted(pairing.rows(), key=by_harm))
    return AccuracyComparison(a.name, b.name, a.loss, b.loss, rows, tuple(_notes(pairing)))


@dataclass(frozen=True, slots=True)
class AccuracyComparison:
    """Result of `compare_accuracy`; `name_a` is the reference."""

    name_a: str
    name_b: str
    loss_a: float | None
    loss_b: float | None
    rows: tuple[AccuracyRow, ...]
    """By harm: tensors with new NaN or inf, tensors that inherit them, then the largest added error and underflow."""
    notes: tuple[str, ...]
    """Warnings: missing gradients, modules that were never called, different inputs."""

    def in_order(self) -> list[AccuracyRow]:
        """Return the rows in execution order: outputs forward, then gradients backward."""
        return sorted(self.rows, key=as_computed)

    @property
    def first_divergence(self) -> AccuracyRow | None:
        """The first output in the forward pass that differs by more than rounding explains."""
        return next((row for row in self.in_order() if row.kind == "output" and row.diverges), None)

    @property
    def first_gradient_divergence(self) -> AccuracyRow | None:
        """The first gradient in the backward pass that differs by more than rounding explains."""
        return next((row for row in self.in_order() if row.kind != "output" and row.diverges), None)

    def summary(self) -> list[str]:
        """Return a few lines: the losses, the first divergences, the notes."""
        lines = [f"{self.name_b} against {self.name_a}: {len(self.rows)} tensors"]
        if self.loss_a is not None and self.loss_b is not None:
            apart = self.loss_b - self.loss_a
            lines.append(f"loss {self.loss_b:.6g} against {self.loss_a:.6g}, difference {apart:.3g}")
        for what, row in (("output", self.first_divergence), ("gradient", self.first_gradient_divergence)):
            found = "none; all differences are rounding" if row is None else describe(row)
            if row is not None or any((each.kind == "output") == (what == "output") for each in self.rows):
                lines.append(f"first {what} that diverges: {found}")
        shown = (self.first_divergence, self.first_gradient_divergence)
        if self.rows and self.rows[0].diverges and self.rows[0] not in shown:
            lines.append(f"most harm: {describe(self.rows[0])}")
        return [plain(line) for line in (*lines, *self.notes)]

    def table(self, limit: int | None = 20) -> str:
        """Return the summary and the `limit` rows with most harm as text; None: all rows."""
        return "\n".join([*self.summary(), "", text_table(self.rows, limit)])

    def to_dict(self) -> dict[str, Any]:
        """Return plain types for JSON; non-finite numbers become the strings `inf`, `-inf` and `nan`."""
        first, first_gradient = self.first_divergence, self.first_gradient_divergence
        return {
            "name_a": self.name_a,
            "name_b": self.name_b,
            "loss_a": _finite(self.loss_a),
            "loss_b": _finite(self.loss_b),
            "first_divergence": first.name if first else None,
            "first_gradient_divergence": first_gradient.name if first_gradient else None,
            "notes": list(self.notes),
            "rows": [row.to_dict() for row in self.rows],
        }

    def write_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the rows by harm as CSV. Text that a spreadsheet would read as a formula gets a leading quote.

        Raises:
            RunError: The file cannot be written.
        """
        write_text(Path(path), csv_text(self.rows))

    def write_xlsx(self, path: str | os.PathLike[str]) -> None:
        """Write the rows as a coloured XLSX sheet: red overflow, NaN and inf; orange beyond rounding; yellow half.

        Raises:
            MissingExtra: XlsxWriter is not installed.
            RunError: The file cannot be written.
        """
        write_file(Path(path), xlsx_bytes(self.rows))

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Write an HTML page: the first divergences, a chart of the error over depth, the rows by harm or in order.

        Raises:
            MissingExtra: jinja2 is not installed.
            RunError: The file cannot be written.
        """
        text = page_text(
            title=f"{self.name_b} against {self.name_a}",
            summary=self.summary(),
            rows=self.rows,
            first=self.first_divergence,
            first_gradient=self.first_gradient_divergence,
        )
        write_text(Path(path), text)


def describe(row: AccuracyRow) -> str:
    """Return one line about a diverging row."""
    where = f"{row.name} ({row.module}, {row.kind}, number {row.order})"
    if row.note:
        return f"{where}: {row.note}"
    if row.is_bad:
        inherited = ", as in its inputs" if row.is_inherited else ""
        beyond = "; the reference exceeds the range of float16" if row.overflows else ""
        return f"{where}: {row.nan_b} NaN and {row.inf_b} inf of {math.prod(row.shape)}{inherited}{beyond}"
    return f"{where}: error {row.error:.3g}, rounding explains {row.limit:.3g}; this layer added {row.added:.3g}"


def _finite(value: float | None) -> float | str | None:
    return str(value) if value is not None and not math.isfinite(value) else value


def _notes(pairing: Pairing) -> list[str]:
    a, b = pairing.a, pairing.b
    notes = []
    if (error := pairing.inputs_error()) > INPUTS_DIFFER:
        notes.append(f"the inputs of the model differ (error {error:.3g}): compare runs on the same batch")
    if not pairing.has_gradients:
        notes.append("only outputs are compared: a run without a backward pass has no gradients")
    silent = [path or "(model)" for path in a.modules if path in set(a.never_called()) & set(b.never_called())]
    if silent:
        more = f" and {len(silent) - NEVER_CALLED_SHOWN} more" if len(silent) > NEVER_CALLED_SHOWN else ""
        notes.append(f"never called: {', '.join(silent[:NEVER_CALLED_SHOWN])}{more}")
    return notes
