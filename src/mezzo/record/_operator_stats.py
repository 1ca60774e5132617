"""The counts of a recording: operators and casts by dtype, module and phase; device kernels; float32 leaks."""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mezzo.dtypes import dtype_name
from mezzo.record._kernel_runs import KernelOp, KernelRun, Phase, cast_of, describe_op, find_tensors
from mezzo.record._kernel_times import KernelRow
from mezzo.record._leaks import Leak

Counts = tuple[int, int, int, int]
"""Calls in float16, bfloat16, float32 and other dtypes."""

COLUMNS = ("fp16", "bf16", "fp32", "other")
_COLUMN_OF: dict[torch.dtype | None, int] = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_OTHER = 3
_NAME_WIDTH = 40
_MOST_NOTED = 256

_CastPlace = tuple[str, Phase, str, torch.dtype, torch.dtype]
"""Module, phase, torch-level call, source and target."""


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """Calls of one kernel from one place, by dtype."""

    op: str
    """Kernel without overload: `addmm`; operators outside aten keep their namespace."""
    phase: Phase
    module: str
    """Path below the outermost module that was called; empty for that module itself and outside of any."""
    api_op: str
    """Torch-level call under which the kernel ran (`linear` for `addmm`); empty if the autograd engine ran it."""
    reason: str
    """The policy's reason for `api_op` with these input dtypes."""
    fp16: int
    bf16: int
    fp32: int
    other: int


@dataclass(frozen=True, slots=True)
class CastRow:
    """Casts between two dtypes at one place."""

    module: str
    phase: Phase
    api_op: str
    source: str
    target: str
    calls: int
    elements: int


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """The counts of one module and all its submodules."""

    module: str
    fp16: int
    bf16: int
    fp32: int
    other: int
    casts: int
    time_us: float
    """Time of its kernels; 0 if they were not timed."""
    tensor_core_us: float


