"""What pages show of a recording: its work by class, operators, a tree of modules, kernels under readable names."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mezzo.dtypes import HALF_NAMES
from mezzo.proof._advice import time_text
from mezzo.proof._products import is_product
from mezzo.record import KernelRow, ModuleRow, OperatorRow, OperatorStats

MOST_ROWS = 40
"""Kernels, casts and leaks that a page lists; it says how many more there are."""
MOST_OPEN_MODULES = 40
"""Rows of the tree of modules that show at first; deeper levels open by a click."""
NAME_WIDTH = 72

_NAMESPACES = re.compile(r"(?:\(anonymous namespace\)::|\b[A-Za-z_]\w*::)+")
_LAMBDAS = re.compile(r"::\{lambda.*?\}|::operator\(\)(?:\(\))?(?: const)?|\([^()]*\)")


# ------------------------------------------------------------------------------------------------- work by class


@dataclass(frozen=True, slots=True)
class Part:
    """A class of work."""

    label: str
    style: str
    """Class of the style sheet."""
    amount: float
    """Microseconds, or calls."""


_CASTS, _REST = ("casts", "casts"), ("the rest", "rest")
_ON_CORES, _ORDINARY = ("products on Tensor Cores", "cores"), ("products on ordinary units", "ordinary")
_IN_HALF, _IN_FULL = ("products in half", "cores"), ("products in float32", "ordinary")


def work_parts(stats: OperatorStats) -> list[Part]:
    """Return a recording's work by class: time of its kernels or, where they were not timed, calls.

    Products are told apart by the units they ran on where that is known, on a GPU; else by their dtype.
    """
    return _time_parts(stats) if stats.kernels else _call_parts(stats)


def _time_parts(stats: OperatorStats) -> list[Part]:
    has_cores = stats.tensor_core_share is not None
    classes = (_ON_CORES, _ORDINARY, _CASTS, _REST) if has_cores else (_IN_HALF, _IN_FULL, _CASTS, _REST)
    sums = dict.fromkeys(classes, 0.0)
    for kernel in stats.kernels:
        sums[_class_of(kernel, has_cores=has_cores)] += kernel.time_us
    return [Part(*which, amount) for which, amount in sums.items()]


def _class_of(kernel: KernelRow, *, has_cores: bool) -> tuple[str, str]:
    if kernel.on_tensor_cores:
        return _ON_CORES
    if is_product(kernel.op):
        return _ORDINARY if has_cores else _IN_HALF if kernel.dtype in HALF_NAMES else _IN_FULL
    return _CASTS if kernel.is_cast else _REST


def _call_parts(stats: OperatorStats) -> list[Part]:
    half, products = count_products(stats)
    casts = sum(row.calls for row in stats.casts)
    total = sum(sum(calls) for calls in stats.totals().values())
    amounts = {_IN_HALF: half, _IN_FULL: products - half, _CASTS: casts, _REST: total - products - casts}
    return [Part(*which, amount) for which, amount in amounts.items()]


def count_products(stats: OperatorStats) -> tuple[int, int]:
    """Return how many products ran in half, and how many in all."""
    rows = [row for row in stats.rows if is_product(row.op)]
    return sum(row.fp16 + row.bf16 for row in rows), sum(calls_of(row) for row in rows)


def count_computed_inside(stats: OperatorStats) -> int:
    """Return how many white products of the forward ran in float32: on a CPU without half units, with casts around them."""
    if stats.tensor_core_share is not None:
        return 0
    rows = [row for row in stats.rows if is_product(row.op) and row.phase == "forward"]
    return sum(row.fp32 for row in rows if row.reason.startswith("white"))


def calls_of(row: OperatorRow) -> int:
    """Return the calls of a row in all dtypes."""
    return row.fp16 + row.bf16 + row.fp32 + row.other


# ------------------------------------------------------------------------------------------------- operators


@dataclass(frozen=True, slots=True)
class Operator:
    """A kernel of the dispatcher, all its calls."""

    name: str
    is_product: bool
    calls: Sequence[int]
    """In float16, bfloat16, float32 and anything else."""
    reasons: tuple[str, ...]
    """What the policy said of the calls under which it ran, each once; gradients follow them."""


def operators(stats: OperatorStats) -> list[Operator]:
    """Return the operators by name."""
    reasons: dict[str, dict[str, None]] = {}
    for row in stats.rows:
        text = f"{row.api_op}: {row.reason}" if row.api_op else row.reason
        reasons.setdefault(row.op, {})[text] = None
    return [
        Operator(name, is_product(name), calls, tuple(reasons.get(name, ()))) for name, calls in stats.totals().items()
    ]


# ------------------------------------------------------------------------------------------------- modules


@dataclass(slots=True)
class Node:
    """A module of the tree."""

    row: ModuleRow
    depth: int
    name: str
    """The last name of its path; empty for the whole."""
    is_open: bool = False
    children: list["Node"] = field(default_factory=list)


def module_tree(stats: OperatorStats) -> Node | None:
    """Return the whole recording with the modules below it, numbers in their names counted; None if nothing ran."""
    nodes: dict[str, Node] = {}
    rows = {row.module: row for row in stats.by_module()}
    for path in sorted(rows, key=_naturally):
        names = path.split(".") if path else []
        nodes[path] = Node(rows[path], len(names), names[-1] if names else "")
        if path:
            nodes[".".join(names[:-1])].children.append(nodes[path])
    _open(list(nodes.values()))
    return nodes.get("")


def _naturally(path: str) -> list[list[tuple[int, int, str]]]:
    """Return a key that puts `layer.2` before `layer.10`, and a module right before those below it."""
    pieces = [re.findall(r"[0-9]+|[^0-9]+", name) for name in path.split(".")] if path else []
    return [[(0, int(each), each) if each[0] in "0123456789" else (1, 0, each) for each in name] for name in pieces]


def _open(nodes: list[Node]) -> None:
    """Open whole levels from the top, as many as a page shows at once; the first in any case."""
    for node in nodes:
        shown = sum(other.depth <= node.depth + 1 for other in nodes)
        node.is_open = node.depth == 0 or shown <= MOST_OPEN_MODULES


# ------------------------------------------------------------------------------------------------- kernels


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of the device, wherever it ran."""

    name: str
    short: str
    ops: tuple[str, ...]
    """Operators that launched it."""
    on_tensor_cores: bool | None
    calls: int
    time_us: float


