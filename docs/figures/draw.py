"""Draw the figures of the documentation as SVG: text stays text, colours follow light and dark.

python docs/figures/draw.py            # writes docs/figures/*.svg
python docs/figures/draw.py FOLDER     # writes them elsewhere
"""

import json
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

Point = tuple[float, float]

#: Role -> colour. The background is opaque, so a figure is readable whatever the page around it looks like.
LIGHT = {
    "page": "#ffffff", "text": "#1b1f24", "note": "#4d5560", "line": "#6b7480",
    "full": "#d6e6fa", "half": "#fde3bf", "work": "#e6e8ec", "sign": "#e4dcf5", "faint": "#fbf3e6",
}  # fmt: skip
DARK = {
    "page": "#1b1f24", "text": "#f2f4f7", "note": "#b9c1cb", "line": "#8b95a1",
    "full": "#1f4a7a", "half": "#7a4608", "work": "#3b424b", "sign": "#50407d", "faint": "#4a3417",
}  # fmt: skip
BOXES = ("full", "half", "work", "sign", "faint")


class Figure:
    """An SVG picture under construction; coordinates are pixels from the top left.

    Args:
        width: Of the picture.
        height: Of the picture.
        title: What it shows, for readers who do not see it.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self._head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'role="img" aria-labelledby="title">',
            f'<title id="title">{escape(title)}</title>',
            _style(),
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            'orient="auto-start-reverse"><path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>',
        ]
        self._parts: list[str] = []
        self.rect("page", 0, 0, width, height, radius=0)

    def rect(
        self, role: str, x: float, y: float, width: float, height: float, *, radius: float = 5, edge: bool = False
    ) -> None:
        """Draw a filled rectangle, with an edge if it would be hard to see without."""
        names = f"{role} arrow" if edge else role  # an arrow's stroke, and the role's fill
        self._parts.append(
            f'<rect class="{names}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"/>'
        )

    def text(self, x: float, y: float, words: str, *, role: str = "text", anchor: str = "start") -> None:
        """Write one line; `y` is its base line."""
        self._parts.append(f'<text class="{role}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>')

    def box(self, role: str, x: float, y: float, width: float, height: float, lines: Sequence[str]) -> None:
        """Draw a box with centred lines: the first is its name, the others explain."""
        self.rect(role, x, y, width, height)
        top = y + height / 2 - 8 * (len(lines) - 1) + 5
        for index, line in enumerate(lines):
            self.text(x + width / 2, top + 16 * index, line, role="name" if index == 0 else "small", anchor="middle")

    def diamond(self, role: str, x: float, y: float, *, radius: float = 7) -> None:
        """Draw a filled diamond around a point."""
        path = f"M{x - radius:g} {y:g}L{x:g} {y - radius:g}L{x + radius:g} {y:g}L{x:g} {y + radius:g}z"
        self._parts.append(f'<path class="{role} arrow" d="{path}"/>')

    def line(self, *points: Point, end: str = "") -> None:
        """Draw a line through points."""
        path = "L".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(f'<path class="arrow" d="M{path}"{end}/>')

    def arrow(self, *points: Point, label: str = "", at: Point | None = None) -> None:
        """Draw a line through points with a tip at its end, and a label at a place."""
        self.line(*points, end=' marker-end="url(#tip)"')
        if label and at is not None:
            self.text(*at, label, role="note")

    def frame(self, x: float, y: float, width: float, height: float, label: str = "") -> None:
        """Draw a dashed frame, with a label above its top left corner."""
        self._parts.append(f'<rect class="frame" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8"/>')
        if label:
            self.text(x + 2, y - 6, label, role="note")

    def svg(self) -> str:
        """Return the file's text."""
        return "\n".join([*self._head, *self._parts, "</svg>", ""])


def _style() -> str:
    rules = [
        "text{font-family:system-ui,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;font-size:13px}",
        ".name{font-weight:600}.small,.note{font-size:12px}",
        ".arrow{fill:none;stroke-width:1.5}.frame{fill:none;stroke-width:1.2;stroke-dasharray:5 4}",
        _colours(LIGHT),
        "@media (prefers-color-scheme:dark){" + _colours(DARK) + "}",
    ]
    return "<style>" + "".join(rules) + "</style>"