class OperatorStats:
    """The counts of a recording; they can be read during the recording and afterwards.

    >>> from mezzo.record import collect_operator_stats
    >>> with collect_operator_stats(print_table=False) as stats:
    ...     _ = torch.ones(2) + torch.ones(2)
    >>> stats.raw()
    {'add': '0,0,1,0', 'ones': '0,0,2,0'}
    """

    wants_lines = False
    wants_times = False

    def __init__(self, *, include_views: bool = False) -> None:
        self.include_views = include_views
        self.kernels: list[KernelRow] = []
        """Device kernels with their times, after the recording; empty without `kernels=True`."""
        self.leaks: list[Leak] = []
        """float32 results that fed half operators, largest first; empty without `leaks=True`."""
        self._noted: list[tuple[str, Phase, str, str, str, int]] = []
        self._noted_casts: list[tuple[_CastPlace, int]] = []
        """Not counted yet. The backward runs in one thread per device: appending needs no lock, counting does."""
        self._lock = threading.Lock()
        self._calls: Counter[tuple[str, Phase, str, str, str, int]] = Counter()
        self._casts: dict[_CastPlace, int] = {}
        self._cast_elements: dict[_CastPlace, int] = {}

    def wants(self, op: KernelOp) -> bool:
        """Whether an operator is counted."""
        return op.has_tensors and (op.computes or self.include_views)

    def receive(self, kernel: KernelRun) -> None:
        """Count a kernel."""
        place = (kernel.phase, kernel.module, kernel.api_op, kernel.reason)
        self.add_kernel(kernel.op, kernel.args, kernel.kwargs, kernel.out, *place)

    def add_kernel(
        self, op: KernelOp, args: Sequence[Any], kwargs: dict[str, Any], out: Any,
        phase: Phase, module: str, api_op: str, reason: str,
    ) -> None:  # fmt: skip
        """Count a kernel by its row and the column of its dtype, and as a cast if it is one."""
        column = _COLUMN_OF.get(getattr(args[0], "dtype", None)) if args else None
        if column is None or op.is_fp8:
            column = _column_of(op, args, kwargs, out)
        noted = self._noted
        noted.append((op.name, phase, module, api_op, reason, column))
        if op.cast_source >= 0:
            cast = cast_of(op, args, kwargs, out)
            if cast is not None:
                source, target = cast
                self._noted_casts.append(((module, phase, api_op, source.dtype, target.dtype), target.numel()))
        if len(noted) >= _MOST_NOTED:
            with self._lock:
                self._count_noted()

    def _count_noted(self) -> None:
        """Count all noted kernels at once, which is faster than one by one. The caller holds the lock."""
        noted, casts = self._noted[:], self._noted_casts[:]
        del self._noted[: len(noted)], self._noted_casts[: len(casts)]  # other threads may have appended since
        self._calls.update(noted)
        for place, elements in casts:
            self._casts[place] = self._casts.get(place, 0) + 1
            self._cast_elements[place] = self._cast_elements.get(place, 0) + elements

    def add(self, key: tuple[str, Phase, str, str, str], column: int) -> None:
        """Count a call by its row and the column of its dtype."""
        self._noted.append((*key, column))

    def count(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, *,
        phase: Phase, module: str = "", api_op: str = "", reason: str = "",
    ) -> None:  # fmt: skip
        """Count a call that does not come from a recording, such as a node of a graph."""
        op = describe_op(func)
        if self.wants(op):
            self.receive(KernelRun(op, func, args, kwargs, out, phase, module, api_op, reason))

    @property
    def rows(self) -> list[OperatorRow]:
        """One row per kernel, phase, module, torch-level call and reason, sorted in that order."""
        rows: dict[tuple[str, Phase, str, str, str], list[int]] = {}
        with self._lock:
            self._count_noted()
            for (op, phase, module, api_op, reason, column), calls in self._calls.items():
                rows.setdefault((op, phase, module, api_op, reason), [0, 0, 0, 0])[column] += calls
        return [OperatorRow(*key, *calls) for key, calls in sorted(rows.items())]

    @property
    def casts(self) -> list[CastRow]:
        """Casts from one floating dtype to another, most elements first."""
        with self._lock:
            self._count_noted()
            counted = [(*place, calls, self._cast_elements[place]) for place, calls in self._casts.items()]
        rows = [
            CastRow(module, phase, api_op, dtype_name(source), dtype_name(target), calls, elements)
            for module, phase, api_op, source, target, calls, elements in counted
        ]
        return sorted(rows, key=lambda row: (-row.elements, row.module, row.phase, row.source, row.target, row.api_op))

    def totals(self) -> dict[str, Counts]:
        """Return the calls of each kernel in float16, bfloat16, float32 and other dtypes, sorted by name."""
        totals: dict[str, Counts] = {}
        for row in self.rows:
            fp16, bf16, fp32, other = totals.get(row.op, (0, 0, 0, 0))
            totals[row.op] = (fp16 + row.fp16, bf16 + row.bf16, fp32 + row.fp32, other + row.other)
        return totals

    def by_module(self, depth: int | None = None) -> list[ModuleRow]:
        """Return one row per module, with its submodules included, in the order of their paths.

        Args:
            depth: How many levels of a path to distinguish; None: all. The first row, with an empty path, is the total.
        """
        counts: dict[str, list[float]] = {}

        def add(path: str, column: int, amount: float) -> None:
            names = path.split(".") if path else []
            for length in range(min(len(names), len(names) if depth is None else depth) + 1):
                counts.setdefault(".".join(names[:length]), [0] * 7)[column] += amount

        for row in self.rows:
            for column, name in enumerate(COLUMNS):
                add(row.module, column, getattr(row, name))
        for cast in self.casts:
            add(cast.module, 4, cast.calls)
        for kernel in self.kernels:
            add(kernel.module, 5, kernel.time_us)
            add(kernel.module, 6, kernel.time_us if kernel.on_tensor_cores else 0)
        return [_module_row(path, amounts) for path, amounts in sorted(counts.items())]

    @property
    def kernel_time_us(self) -> float:
        """Time of all kernels together; 0 if they were not timed."""
        return sum(kernel.time_us for kernel in self.kernels)

    @property
    def tensor_core_share(self) -> float | None:
        """Share of kernel time on Tensor Cores, judged by kernel names; None if no GPU kernel was timed."""
        on_device = [kernel for kernel in self.kernels if kernel.on_tensor_cores is not None]
        total = sum(kernel.time_us for kernel in on_device)
        return sum(kernel.time_us for kernel in on_device if kernel.on_tensor_cores) / total if total else None

    @property
    def half_share(self) -> float | None:
        """Share of float16 and bfloat16 among the floating-point calls of forward and backward passes.

        FP8 products count as neither. None if nothing was counted.
        """
        rows = [row for row in self.rows if row.phase != "optimizer"]
        half = sum(row.fp16 + row.bf16 for row in rows)
        total = half + sum(row.fp32 for row in rows)
        return half / total if total else None

    def raw(self) -> dict[str, str]:
        """Return the totals as `name -> 'fp16,bf16,fp32,other'`."""
        return {name: ",".join(map(str, calls)) for name, calls in self.totals().items()}

    def to_dict(self) -> dict[str, Any]:
        """Return totals, rows, casts, kernels and leaks for JSON."""
        totals = {name: dict(zip(COLUMNS, c, strict=True)) for name, c in self.totals().items()}
        parts: dict[str, list[Any]] = {
            "rows": self.rows,
            "casts": self.casts,
            "kernels": self.kernels,
            "leaks": self.leaks,
        }
        return {
            "op_count": len(totals),
            "totals": totals,
            **{name: [asdict(row) for row in rows] for name, rows in parts.items()},
            "tensor_core_share": self.tensor_core_share,
        }

    def table(self) -> str:
        """Return the operator table: every line has 122 characters, a blank line ends it."""
        # No blank after FP32, as in Paddle's table: scripts match these bytes.
        captions = [f"{c:-^17}" for c in (" FP16 Calls ", " BF16 Calls ", " FP32 Calls", " Other Calls ")]
        totals = self.totals()
        lines = [f"<{' op list ':-^120}>", f"<{' Op Name ':-^40} | {' | '.join(captions)}>"]
        for name, calls in totals.items():
            lines.append(f"  {_shorten(name):<40}" + "".join(f"|  {count:<17}" for count in calls))
        lines.append(f"<{f' op count: {len(totals)} ':-^120}>")
        return "\n".join(lines) + "\n\n"

    def module_table(self, depth: int | None = 2) -> str:
        """Return a table with a line per module: calls by dtype, casts and, if kernels were timed, their time."""
        rows = self.by_module(depth)
        width = max([len(row.module) for row in rows] + [len("(the whole)")])
        head = f"{'module':<{width}}  {'fp16':>7} {'bf16':>7} {'fp32':>7} {'other':>7} {'casts':>7}"
        lines = [head + (f" {'time ms':>9} {'Tensor Cores':>13}" if self.kernels else "")]
        for row in rows:
            counts = (row.fp16, row.bf16, row.fp32, row.other, row.casts)
            line = f"{row.module or '(the whole)':<{width}}  {' '.join(f'{count:>7}' for count in counts)}"
            if self.kernels:
                has_share = self.tensor_core_share is not None and row.time_us > 0
                share = f"{row.tensor_core_us / row.time_us:.0%}" if has_share else ""
                line += f" {row.time_us / 1e3:>9.3f} {share:>13}"
            lines.append(line)
        return "\n".join(lines) + "\n"


def _column_of(op: KernelOp, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Return the column of the first floating input, otherwise of the first floating output; FP8 is 'other'."""
    if op.is_fp8:
        return _OTHER
    for tensor in find_tensors((*args, *kwargs.values(), out)):
        if tensor.dtype.is_floating_point:
            return _COLUMN_OF.get(tensor.dtype, _OTHER)
    return _OTHER


def _shorten(name: str) -> str:
    """Fit a name into its column by removing its middle: names of attention kernels differ at both ends."""
    half = _NAME_WIDTH // 2 - 1
    return name if len(name) <= _NAME_WIDTH else f"{name[:half]}..{name[-half:]}"


def _module_row(path: str, amounts: Sequence[float]) -> ModuleRow:
    fp16, bf16, fp32, other, casts = map(int, amounts[:5])
    return ModuleRow(path, fp16, bf16, fp32, other, casts, time_us=amounts[5], tensor_core_us=amounts[6])