def kernels(stats: OperatorStats) -> list[Kernel]:
    """Return the kernels, those with the most time first."""
    found: dict[tuple[str, bool | None], list[KernelRow]] = {}
    for row in stats.kernels:
        found.setdefault((row.kernel, row.on_tensor_cores), []).append(row)
    merged = [
        Kernel(
            name=name,
            short=short_kernel(name),
            ops=tuple(dict.fromkeys(row.op for row in rows if row.op)),
            on_tensor_cores=on_cores,
            calls=sum(row.calls for row in rows),
            time_us=sum(row.time_us for row in rows),
        )
        for (name, on_cores), rows in found.items()
    ]
    return sorted(merged, key=lambda kernel: (-kernel.time_us, kernel.name))


def short_kernel(name: str) -> str:
    """Return a C++ kernel's name without its result, its parameters and namespaces, cut to fit a line.

    >>> short_kernel("void at::native::elementwise_kernel<4, at::native::Add<float> >(int, at::native::Add<float>)")
    'elementwise_kernel<4, Add<float> >'
    """
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    name = name[: _begin_of_parameters(name)]
    name = _NAMESPACES.sub("", _LAMBDAS.sub("", name))
    if len(name) <= NAME_WIDTH:
        return name
    if "<" in name:  # what matters of a template stands first
        return f"{name[: NAME_WIDTH - 1]}…"
    return f"{name[: NAME_WIDTH // 2]}…{name[1 - NAME_WIDTH // 2 :]}"


def _begin_of_parameters(name: str) -> int:
    """Return where the first parenthesis outside of a template's arguments opens."""
    depth = 0
    for place, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0 and place:
            return place
    return len(name)


# ------------------------------------------------------------------------------------------------- numbers


def bytes_text(count: int) -> str:
    """Return a number of bytes in the unit that fits it.

    >>> bytes_text(512), bytes_text(3 * 2**20)
    ('512 B', '3.0 MiB')
    """
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def percent(part: float, whole: float) -> str:
    """Return a share in percent; of nothing it is 0 %.

    >>> percent(1, 3), percent(1, 0)
    ('33%', '0%')
    """
    return f"{part / whole:.0%}" if whole else "0%"


def plural(count: int, one: str) -> str:
    """Return a count with its noun.

    >>> plural(1, "leak"), plural(2000, "cast")
    ('1 leak', '2,000 casts')
    """
    return f"{count:,} {one}" if count == 1 else f"{count:,} {one}s"


TOOLS: dict[str, Any] = {
    "most_rows": MOST_ROWS,
    "work_parts": work_parts,
    "operators": operators,
    "module_tree": module_tree,
    "kernels": kernels,
    "time_text": time_text,
    "bytes_text": bytes_text,
    "percent": percent,
    "plural": plural,
}
"""What `recording_parts.html.jinja` calls."""