def _colours(palette: dict[str, str]) -> str:
    fills = "".join(f".{role}{{fill:{palette[role]}}}" for role in ("page", *BOXES))
    writing = f".text,.name,.small{{fill:{palette['text']}}}.note{{fill:{palette['note']}}}"
    return fills + writing + f".arrow,.frame{{stroke:{palette['line']}}}.tip{{fill:{palette['line']}}}"


# ------------------------------------------------------------------------------------------------ the number formats

#: Name, exponent bits, fraction bits, bits of the sign and of those two in memory.
FORMATS = (
    ("float32", 8, 23, "32 bits"),
    ("TF32", 8, 10, "19 of 32 bits"),
    ("float16", 5, 10, "16 bits"),
    ("bfloat16", 8, 7, "16 bits"),
    ("FP8 E4M3", 4, 3, "8 bits"),
    ("FP8 E5M2", 5, 2, "8 bits"),
)


def draw_bits() -> str:
    """Return the bit layouts: sign, exponent and fraction of each format, aligned at the sign."""
    figure = Figure(760, 306, "Bit layouts of float32, TF32, float16, bfloat16, FP8 E4M3 and FP8 E5M2")
    left, bit, row = 110, 16, 40
    x = float(left)
    for role, words in (("sign", "sign"), ("full", "exponent: range"), ("half", "fraction: spacing")):
        figure.rect(role, x, 16, 16, 16, radius=3)
        figure.text(x + 22, 29, words, role="note")
        x += 150
    for index, (name, exponent, fraction, size) in enumerate(FORMATS):
        y = 52 + row * index
        figure.text(left - 12, y + 19, name, role="name", anchor="end")
        start = float(left)
        for role, bits in (("sign", 1), ("full", exponent), ("half", fraction)):
            figure.rect(role, start, y, bits * bit - 2, 28, radius=3)
            figure.text(start + bits * bit / 2 - 1, y + 19, str(bits), anchor="middle")
            start += bits * bit
        figure.text(start + 8, y + 19, size, role="note")
    return figure.svg()


#: Name, exponents of two: smallest subnormal, smallest normal, and of the largest number rounded up.
RANGES = (
    ("float32", -149, -126, 128, "2^-149", "3.4e38"),
    ("TF32", -136, -126, 128, "2^-136", "3.4e38"),
    ("bfloat16", -133, -126, 128, "2^-133", "3.4e38"),
    ("float16", -24, -14, 16, "2^-24", "65504"),
    ("float16, scale 2^15", -39, -29, 1, "2^-39", "2"),
    ("FP8 E5M2", -16, -14, 16, "2^-16", "57344"),
    ("FP8 E4M3", -9, -6, 9, "2^-9", "448"),
)


def draw_ranges() -> str:
    """Return the ranges on an axis of powers of two: normal numbers, and the subnormal ones below them."""
    figure = Figure(
        760, 354, "Ranges of the formats as powers of two, from the smallest subnormal to the largest number"
    )
    left, right, low, high = 160.0, 700.0, -150, 130

    def place(exponent: float) -> float:
        return left + (right - left) * (exponent - low) / (high - low)

    figure.rect("half", left, 14, 16, 16, radius=3)
    figure.text(left + 22, 27, "normal numbers: full precision", role="note")
    figure.rect("sign", left + 220, 14, 16, 16, radius=3)
    figure.text(left + 242, 27, "subnormal numbers: fewer bits the smaller", role="note")
    for index, (name, subnormal, normal, top, least, most) in enumerate(RANGES):
        y = 46 + 37 * index
        figure.text(left - 12, y + 17, name, role="name", anchor="end")
        figure.rect("sign", place(subnormal), y, place(normal) - place(subnormal), 24, radius=0)
        figure.rect("half", place(normal), y, place(top) - place(normal), 24, radius=0)
        if index >= 3:  # a narrow bar has its ends beside it, a wide one inside
            figure.text(place(subnormal) - 6, y + 17, least, role="note", anchor="end")
            figure.text(place(top) + 6, y + 17, most, role="note")
        else:
            figure.text(place(normal) + 6, y + 17, f"from {least}")
            figure.text(place(top) - 6, y + 17, f"to {most}", anchor="end")
    bottom = 46 + 37 * len(RANGES)
    figure.line((left - 6, bottom), (right + 16, bottom))
    for exponent in range(-150, 131, 50):
        figure.line((place(exponent), bottom - 4), (place(exponent), bottom + 4))
        figure.text(place(exponent), bottom + 24, f"2^{exponent}", role="note", anchor="middle")
    return figure.svg()


