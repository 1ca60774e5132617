"""How near each layer is to float16's limits: the largest value of every operator, and what would underflow.

Magnitudes are counted by power of two on the device; the host reads all counts at once on request.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mezzo._torch.modes import no_dispatch_modes
from mezzo._torch.storages import storage_id
from mezzo.dtypes import dtype_name
from mezzo.record._findings import own_infinities, readable, results
from mezzo.record._kernel_runs import KernelOp, KernelRun, Phase
from mezzo.record._listening import listening
from mezzo.record._tensor_numbers import FLOAT16_MAX, FLOAT16_NORMAL_FROM, undisturbed

# The bits of a float32 magnitude, read as an integer, are in the order of the magnitudes, and the exponent stands above
# 23 bits. Bin 0 holds what is not finite, bin 1 zeros, bin b > 1 magnitudes over 2^(b - 129) up to 2^(b - 128).
_MANTISSA_BITS, _INF_BITS, _BAD = 23, 0x7F800000, -(2**23)
_EXPONENT_OF_BIN_0, _NUM_BINS = -128, 257
_LAST_TO_ZERO = -25  # float16 rounds magnitudes up to 2^-25 to zero

TO_FLOAT16 = " -> float16"
"""Suffix of an operator's name for values before their cast to float16."""

Order = Literal["margin", "underflow"]


@dataclass(frozen=True, slots=True)
class RangeRow:
    """The results of one operator in one module, over all its calls."""

    module: str
    phase: Phase
    op: str
    """Torch-level call; in the backward the one whose gradient it is. `linear -> float16`: values that were cast to float16
    there (inputs, weights; on a CPU without half units results too), as they were before the cast."""
    is_gradient: bool
    """False in the forward, and for values that a backward computes only from the forward: `2 * x`
    for the gradient of `x ** 2`, or a repeated forward. The loss scale does not change them."""
    dtype: str
    """Dtype of the values."""
    calls: int
    values: int
    largest: float
    """Largest finite magnitude; 0 if there is none."""
    margin: float | None
    """How many times `largest` can be doubled before it is more than 65504, in powers of two; negative: it is already.
    None if all values are zero or not finite."""
    non_finite: int
    """NaN and inf."""
    zero_share: float
    """Of all values."""
    subnormal_share: float
    """Of the non-zero values: what is, or would be, subnormal in float16."""
    to_zero_share: float
    """Of the non-zero values: what float16 rounds to zero."""


@dataclass(frozen=True, slots=True)
class ScaleSuggestion:
    """A loss scale for the gradients that were recorded."""

    loss_scale: float
    """Largest power of two with which the largest gradient, times the headroom, is at most 65504."""
    largest: float
    """Largest gradient, with the loss scale that it was recorded with."""
    to_zero_now: float
    """Share of the non-zero gradients that float16 rounds to zero as they were recorded."""
    to_zero_then: float
    """The same share with the suggested scale."""


_Key = tuple[str, Phase, str, bool, str]


class _ForwardBorn:
    """Memory of tensors of the forward, and of those that a backward computes only from them."""

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}  # the reference keeps the key from being used again
        self._limit = 2**14

    def add(self, tensors: Iterable[Tensor]) -> None:
        for storage in (tensor.untyped_storage() for tensor in tensors if readable(tensor)):
            self._storages.setdefault(storage_id(storage), StorageWeakRef(storage))
        if len(self._storages) > self._limit:
            self._storages = {key: ref for key, ref in self._storages.items() if not ref.expired()}
            self._limit = max(self._limit, 2 * len(self._storages))

    def holds(self, tensor: Tensor) -> bool:
        return readable(tensor) and storage_id(tensor.untyped_storage()) in self._storages

    def is_gradient(self, kernel: KernelRun) -> bool:
        """Return whether a kernel computes a gradient; note tensors that come from the forward only."""
        inputs = list(kernel.inputs())
        starts = kernel.op.name == "ones_like"  # the gradient of the loss with respect to itself
        if kernel.phase == "backward" and (starts or not inputs or not all(map(self.holds, inputs))):
            return True
        self.add((*inputs, *kernel.outputs()))
        return False


@dataclass(slots=True)
class _Counts:
    """The counts of one row, on a device or read from it."""

    bins: Any
    """Number of values by power of two; the last entry counts values below float16's smallest normal number."""
    largest: Any
    """The bits of the largest magnitude."""
    calls: int = 0


