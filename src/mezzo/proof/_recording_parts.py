"""Parts of the pages of a recording: work by class, operators, the tree of modules, kernels."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mezzo.dtypes import HALF_NAMES
from mezzo.proof._products import is_product
from mezzo.record import KernelRow, ModuleRow, OperatorRow, OperatorStats
from mezzo.report import bytes_text, percent, plural, time_text

MOST_ROWS = 40
"""Longest list of kernels, casts or leaks on a page."""
MOST_OPEN_MODULES = 40
"""Rows of the tree of modules that are open at first."""
NAME_WIDTH = 72

_NAMESPACES = re.compile(r"(?:\(anonymous namespace\)::|\b[A-Za-z_]\w*::)+")
_LAMBDAS = re.compile(r"::\{lambda.*?\}|::operator\(\)(?:\(\))?(?: const)?|\([^()]*\)")


# ------------------------------------------------------------------------------------------------- work by class


@dataclass(frozen=True, slots=True)
class WorkPart:
    """A class of work."""

    label: str
    style: str
    """Class of the style sheet."""
    amount: float
    """Microseconds, or calls."""


_CASTS, _REST = ("casts", "casts"), ("the rest", "rest")
_ON_CORES, _ORDINARY = ("products on Tensor Cores", "cores"), ("products on ordinary units", "ordinary")
_IN_HALF, _IN_FULL = ("products in half", "cores"), ("products in float32", "ordinary")


def work_parts(stats: OperatorStats) -> list[WorkPart]:
    """Return the work by class: the time of kernels or, if they were not timed, the number of calls.

    On a GPU products are split by the units that they ran on, otherwise by dtype.
    """
    return _time_parts(stats) if stats.kernels else _call_parts(stats)


def _time_parts(stats: OperatorStats) -> list[WorkPart]:
    has_cores = stats.tensor_core_share is not None
    classes = (_ON_CORES, _ORDINARY, _CASTS, _REST) if has_cores else (_IN_HALF, _IN_FULL, _CASTS, _REST)
    sums = dict.fromkeys(classes, 0.0)
    for kernel in stats.kernels:
        sums[_class_of(kernel, has_cores=has_cores)] += kernel.time_us
    return [WorkPart(*which, amount) for which, amount in sums.items()]


def _class_of(kernel: KernelRow, *, has_cores: bool) -> tuple[str, str]:
    if kernel.on_tensor_cores:
        return _ON_CORES
    if is_product(kernel.op):
        return _ORDINARY if has_cores else _IN_HALF if kernel.dtype in HALF_NAMES else _IN_FULL
    return _CASTS if kernel.is_cast else _REST


def _call_parts(stats: OperatorStats) -> list[WorkPart]:
    half, products = count_products(stats)
    casts = sum(row.calls for row in stats.casts)
    total = sum(sum(calls) for calls in stats.totals().values())
    amounts = {_IN_HALF: half, _IN_FULL: products - half, _CASTS: casts, _REST: total - products - casts}
    return [WorkPart(*which, amount) for which, amount in amounts.items()]


def count_products(stats: OperatorStats) -> tuple[int, int]:
    """Return the number of products in half, and of all products."""
    rows = [row for row in stats.rows if is_product(row.op)]
    return sum(row.fp16 + row.bf16 for row in rows), sum(calls_of(row) for row in rows)


def count_computed_inside(stats: OperatorStats) -> int:
    """Return the number of white products of the forward pass that a CPU without half units computed in float32."""
    if stats.tensor_core_share is not None:
        return 0
    rows = [row for row in stats.rows if is_product(row.op) and row.phase == "forward"]
    return sum(row.fp32 for row in rows if row.reason.startswith("white"))


def calls_of(row: OperatorRow) -> int:
    """Return the number of calls in all dtypes."""
    return row.fp16 + row.bf16 + row.fp32 + row.other


# ------------------------------------------------------------------------------------------------- operators


@dataclass(frozen=True, slots=True)
class Operator:
    """All calls of one dispatcher operator."""

    name: str
    is_product: bool
    calls: Sequence[int]
    """In float16, bfloat16, float32 and other dtypes."""
    reasons: tuple[str, ...]
    """Distinct reasons of the policy; gradients follow the dtype of the forward pass."""


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
class ModuleNode:
    """A module of the tree."""

    row: ModuleRow
    depth: int
    name: str
    """Last name of its path; empty for the root."""
    is_open: bool = False
    children: list["ModuleNode"] = field(default_factory=list)


def module_tree(stats: OperatorStats) -> ModuleNode | None:
    """Return the tree of modules, sorted naturally; None if nothing ran."""
    nodes: dict[str, ModuleNode] = {}
    rows = {row.module: row for row in stats.by_module()}
    for path in sorted(rows, key=_naturally):
        names = path.split(".") if path else []
        nodes[path] = ModuleNode(rows[path], len(names), names[-1] if names else "")
        if path:
            nodes[".".join(names[:-1])].children.append(nodes[path])
    _open(list(nodes.values()))
    return nodes.get("")


def _naturally(path: str) -> list[list[tuple[int, int, str]]]:
    """Return a sort key that puts `layer.2` before `layer.10`, and a module right before its children."""
    pieces = [re.findall(r"[0-9]+|[^0-9]+", name) for name in path.split(".")] if path else []
    return [[(0, int(each), each) if each[0] in "0123456789" else (1, 0, each) for each in name] for name in pieces]


def _open(nodes: list[ModuleNode]) -> None:
    """Open whole levels from the top while they fit; always open the first."""
    for node in nodes:
        shown = sum(other.depth <= node.depth + 1 for other in nodes)
        node.is_open = node.depth == 0 or shown <= MOST_OPEN_MODULES


# ------------------------------------------------------------------------------------------------- kernels


@dataclass(frozen=True, slots=True)
class Kernel:
    """All launches of one kernel of the device."""

    name: str
    short: str
    ops: tuple[str, ...]
    """Operators that launched it."""
    on_tensor_cores: bool | None
    calls: int
    time_us: float


def kernels(stats: OperatorStats) -> list[Kernel]:
    """Return the kernels, the slowest first."""
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
    """Return a C++ kernel name without result, parameters and namespaces, shortened to one line.

    >>> short_kernel("void at::native::elementwise_kernel<4, at::native::Add<float> >(int, at::native::Add<float>)")
    'elementwise_kernel<4, Add<float> >'
    """
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    name = name[: _begin_of_parameters(name)]
    name = _NAMESPACES.sub("", _LAMBDAS.sub("", name))
    if len(name) <= NAME_WIDTH:
        return name
    if "<" in name:  # the start of a template matters most
        return f"{name[: NAME_WIDTH - 1]}…"
    return f"{name[: NAME_WIDTH // 2]}…{name[1 - NAME_WIDTH // 2 :]}"


def _begin_of_parameters(name: str) -> int:
    """Return the position of the first parenthesis outside template arguments."""
    depth = 0
    for place, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0 and place:
            return place
    return len(name)


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
"""Functions that `recording_parts.html.jinja` calls."""