# ------------------------------------------------------------------------------------------------ the flow of a step

_COLUMNS = (204, 394, 584)
_WIDTH, _HEIGHT = 160, 68


def _legend(figure: Figure) -> None:
    x = 24.0
    for role, words in (("full", "float32"), ("half", "float16 or bfloat16"), ("work", "one launch on the device")):
        figure.rect(role, x, 14, 16, 16, radius=3)
        figure.text(x + 22, 27, words, role="note")
        x += 44 + 7.0 * len(words)


def _row(figure: Figure, y: float, boxes: Sequence[tuple[str, tuple[str, ...]]], *, leftwards: bool = False) -> None:
    """Draw a row of three boxes, joined by arrows."""
    for x, (role, lines) in zip(_COLUMNS, boxes, strict=True):
        figure.box(role, x, y, _WIDTH, _HEIGHT, lines)
    middle = y + _HEIGHT / 2
    for left, right in pairwise(_COLUMNS):
        ends = ((left + _WIDTH, middle), (right - 2, middle))
        figure.arrow(*(((right, middle), (left + _WIDTH + 2, middle)) if leftwards else ends))


def _flow(title: str, region: str, forward: Sequence[tuple[str, tuple[str, ...]]], gray: str, gradients: str) -> Figure:
    """Draw what all levels share: forward, scaled loss, backward, and the three launches of the step."""
    figure = Figure(784, 466, title)
    _legend(figure)
    figure.frame(190, 66, 570, 142, region)
    _row(figure, 80, forward)
    figure.rect("faint", 204, 158, 350, 38)
    figure.text(379, 181, gray, anchor="middle")
    loss = ("full", ("loss x scale", "float32; bfloat16 needs", "no scale"))
    backward = ("half", ("backward", "each gradient in the", "dtype of its forward"))
    _row(
        figure,
        232,
        (("half" if gradients == "half" else "full", ("gradients", gradients)), backward, loss),
        leftwards=True,
    )
    figure.arrow((664, 148), (664, 230))
    figure.arrow((284, 300), (284, 346))
    figure.frame(190, 334, 570, 96)
    figure.text(758, 447, "scaler.step(optimizer), scaler.update()", role="note", anchor="end")
    check = ("work", ("1  check", "reads gradients once:", "inf or NaN? their norm"))
    update = ("work", ("2  update", "unscale, clip, optimizer;", "on overflow nothing"))
    rescale = ("work", ("3  rescale", "the scale grows or", "shrinks by its rule"))
    _row(figure, 348, (check, update, rescale))
    figure.arrow((664, 348), (664, 302), label="next scale", at=(672, 318))
    return figure


def draw_o1() -> str:
    """Return the flow of a training step at O1 by `auto_cast` alone."""
    figure = _flow(
        "A training step at O1: weights are cast where they are used, lists decide each operator",
        'auto_cast(level="O1")',
        (
            ("half", ("casts", "weights and inputs of", "white operators")),
            ("half", ("white operators", "products, convolutions,", "attention")),
            ("full", ("black operators", "exponentials, sums,", "every loss")),
        ),
        "gray operators: half if no input is float32",
        "float32",
    )
    figure.box("full", 20, 80, 140, 68, ("weights", "float32"))
    figure.arrow((160, 114), (202, 114))
    figure.arrow((474, 416), (474, 446), (90, 446), (90, 150), label="new weights", at=(98, 440))
    return figure.svg()