class Ranges:
    """The counts of `collect_ranges`; they can be read during the recording and afterwards."""

    wants_lines = False
    wants_times = False

    def __init__(self) -> None:
        self._counts: dict[tuple[_Key, torch.device], _Counts] = {}
        self._forward_born = _ForwardBorn()
        self._read: dict[_Key, _Counts] | None = None
        self._lock = threading.Lock()

    def wants(self, op: KernelOp) -> bool:
        """Whether an operator is followed: also views, because the gradient of a view is named after it."""
        return op.has_tensors

    def receive(self, kernel: KernelRun) -> None:
        """Count the results of a kernel, unless the user passed infinities to it on purpose."""
        if kernel.phase == "optimizer" or not kernel.op.computes:
            return
        with undisturbed(), self._lock:
            is_gradient = self._forward_born.is_gradient(kernel)
            if own_infinities(kernel):
                return
            self._read = None
            for op, dtype, tensor in _counted(kernel):
                self._add((kernel.module, kernel.phase, op, is_gradient, dtype_name(dtype)), *_count(tensor))

    def _add(self, key: _Key, bins: Tensor, largest: Tensor) -> None:
        counts = self._counts.get((key, bins.device))
        if counts is None:
            counts = self._counts[key, bins.device] = _Counts(bins, largest)
        else:
            counts.bins.add_(bins)
            torch.maximum(counts.largest, largest, out=counts.largest)
        counts.calls += 1

    def _totals(self) -> dict[_Key, _Counts]:
        """Read the counts: one transfer per device."""
        with self._lock, no_dispatch_modes(), undisturbed():  # reading is not recorded
            if self._read is None:
                self._read = {}
                for device in {device for _, device in self._counts}:
                    self._read_device(device, self._read)
            return self._read

    def _read_device(self, device: torch.device, totals: dict[_Key, _Counts]) -> None:
        found = [(key, counts) for (key, where), counts in self._counts.items() if where == device]
        rows = torch.stack([torch.cat((counts.bins, counts.largest.reshape(1))) for _, counts in found]).tolist()
        for (key, counts), row in zip(found, rows, strict=True):
            total = totals.setdefault(key, _Counts([0] * (_NUM_BINS + 1), 0))
            total.bins = [a + b for a, b in zip(total.bins, row[:-1], strict=True)]
            total.largest = max(total.largest, row[-1])
            total.calls += counts.calls

    @property
    def rows(self) -> list[RangeRow]:
        """One row per module, phase, operator and dtype: non-finite values first, then the smallest margin."""
        rows = [_row(key, counts) for key, counts in self._totals().items()]
        return sorted(rows, key=_by_margin)

    def table(self, limit: int | None = 20, *, by: Order = "margin", phase: Phase | None = None) -> str:
        """Return the rows as a table.

        Args:
            limit: Maximum number of rows; None: all.
            by: `margin`: nearest to 65504 first. `underflow`: largest share of zeros and subnormals first.
            phase: Only the forward, or only the backward.
        """
        if by not in _ORDERS:
            raise ValueError(f"by={by!r}: must be 'margin' or 'underflow'")
        rows = sorted((row for row in self.rows if phase in (None, row.phase)), key=_ORDERS[by])
        shown = rows if limit is None else rows[:limit]
        width = max([len(row.module) for row in shown] + [len("module")])
        wide = max([len(row.op) for row in shown] + [len("operator")])
        lines = [
            f"{'module':<{width}}  {'phase':<9}  {'operator':<{wide}}  {'dtype':<8}  {'largest':>10}  {'margin':>7}  "
            f"{'to zero':>7}  {'subnormal':>9}  {'inf, nan':>8}"
        ]
        for row in shown:
            margin = "" if row.margin is None else f"{row.margin:+.1f}"
            phase_of_row = f"{row.phase}*" if row.phase == "backward" and not row.is_gradient else row.phase
            lines.append(
                f"{row.module:<{width}}  {phase_of_row:<9}  {row.op:<{wide}}  {row.dtype:<8}  {row.largest:>10.4g}  "
                f"{margin:>7}  {row.to_zero_share:>7.1%}  {row.subnormal_share:>9.1%}  {row.non_finite or '':>8}"
            )
        if len(shown) < len(rows):
            lines.append(f"... and {len(rows) - len(shown)} more")
        if any(row.phase == "backward" and not row.is_gradient for row in shown):
            lines.append("* no gradient: computed only from the forward, so the loss scale does not change it")
        return "\n".join(lines) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Return the rows for JSON."""
        return {"rows": [asdict(row) for row in self.rows]}

    def suggest_scale(self, loss_scale: float = 1.0, *, headroom: float = 4.0) -> ScaleSuggestion:
        """Return a loss scale that suits the recorded gradients.

        It uses float16 gradients if there are any, otherwise all. Values that were zero already are not counted: record
        in float32 to see what would underflow. A gradient that is passed to `backward` must be made outside the
        recording, otherwise it counts as part of the forward.

        Args:
            loss_scale: The loss scale during the recording. Magnitudes are counted by power of two: if the scale is not
                a power of two, `to_zero_then` is a lower bound.
            headroom: How much larger gradients may become.
        """
        if not loss_scale > 0:
            raise ValueError(f"loss_scale={loss_scale!r}: must be more than 0")
        if not headroom >= 1:
            raise ValueError(f"headroom={headroom!r}: must be at least 1")
        gradients = {key: counts for key, counts in self._totals().items() if key[3]}
        in_half = [counts for key, counts in gradients.items() if key[4] == "float16"]
        chosen = in_half or list(gradients.values())
        largest = max((_as_float(counts.largest) for counts in chosen), default=0.0)
        if not largest:
            raise ValueError("no gradient other than zero was recorded; run a backward inside collect_ranges()")
        factor = math.floor(math.log2(FLOAT16_MAX / headroom / largest))
        # round down to a power of two, whatever the recorded scale was
        exponent = math.floor(math.log2(loss_scale * 2.0**factor))
        shift = exponent - math.log2(loss_scale)
        return ScaleSuggestion(2.0**exponent, largest, _to_zero_share(chosen, 0.0), _to_zero_share(chosen, shift))


def _counted(kernel: KernelRun) -> Iterator[tuple[str, torch.dtype, Tensor]]:
    """Yield name, dtype and values to count; for a cast to float16, the values before the cast."""
    op = kernel.api_op or kernel.forward_op or kernel.op.name
    if kernel.cast is None:
        yield from ((op, tensor.dtype, tensor) for _, tensor in results(kernel))
        return
    source, target = kernel.cast
    if target.dtype is torch.float16 and readable(source):
        yield f"{op}{TO_FLOAT16}", target.dtype, source


def _count(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return, on the device, the counts of `_Counts.bins` for a tensor, and the bits of its largest magnitude."""
    magnitude = tensor.float().abs()
    bits = magnitude.view(torch.int32)
    bits = torch.where(bits < _INF_BITS, bits, _BAD)
    bins = ((bits - 1) >> _MANTISSA_BITS) + 2
    if tensor.device.type == "cpu":
        counts = torch.bincount(bins.flatten(), minlength=_NUM_BINS)
    else:  # bincount waits for the device
        counts = torch.histc(bins, bins=_NUM_BINS, min=0, max=_NUM_BINS - 1).long()
    num_small = (magnitude < FLOAT16_NORMAL_FROM).sum()
    return torch.cat((counts, num_small.reshape(1))), bits.amax().clamp(min=0).long()


