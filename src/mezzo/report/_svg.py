"""Line charts as inline SVG; the style sheet of the page sets the colours, for light and dark mode."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from mezzo.files import plain

WIDTH, HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 10, 30
_TICKS = 5

SPARK_WIDTH, SPARK_HEIGHT = 200, 36

Point = tuple[float, float]
Band = tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a chart."""

    label: str
    points: Sequence[Point]
    """In order; finite, and within the range of float32."""
    style: str
    """Class of the page's style sheet."""
    names: Sequence[str] = ()
    """One name per point: each point is then drawn as a dot with its name."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line."""

    label: str
    x: float
    style: str
    """Class of the page's style sheet."""


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    log_y: bool = False,
    counts_x: bool = False,
    marks: Sequence[Mark] = (),
) -> str:
    """Return an SVG element with lines, axes and labels; all text is escaped.

    Args:
        series: Lines; lines without points are left out.
        title: Text for screen readers.
        x_label: Label of the x axis.
        log_y: Logarithmic y axis; all y must be positive.
        counts_x: Label only whole numbers on the x axis.
        marks: Vertical lines.
    """
    drawn = [each for each in series if each.points]
    across, up = ([point[axis] for each in drawn for point in each.points] for axis in (0, 1))
    x_ticks = nice_ticks([*across, *(mark.x for mark in marks)])
    scale = _Scale(x_ticks, decades(up) if log_y else nice_ticks(up), log_y=log_y)
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_text(title)}">',
        *_axes(scale, x_label, counts_x=counts_x),
        *(_mark(each, scale) for each in marks),
        *(_line(each, scale) for each in drawn),
        *(dot for each in drawn if each.names for dot in _dots(each, scale)),
        "</svg>",
    ]
    return "\n".join(parts)


def spark_line(
    values: Sequence[float | None], *, title: str, bad: Sequence[int] = (), marks: Sequence[int] = (), band: Band = None
) -> str:
    """Return a small chart without axes, for the cell of a table; the style sheet gives it its size.

    Args:
        values: In order; None leaves a gap in the count, not in the line.
        title: Text for screen readers and the mouse.
        bad: Places of failures, drawn as dots at the bottom.
        marks: Places of vertical lines.
        band: Two values between which the background is coloured.
    """
    known = [value for value in values if value is not None]
    low, high = (min([*known, *(band or ())]), max([*known, *(band or ())])) if known else (0.0, 1.0)
    room = (high - low) or abs(high) or 1.0
    step = SPARK_WIDTH / max(len(values) - 1, 1)

    def y(value: float) -> float:
        return 2 + (1 - (value - low) / room) * (SPARK_HEIGHT - 8)

    places = " ".join(f"{place * step:.0f},{y(value):.1f}" for place, value in enumerate(values) if value is not None)
    parts = [
        f'<svg class="spark" viewBox="-3 0 {SPARK_WIDTH + 6} {SPARK_HEIGHT}" role="img"><title>{_text(title)}</title>'
    ]
    if band is not None and known:
        top, bottom = y(band[1]), y(band[0])
        parts.append(
            f'<rect class="band" x="0" y="{top:.1f}" width="{SPARK_WIDTH}" height="{bottom - top + 0.5:.1f}"/>'
        )
    parts += [
        f'<line class="mark" x1="{at * step:.0f}" y1="0" x2="{at * step:.0f}" y2="{SPARK_HEIGHT}"/>' for at in marks
    ]
    parts += [f'<polyline class="fp320" points="{places}"/>'] if len(known) > 1 else []
    if known and values and values[-1] is not None:
        parts.append(f'<circle class="fp320" cx="{SPARK_WIDTH}" cy="{y(values[-1]):.1f}" r="2"/>')
    parts += [f'<circle class="bad" cx="{at * step:.0f}" cy="{SPARK_HEIGHT - 2}" r="2"/>' for at in bad]
    return "".join([*parts, "</svg>"])


def decades(values: Sequence[float]) -> list[float]:
    """Return powers of ten that span positive values, at most eight of them.

    >>> decades([0.002, 0.5])
    [0.001, 0.01, 0.1, 1.0]
    """
    first, last = (
        (math.floor(math.log10(min(values)) + 1e-9), math.ceil(math.log10(max(values)) - 1e-9)) if values else (0, 1)
    )
    last = max(last, first + 1)
    step = math.ceil((last - first) / 7)
    return [float(f"1e{place}") for place in range(first, last + step, step)]


def nice_ticks(values: Sequence[float]) -> list[float]:
    """Return round numbers that span the values.

    >>> nice_ticks([0.13, 0.91])
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> nice_ticks([3.0])
    [2.4, 2.6, 2.8, 3.0, 3.2, 3.4, 3.6]
    """
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-9):
        half = max(abs(low) / 6, 1e-3)
        low, high = low - half, high + half
    step = _nice_step((high - low) / _TICKS)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{place * step:.12g}") for place in range(first, last + 1)]


def _nice_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))


class _Scale:
    """Maps values to positions in the picture."""

    def __init__(self, x_ticks: Sequence[float], y_ticks: Sequence[float], *, log_y: bool = False) -> None:
        self.x_ticks, self.y_ticks = x_ticks, y_ticks
        self._at = math.log10 if log_y else float

    def x(self, value: float) -> float:
        first, last = self.x_ticks[0], self.x_ticks[-1]
        return _LEFT + (value - first) / (last - first) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        value, first, last = (self._at(each) for each in (value, self.y_ticks[0], self.y_ticks[-1]))
        return HEIGHT - _BOTTOM - (value - first) / (last - first) * (HEIGHT - _TOP - _BOTTOM)


def _axes(scale: _Scale, x_label: str, *, counts_x: bool) -> Iterator[str]:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    for value in scale.y_ticks:
        y = scale.y(value)
        yield f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>'
    for value in scale.x_ticks if not counts_x else [each for each in scale.x_ticks if each == int(each)]:
        yield f'<text x="{scale.x(value):.1f}" y="{bottom + 14}" text-anchor="middle">{value:.6g}</text>'
    yield f'<text x="{right}" y="{HEIGHT - 3}" text-anchor="end">{_text(x_label)}</text>'


def _line(series: Series, scale: _Scale) -> str:
    places = [f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in series.points]
    title = f"<title>{_text(series.label)}</title>"
    if len(places) == 1:
        x, y = places[0].split(",")
        return f'<circle class="{_text(series.style)}" cx="{x}" cy="{y}" r="3">{title}</circle>'
    return f'<polyline class="{_text(series.style)}" points="{" ".join(places)}">{title}</polyline>'


def _dots(series: Series, scale: _Scale) -> Iterator[str]:
    for (x, y), name in zip(series.points, series.names, strict=True):
        place = f'cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}" r="2.5"'
        yield f'<circle class="{_text(series.style)}" {place}><title>{_text(name)}</title></circle>'


def _mark(mark: Mark, scale: _Scale) -> str:
    x = f"{scale.x(mark.x):.1f}"
    place = f'x1="{x}" y1="{_TOP}" x2="{x}" y2="{HEIGHT - _BOTTOM}"'
    return f'<line class="{_text(mark.style)}" {place}><title>{_text(mark.label)}</title></line>'


def _text(text: str) -> str:
    return escape(plain(text), quote=True)