def draw_o2() -> str:
    """Return the flow of a training step at O2 after `decorate`."""
    figure = _flow(
        "A training step at O2: half weights in the module, float32 masters behind them, no weight is cast",
        'auto_cast(level="O2") after decorate(model, optimizer, level="O2")',
        (
            ("half", ("half operators", "products, convolutions,", "additions, activations")),
            ("half", ("float32 inside", "softmax, LayerNorm,", "upsampling: half out")),
            ("full", ("black operators", "every loss, sums and", "means over everything")),
        ),
        "batch norm: half data, float32 weights and statistics",
        "half",
    )
    figure.box("half", 20, 80, 140, 68, ("weights", "half, in the module"))
    figure.box("full", 20, 232, 140, 68, ("masters, state", "float32, behind the", "weights"))
    figure.arrow((160, 114), (202, 114))
    figure.arrow((474, 416), (474, 446), (90, 446), (90, 302), label="new masters", at=(98, 440))
    figure.arrow((90, 232), (90, 150), label="half copy,", at=(98, 180))
    figure.text(98, 196, "same launch", role="note")
    return figure.svg()


def draw_o3() -> str:
    """Return the three products of a linear layer at O3, and where their operands come from."""
    figure = Figure(784, 346, "The three products of a linear layer at O3: both operands in FP8, the result in half")
    x = 24.0
    for role, words in (("sign", "FP8, one byte"), ("half", "float16 or bfloat16")):
        figure.rect(role, x, 14, 16, 16, radius=3)
        figure.text(x + 22, 27, words, role="note")
        x += 44 + 7.0 * len(words)
    gradient = ("gradient of output", "e5m2", "rounded in the backward")
    rows = (
        ("forward", ("input", "e4m3", "rounded in the forward"), ("weight", "e4m3", "written by the update"), "result"),
        ("backward", gradient, ("weight, transposed", "e4m3", "written by the update"), "gradient of input"),
        ("", ("the same, transposed", *gradient[1:]), ("input, transposed", "e4m3", "kept from forward"), "gradient of weight"),
    )  # fmt: skip
    for index, (phase, first, second, result) in enumerate(rows):
        y = 56 + 96 * index
        middle = y + 34
        figure.text(24, middle + 5, phase, role="name")
        figure.box("sign", 110, y, 176, 68, first)
        figure.text(304, middle + 6, "x", anchor="middle")
        figure.box("sign", 322, y, 176, 68, second)
        figure.arrow((498, middle), (560, middle))
        figure.box("half", 562, y, 198, 68, (result, "sums in float32,", "both scales undone"))
    return figure.svg()


# ------------------------------------------------------------------------------------------ what each level computes in

#: A small network, operator by operator; its input is float32.
NETWORK = ("linear", "relu", "layer_norm", "linear", "softmax", "linear", "cross_entropy")
#: Level -> for each operator the format that it computes in, and that of its result.
_F32, _HALF = ("float32", "float32"), ("half", "half")
_FP8, _INSIDE, _OD = ("FP8", "half"), ("float32", "half"), ("half", "float32")
CASTS = {
    "O0": (_F32, _F32, _F32, _F32, _F32, _F32, _F32),
    "OD": (_OD, _F32, _F32, _OD, _F32, _OD, _F32),
    "O1": (_HALF, _HALF, _F32, _HALF, _F32, _HALF, _F32),
    "O2": (_HALF, _HALF, _INSIDE, _HALF, _INSIDE, _HALF, _F32),
    "O3": (_HALF, _HALF, _INSIDE, _FP8, _INSIDE, _HALF, _F32),  # the first and the last layer stay in half
}


def draw_casts() -> str:
    """Return one network at every level: the format of each operator, and where the format of the data changes."""
    figure = Figure(812, 348, "One network at the levels O0, OD, O1, O2 and O3: formats, and where they change")
    x = 62.0
    for role, words in (("full", "computes in float32"), ("half", "computes in half"), ("sign", "computes in FP8")):
        figure.rect(role, x, 14, 16, 16, radius=3)
        figure.text(x + 22, 27, words, role="note")
        x += 172
    figure.diamond("work", x + 8, 22)
    figure.text(x + 24, 27, "the data change their format", role="note")
    left, step, width = 62, 105, 88
    for column, name in enumerate(NETWORK):
        figure.text(left + 8 + step * column + width / 2, 60, name, role="name", anchor="middle")
    for row, (level, cells) in enumerate(CASTS.items()):
        y = 74 + 54 * row
        middle = y + 20
        figure.text(16, middle + 5, level, role="name")
        before = "float32"
        for column, (inside, result) in enumerate(cells):
            start = left + 8 + step * column
            figure.arrow((start - 16, middle), (start - 2, middle))
            role = {"float32": "full", "half": "half", "FP8": "sign"}[inside]
            figure.rect(role, start, y, width, 40)
            figure.text(start + width / 2, middle + 5, f"gives {result}", role="small", anchor="middle")
            changes = before != (result if inside == "float32" else "half")
            if changes or (column and cells[column - 1] == _OD):
                figure.diamond("work", start - 9, middle)
            before = result
    return figure.svg()