def _as_float(bits: int) -> float:
    return float(torch.tensor(bits, dtype=torch.int32).view(torch.float32).item())


def _up_to(counts: _Counts, exponent: float) -> int:
    """Return how many non-zero magnitudes are at most 2^exponent."""
    end = math.floor(exponent) - _EXPONENT_OF_BIN_0
    return int(sum(counts.bins[2 : max(2, end + 1)]))


def _num_nonzero(counts: _Counts) -> int:
    return int(sum(counts.bins[2:_NUM_BINS]))


def _to_zero_share(chosen: Sequence[_Counts], shift: float) -> float:
    """Return the share of non-zero magnitudes that round to zero after multiplication by 2^shift."""
    total = sum(map(_num_nonzero, chosen))
    return sum(_up_to(counts, _LAST_TO_ZERO - shift) for counts in chosen) / total if total else 0.0


def _row(key: _Key, counts: _Counts) -> RangeRow:
    module, phase, op, is_gradient, dtype = key
    bins, largest = counts.bins, _as_float(counts.largest)
    values, nonzero = sum(bins[:_NUM_BINS]), _num_nonzero(counts)
    to_zero = _up_to(counts, _LAST_TO_ZERO)
    subnormal = bins[_NUM_BINS] - bins[1] - to_zero
    return RangeRow(
        module, phase, op, is_gradient, dtype, counts.calls, values, largest,
        margin=math.log2(FLOAT16_MAX / largest) if largest else None,
        non_finite=bins[0],
        zero_share=bins[1] / values if values else 0.0,
        subnormal_share=subnormal / nonzero if nonzero else 0.0,
        to_zero_share=to_zero / nonzero if nonzero else 0.0,
    )  # fmt: skip


def _by_margin(row: RangeRow) -> tuple[Any, ...]:
    margin = math.inf if row.margin is None else row.margin
    return row.non_finite == 0, margin, row.module, row.phase, row.op, row.dtype


def _by_underflow(row: RangeRow) -> tuple[Any, ...]:
    return -row.to_zero_share, -row.subnormal_share, row.module, row.phase, row.op, row.dtype


_ORDERS: dict[str, Callable[[RangeRow], tuple[Any, ...]]] = {"margin": _by_margin, "underflow": _by_underflow}


@contextmanager
def collect_ranges() -> Iterator[Ranges]:
    """Count, per operator and module, the magnitudes of results in the forward and of gradients in the backward.

    In a float32 run it shows what would happen in float16, in a float16 run what does happen. Values are as stored in
    memory: gradients are multiplied by the loss scale. No host synchronisation. Each kernel is followed by about a dozen
    small ones, and by temporary copies of one result at a time.

    >>> with collect_ranges() as ranges:
    ...     _ = torch.full((4,), 2.0) * 1024
    >>> [(row.op, row.largest, round(row.margin)) for row in ranges.rows]
    [('mul', 2048.0, 5), ('full', 2.0, 15)]
    """
    ranges = Ranges()
    with listening(ranges):
        yield ranges
