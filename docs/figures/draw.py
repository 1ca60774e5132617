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

    def rect(self, role: str, x: float, y: float, width: float, height: float, *, radius: float = 5) -> None:
        """Draw a filled rectangle."""
        self._parts.append(
            f'<rect class="{role}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"/>'
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