# ---------------------------------------------------------------------------------------- why losses are scaled, and masters


def draw_scaling() -> str:
    """Return a histogram of gradients in float16, without and with a loss scale: what is lost, what is kept."""
    figure = Figure(760, 372, "Gradients in float16: a loss scale of 2^15 moves them into the range of float16")
    left, right, low, high = 40.0, 736.0, -42, 18

    def place(exponent: float) -> float:
        return left + (right - left) * (exponent - low) / (high - low)

    x = left
    for role, words in (("work", "become zero"), ("sign", "subnormal: fewer bits"), ("half", "full precision")):
        figure.rect(role, x, 12, 16, 16, radius=3)
        figure.text(x + 22, 25, words, role="note")
        x += 50 + 7.0 * len(words)
    for top, shift, words in ((44, 0, "gradients of the loss"), (208, 15, "gradients of the loss x 2^15")):
        base = top + 108
        for exponent in range(-38, -8):
            share = 2.0 ** -(((exponent + 23) / 7) ** 2)  # an example: a bell, as gradients often have
            here = exponent + shift
            role = "work" if here < -24 else "sign" if here < -14 else "half"
            figure.rect(role, place(here) + 1, base - 92 * share, place(1) - place(0) - 2, 92 * share, radius=1)
        figure.text(left, top + 12, words, role="name")
        figure.line((left - 8, base), (right + 8, base))
        for exponent, mark in (
            (-40, "2^-40"),
            (-24, "2^-24, smallest"),
            (-14, "2^-14"),
            (0, "1"),
            (16, "2^16, overflow"),
        ):
            figure.line((place(exponent), base - 4), (place(exponent), base + 4))
            figure.text(
                place(exponent) + (20 if exponent == 16 else 0),
                base + 20,
                mark,
                role="note",
                anchor="middle" if exponent < 16 else "end",
            )
        for exponent in (-24, 16):
            figure.line((place(exponent), top + 10), (place(exponent), base))
    figure.arrow(
        (place(-23), 176), (place(-8), 202), label="every gradient moves up by 15 powers of two", at=(444, 196)
    )
    return figure.svg()


#: Updates of this many parts of the distance between two neighbouring half numbers.
UPDATE_PARTS = 4


def draw_masters() -> str:
    """Return a weight under small updates: stored in half only, and as a float32 master with a half copy."""
    figure = Figure(760, 330, "A weight of 1 under updates of 2^-12, stored in half only and with a float32 master")
    left, bottom, step, unit = 150.0, 262.0, 64.0, 84.0
    x = 24.0
    for role, words in (("full", "float32 master"), ("half", "half copy of the master"), ("work", "half only")):
        figure.rect(role, x, 12, 16, 16, radius=3)
        figure.text(x + 22, 25, words, role="note")
        x += 60 + 7.0 * len(words)
    for level, name in enumerate(("1", "1 + 2^-10", "1 + 2^-9")):
        y = bottom - unit * level
        figure.line((left - 10, y), (left + step * 8 + 60, y))
        figure.text(left - 18, y + 5, name, role="small", anchor="end")
    figure.text(24, 58, "float16 numbers", role="note")
    for number in range(9):
        start = left + step * number
        master = number / UPDATE_PARTS
        half = round(master)  # to nearest, ties to even, as the hardware rounds
        for offset, role, value in ((4, "full", master), (20, "half", half), (36, "work", 0.0)):
            figure.rect(role, start + offset, bottom - unit * value - 6, 12, 12, radius=2, edge=True)
        figure.text(start + 26, bottom + 28, str(number), role="small", anchor="middle")
    figure.text(left - 18, bottom + 28, "step", role="note", anchor="end")
    figure.text(
        24, bottom + 54, "Each update adds 2^-12, a quarter of the distance between two float16 numbers.", role="note"
    )
    return figure.svg()


