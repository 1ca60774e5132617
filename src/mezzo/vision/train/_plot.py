"""Curves of a run, or of several, as a PNG."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mezzo.errors import unknown_choice
from mezzo.files import write_file
from mezzo.vision.train._scalars import ScalarLogError, ScalarPoint, read_scalars

PlottedCurve = tuple[list[int], list[float]]

_PANELS = ("loss", "learning rate", "metrics")
_NOT_SHOWN = ("cost", "ips", "eta", "samples", "time")  # measurements of the machine
_SIZE = (9.0, 3.2)  # inches: the width, and the height of a panel
_DOTS_PER_INCH = 120


def plot_run(scalars: Path, out: Path) -> None:
    """Draw the curves of a run: losses, learning rate and metrics, each in its own panel.

    Times and speeds are not drawn; non-finite values leave a gap.

    Args:
        scalars: A `scalars.jsonl`.
        out: The PNG; an older one is replaced.

    Raises:
        ScalarLogError: The file cannot be read, or has nothing to draw.
    """
    panels: dict[str, dict[str, PlottedCurve]] = {}
    for name, curve in _curves(read_scalars(scalars)).items():
        if not _is_of_the_machine(name):
            panels.setdefault(_panel_of(name), {})[name] = curve
    if not panels:
        raise ScalarLogError(f"{scalars}: has no loss, learning rate or metric to draw; log some first")
    figure = _figure(len(panels))
    shown = [panel for panel in _PANELS if panel in panels]
    rows = figure.subplots(len(shown), 1, squeeze=False, sharex=True)[:, 0]
    for axes, panel in zip(rows, shown, strict=True):
        _draw(axes, panels[panel], panel)
    figure.suptitle(_plain(scalars.resolve().parent.name))
    _save(figure, out)


def plot_curves(runs: Mapping[str, Path], out: Path, metric: str) -> None:
    """Draw one metric of several runs into one panel, to compare the runs.

    Args:
        runs: Name for the legend -> `scalars.jsonl`.
        out: The PNG; an older one is replaced.
        metric: The name of the logged number.

    Raises:
        ScalarLogError: A file cannot be read, or a run did not log this metric.
        ValueError: There are no runs.
    """
    if not runs:
        raise ValueError("runs={}: give at least one run to draw")
    curves = {name: _curve_of(path, metric) for name, path in runs.items()}
    figure = _figure(1.5)
    axes = figure.subplots()
    _draw(axes, curves, metric)
    axes.set_title(_plain(f"{metric} of {', '.join(curves)}" if len(curves) < 4 else f"{metric} of {len(curves)} runs"))
    _save(figure, out)


def _curve_of(path: Path, metric: str) -> PlottedCurve:
    curves = _curves(read_scalars(path))
    if not curves:
        raise ScalarLogError(f"{path}: is empty; nothing was logged yet")
    if metric not in curves:
        raise ScalarLogError(f"{path}: {unknown_choice('metric', metric, sorted(curves))}")
    return curves[metric]


def _curves(points: Sequence[ScalarPoint]) -> dict[str, PlottedCurve]:
    curves: dict[str, PlottedCurve] = {}
    for point in points:
        for name, value in point.items():
            if name == "step":
                continue
            steps, values = curves.setdefault(name, ([], []))
            steps.append(point["step"])
            values.append(value if math.isfinite(value) else math.nan)
    return curves


def _words(name: str) -> list[str]:
    return name.lower().replace("/", "_").replace(".", "_").split("_")


def _is_of_the_machine(name: str) -> bool:
    return name.startswith("precision/") or any(word in _NOT_SHOWN for word in _words(name))


def _panel_of(name: str) -> str:
    words = _words(name)
    if "loss" in words:
        return "loss"
    return "learning rate" if "lr" in words else "metrics"


def _figure(panels: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ScalarLogError("plots need the package matplotlib: pip install 'mezzo[vision]'") from error
    return Figure(figsize=(_SIZE[0], _SIZE[1] * panels), layout="constrained")


def _draw(axes: Any, curves: Mapping[str, PlottedCurve], label: str) -> None:
    for name, (steps, values) in curves.items():
        is_short = len(steps) <= 30  # mark few points: a single one would be invisible
        axes.plot(steps, values, label=_plain(name), linewidth=1.4, marker="o" if is_short else None, markersize=3.5)
    axes.set_xlabel("step")
    axes.set_ylabel(_plain(label))
    axes.grid(alpha=0.3)
    # Beside the panel: with many points, matplotlib needs seconds to find a free place inside.
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize="small")


def _plain(text: str) -> str:
    """Escape `$`, so that matplotlib does not read the text as a formula."""
    return text.replace("$", r"\$")


def _save(figure: Any, out: Path) -> None:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=_DOTS_PER_INCH)
    write_file(Path(out), content.getvalue())
