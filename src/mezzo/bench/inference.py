"""An exported model on every engine, with every precision, number of threads and batch, in one run."""

from __future__ import annotations

import io
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mezzo._arguments import check_at_least
from mezzo.bench._frame import Progress
from mezzo.errors import MezzoError, RunError
from mezzo.export import (
    Deployed,
    DeployError,
    Engine,
    EngineError,
    EngineOptions,
    brief_engines,
    difference,
    load_engine,
)
from mezzo.files import write_file
from mezzo.record import Timing, time_calls
from mezzo.vision.infer import percentiles as percentiles_of


@dataclass(frozen=True, kw_only=True, slots=True)
class InferCase:
    """One way to run a model."""

    engine: str
    precision: str
    threads: int
    batch: int


@dataclass(frozen=True, slots=True)
class InferRow:
    """The times of a case, or why it was skipped."""

    case: InferCase
    median_ms: float | None = None
    """Median of the rounds' medians."""
    low_ms: float | None = None
    high_ms: float | None = None
    """Range of the rounds' medians."""
    p95_ms: float | None = None
    images_per_s: float | None = None
    difference: float | None = None
    """From torch in float32: share of different labels, or the largest difference over the standard deviation."""
    skipped: str | None = None


@dataclass(frozen=True, slots=True)
class InferBench:
    """All rows of a run."""

    model: str
    size: tuple[int, int]
    device: str
    rows: tuple[InferRow, ...]
    rounds: int
    runs: int

    def table(self) -> list[list[str]]:
        """Return the header and one row per case."""
        lines = [["engine", "precision", "threads", "batch", "ms", "range", "p95", "images/s", "difference"]]
        for row in self.rows:
            case = [row.case.engine, row.case.precision, str(row.case.threads), str(row.case.batch)]
            if row.median_ms is None:
                lines.append([*case, f"- ({row.skipped})", "", "", "", ""])
                continue
            figures = [f"{row.median_ms:.2f}", f"{row.low_ms:.2f}..{row.high_ms:.2f}", f"{row.p95_ms:.2f}"]
            lines.append([*case, *figures, f"{row.images_per_s:.0f}", f"{row.difference:.1e}"])
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)

    def plot(self, path: Path) -> None:
        """Draw a bar chart of the measured cases."""
        from matplotlib.figure import Figure

        measured = [row for row in self.rows if row.median_ms is not None]
        figure = Figure(figsize=(8, 1 + 0.35 * len(measured)), layout="constrained")
        axes = figure.subplots()
        names = [
            f"{r.case.engine} {r.case.precision}, {r.case.threads} threads, batch {r.case.batch}" for r in measured
        ]
        times = [row.median_ms / row.case.batch for row in measured if row.median_ms is not None]
        bars = axes.barh(names, times)
        axes.bar_label(bars, fmt="%.2f", padding=3)
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds an image")
        axes.set_title(f"{self.model}, {self.size[0]}x{self.size[1]}, {self.device}")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=120)
        write_file(path, buffer.getvalue())


def bench_infer(
    model: Deployed,
    *,
    size: tuple[int, int],
    engines: Sequence[str] | None = None,
    precisions: Sequence[str] | None = None,
    threads: Sequence[int] = (1,),
    batches: Sequence[int] = (1,),
    device: str = "cpu",
    rounds: int = 5,
    runs: int = 30,
    warmup: int = 5,
    progress: Progress = lambda what, done, total: None,
) -> InferBench:
    """Time a model on its engines. The cases take turns in every round, so that a slow moment affects all of them.

    Args:
        model: The exported model.
        size: Height and width of the images, which are random.
        engines: Names of ENGINES; None: those that need no compilation.
        precisions: None: all exported ones.
        threads: Numbers of CPU threads.
        batches: Numbers of images per run.
        device: A name that `mezzo.devices.parse_device` reads.
        rounds: How often each case is measured.
        runs: Timed runs per round.
        warmup: Untimed runs before a case's first round.
        progress: Called after each loaded case and after each round.

    Raises:
        MezzoError: A number is below 1, or no case can be measured.
    """
    for name, number in (("rounds", rounds), ("runs", runs), *(("batch", batch) for batch in batches)):
        check_at_least(name, number, raising=MezzoError)
    device = EngineOptions(device=device).device
    names = engines or brief_engines(device)
    cases = [
        _Measured(InferCase(engine=engine, precision=precision, threads=number, batch=batch))
        for engine, precision, number, batch in itertools.product(
            names, precisions or list(model.variants), threads, batches
        )
    ]
    for number, case in enumerate(cases):
        case.load(model, device, size, warmup)
        progress("load", number + 1, len(cases))
    if all(case.engine is None for case in cases):
        raise MezzoError("nothing can be measured: " + "; ".join(str(case.skipped) for case in cases))
    for turn in range(rounds):
        for case in cases:
            case.measure(runs)
        progress("rounds", turn + 1, rounds)
    return InferBench(model.model_name, size, device, tuple(case.row() for case in cases), rounds, runs)


@dataclass(slots=True)
class _Measured:
    case: InferCase
    engine: Engine | None = None
    images: Any = None
    skipped: str | None = None
    difference: float = 0.0
    rounds: list[Timing] = field(default_factory=list)

    def load(self, model: Deployed, device: str, size: tuple[int, int], warmup: int) -> None:
        case = self.case
        shape = (case.batch, model.input_shape[1], *size)
        self.images = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
        options = EngineOptions(device=device, threads=case.threads, precision=case.precision)
        try:
            engine, _ = load_engine(model, options, case.engine)
            for _ in range(warmup + 1):
                output = engine.run(self.images)
        except (EngineError, DeployError, RunError) as error:
            self.skipped = str(error)
            return
        right, _ = load_engine(model, EngineOptions(), "torch")
        self.difference = difference(output, right.run(self.images))
        self.engine = engine

    def measure(self, runs: int) -> None:
        engine, images = self.engine, self.images
        if engine is not None:  # it returns arrays of the host, so nothing is left to wait for
            cpu = torch.device("cpu")
            self.rounds.append(time_calls(lambda: engine.run(images), calls=runs, warmup_calls=0, device=cpu))

    def row(self) -> InferRow:
        if self.engine is None:
            return InferRow(self.case, skipped=self.skipped)
        medians = [timing.median_s * 1e3 for timing in self.rounds]
        median = statistics.median(medians)
        every = percentiles_of([time_s * 1e3 for timing in self.rounds for time_s in timing.times_s])
        rate = self.case.batch * 1e3 / median
        return InferRow(self.case, median, min(medians), max(medians), every.p95_ms, rate, self.difference)