# -------------------------------------------------------------------------------------------------- a captured step


def draw_capture() -> str:
    """Return the time of a step with many small kernels: launched one by one, and replayed as one graph."""
    figure = Figure(760, 316, "A step of small kernels in eager mode, and the same step as one CUDA graph")
    x = 96.0
    for role, words in (("full", "work of the host"), ("half", "kernel on the GPU"), ("faint", "the GPU waits")):
        figure.rect(role, x, 12, 16, 16, radius=3)
        figure.text(x + 22, 25, words, role="note")
        x += 60 + 7.0 * len(words)
    start, launch, kernel = 96.0, 68.0, 26.0
    names = ("forward", "forward", "loss", "backward", "backward", "check", "update")
    figure.text(96, 60, "eager: the host launches each kernel", role="name")
    figure.text(24, 90, "host", role="note")
    figure.text(24, 130, "GPU", role="note")
    figure.rect("faint", start + launch, 112, launch * 6 + kernel, 28, radius=0)
    for index, name in enumerate(names):
        figure.rect("full", start + launch * index, 72, launch - 3, 28, radius=3)
        figure.text(start + launch * index + 32, 90, name, role="small", anchor="middle")
        figure.rect("half", start + launch * (index + 1), 112, kernel, 28, radius=3)
    end = start + launch * 7 + kernel
    figure.line((end, 66), (end, 150))
    figure.text(end + 8, 130, "end of the step", role="note")
    figure.text(96, 196, "captured: the host replays one graph", role="name")
    figure.text(24, 226, "host", role="note")
    figure.text(24, 266, "GPU", role="note")
    figure.box("full", start, 208, launch + 8, 28, ("replay",))
    for index in range(len(names)):
        figure.rect("half", start + launch + 8 + (kernel + 2) * index, 248, kernel, 28, radius=3)
    end = start + launch + 8 + (kernel + 2) * len(names)
    figure.line((end, 202), (end, 286))
    figure.text(end + 8, 266, "end of the step", role="note")
    figure.text(96, 306, "The kernels are the same; only the gaps between them go.", role="note")
    return figure.svg()


# ----------------------------------------------------------------------------------------------- the layers of mezzo

#: Frame label -> rows from top to bottom, each (role, packages, what they hold). tests/test_layers.py has the same order.
LAYERS = (
    ("tools and application", (
        ("work", ("cli",), "the mezzo command: parse, call one function, exit code"),
        ("work", ("tipc",), "certification: config text, plan, run, report"),
        ("work", ("bench",), "side-by-side measurements: one frame, a file per question"),
        ("work", ("vision",), "networks, data, recipes, training, image prediction"),
    )),
    ("library", (
        ("full", ("integrations",), "plugins for Lightning, timm and other frameworks"),
        ("full", ("model",), "Model, callbacks, metrics; processes, checkpoints of a loop"),
        ("full", ("proof",), "doctor, bisect, accuracy comparison"),
        ("full", ("trial",), "a copy of a model, trained for a few steps to measure it"),
        ("full", ("static",), "graph mode: a whole step captured and replayed"),
        ("half", ("precision",), "Precision: the one object of a run, and its training step"),
        ("full", ("export",), "a module as verified .pt2 or ONNX, and engines that run them"),
        ("full", ("record",), "what ran, in which dtype, with which numbers; listeners"),
        ("full", ("amp",), "policy, lists, kernels, auto_cast, decorate, GradScaler"),
        ("full", ("kernels",), "operators of mezzo's own: norms, cross entropy"),
        ("full", ("optim",), "float32 masters; the step: check, update, rescale"),
        ("full", ("fp8", "checkpoint"), "FP8 products;  weights and states as files"),
    )),
    ("ground", (
        ("sign", ("fetch", "report"), "downloads;  pages, pictures and tables"),
        ("sign", ("files",), "every file from outside is read here, with limits"),
        ("sign", ("_torch", "devices"), "torch's private interfaces;  names of devices"),
        ("sign", ("dtypes", "errors"), "names of levels and dtypes;  MezzoError"),
    )),
)  # fmt: skip


def draw_layers() -> str:
    """Return the packages of mezzo as layers: each imports only what is below it."""
    height = 34
    figure = Figure(760, 64 + sum(height * len(rows) + 34 for _, rows in LAYERS), "The packages of mezzo, as layers")
    figure.text(24, 26, "Each package imports only packages below it, and only their public names.", role="note")
    y = 62
    for label, rows in LAYERS:
        figure.frame(16, y, 728, height * len(rows) + 8, label)
        for role, packages, holds in rows:
            width = 230 / len(packages)
            for index, package in enumerate(packages):
                figure.box(role, 28 + width * index, y + 8, width - 6, 26, (package,))
            figure.text(272, y + 26, holds, role="small")
            y += height
        y += 34
    return figure.svg()


def draw_step() -> str:
    """Return the way from a loss to an updated weight, call by call."""
    figure = Figure(760, 470, "From the loss to the updated weight: the calls of one training step")
    rows = (
        ("half", ("precision.backward(loss)",), "scales the loss (float16 only), then loss.backward()"),
        ("half", ("precision.step(optimizer)",), "the one call of a step"),
        ("full", ("GradScaler.step",), "holds the scale and what the earlier steps found"),
        ("full", ("StepEngine.step",), "one per optimizer; runs torch's step hooks around the update"),
        ("sign", ("StepPlan.check",), "launch 1: reads all gradients once: overflow, norm, clip factor"),
        ("sign", ("StepPlan.update",), "launch 2: unscale, clip, optimizer rule, master, half weight"),
        ("sign", ("GradScaler.update",), "launch 3: the new loss scale; nothing waits for the device"),
    )
    for index, (role, name, holds) in enumerate(rows):
        y = 20 + 64 * index
        figure.box(role, 24, y, 230, 42, name)
        figure.text(276, y + 26, holds, role="small")
        if index + 1 < len(rows):
            figure.arrow((139, y + 42), (139, y + 62))
    return figure.svg()


# ------------------------------------------------------------------------------------------- speed and memory, measured

MEASURED = Path(__file__).parent / "speed.json"


def draw_speed(measured: Path = MEASURED) -> str:
    """Return time of a step and peak memory, with and without mezzo; eager torch.autocast is the full width."""
    content: dict[str, Any] = json.loads(measured.read_text(encoding="utf-8"))
    bar, gap = 20, 26
    rows = sum(len(network["rows"]) for network in content["networks"])
    height = 76 + rows * bar + len(content["networks"]) * gap
    figure = Figure(760, height, "Time of a training step and peak memory, torch.autocast and mezzo, on an H200")
    panels = ((230.0, 250.0, "ms", "ms per step (less is better)"), (530.0, 190.0, "gib", "peak memory, GiB"))
    for left, _, _, title in panels:
        figure.text(left, 26, title, role="name")
    y = 40.0
    for network in content["networks"]:
        figure.text(24, y + 18, network["name"], role="name")
        figure.text(230, y + 18, network["batch"], role="note")
        y += gap
        base = network["rows"][0]
        for row in network["rows"]:
            figure.text(218, y + 14, content["sides"][row["side"]], role="small", anchor="end")
            for left, width, key, _ in panels:
                if row[key] is None:
                    continue
                length = width * row[key] / base[key]
                role = "half" if row["side"].startswith("mezzo") else "work"
                figure.rect(role, left, y + 1, length, bar - 3, radius=2)
                share = "" if row is base else f" ({100 * row[key] / base[key]:.0f} %)"
                figure.text(left + 6, y + 14, f"{row[key]:.1f}{share}", role="small")
            y += bar
    figure.text(24, y + 22, f"{content['hardware']}. In brackets: of torch.autocast.", role="note")
    return figure.svg()


FIGURES: dict[str, Callable[[], str]] = {
    "formats_bits.svg": draw_bits,
    "formats_ranges.svg": draw_ranges,
    "flow_o1.svg": draw_o1,
    "flow_o2.svg": draw_o2,
    "flow_o3.svg": draw_o3,
    "casts.svg": draw_casts,
    "scaling.svg": draw_scaling,
    "masters.svg": draw_masters,
    "capture.svg": draw_capture,
    "layers.svg": draw_layers,
    "step.svg": draw_step,
    "speed.svg": draw_speed,
}


def write_figures(folder: Path) -> None:
    """Write every figure into a folder."""
    for name, draw in FIGURES.items():
        (folder / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    write_figures(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
