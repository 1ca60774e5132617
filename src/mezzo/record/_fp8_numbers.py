"""What FP8 does to the numbers of each layer: how many values round to zero, and how many are clipped."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from mezzo._torch.modes import no_dispatch_modes
from mezzo.fp8 import (
    E4M3,
    FORMATS,
    FP8_LINEAR,
    HEADROOM,
    INVERSE,
    LARGEST,
    Fp8Recipe,
    GatheredWeight,
    amax_of,
    copies_of,
    recipe_from_text,
    round_to,
    scale_for,
)
from mezzo.record._kernel_runs import KernelOp, KernelRun
from mezzo.record._listening import listening
from mezzo.record._tensor_numbers import undisturbed

Role = Literal["input", "weight", "gradient"]

_Key = tuple[str, Role, str]


@dataclass(frozen=True, slots=True)
class Fp8Row:
    """One operand of the FP8 products of one module, over all calls."""

    module: str
    role: Role
    """`gradient` is that of the module's output."""
    format: str
    """`e4m3` or `e5m2`."""
    calls: int
    values: int
    largest: float
    """Largest finite magnitude, before scaling."""
    to_zero_share: float
    """Share of the non-zero values that FP8 rounds to zero."""
    cut_share: float
    """Share of all values that are too large for the scale and are clipped. That only happens if the scale is older than
    the values: with delayed scaling, and for weights."""
    non_finite: int
    """Number of NaN and inf, which stay non-finite."""


class Fp8Numbers:
    """The counts of `collect_fp8_numbers`; they can be read during the recording and afterwards."""

    wants_lines = False
    wants_times = False

    def __init__(self) -> None:
        self._counts: dict[_Key, list[Any]] = {}
        """Calls; then on the device, float64: values, of these not zero, rounded to zero, cut off, not finite, the largest."""
        self._lock = threading.Lock()

    def wants(self, op: KernelOp) -> bool:
        """Whether an operator multiplies FP8 numbers."""
        return op.is_fp8

    def receive(self, kernel: KernelRun) -> None:
        """Count the operands of a product."""
        with undisturbed(), torch.no_grad(), self._lock:
            for role, name, tensor, scale in _operands(kernel):
                self._add((kernel.module, role, name), _count(tensor, scale, FORMATS[name]))

    def _add(self, key: _Key, counts: Tensor) -> None:
        entry = self._counts.setdefault(key, [0, torch.zeros_like(counts)])
        entry[0] += 1
        largest = torch.maximum(entry[1][-1], counts[-1])
        entry[1] += counts
        entry[1][-1] = largest

    @property
    def rows(self) -> list[Fp8Row]:
        """One row per module and operand; the largest loss first."""
        with self._lock, no_dispatch_modes(), undisturbed():
            read = {key: (calls, counts.tolist()) for key, (calls, counts) in self._counts.items()}
        rows = [_row(key, calls, counts) for key, (calls, counts) in read.items()]
        return sorted(rows, key=lambda row: (-(row.to_zero_share + row.cut_share), row.module, row.role))

    def table(self, limit: int | None = 20) -> str:
        """Return the rows as a table.

        Args:
            limit: Maximum number of rows; None: all.
        """
        rows = self.rows
        shown = rows if limit is None else rows[:limit]
        width = max([len(row.module) for row in shown] + [len("module")])
        head = f"{'module':<{width}}  {'operand':<8}  {'format':<6}  {'largest':>10}  {'to zero':>8}  {'cut off':>8}"
        lines = [f"{head}  {'inf, nan':>8}"]
        for row in shown:
            lines.append(
                f"{row.module:<{width}}  {row.role:<8}  {row.format:<6}  {row.largest:>10.4g}  {row.to_zero_share:>8.2%}  "
                f"{row.cut_share:>8.2%}  {row.non_finite or '':>8}".rstrip()
            )
        if len(shown) < len(rows):
            lines.append(f"... and {len(rows) - len(shown)} more")
        return "\n".join(lines) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Return the rows for JSON."""
        return {"rows": [asdict(row) for row in self.rows]}


def _operands(kernel: KernelRun) -> Iterator[tuple[Role, str, Tensor, Tensor]]:
    """Yield the operands that are converted for a product: role, format, values and scale."""
    if kernel.op.name == FP8_LINEAR:
        x, weight, _, text, is_training = kernel.args[:5]
        recipe = recipe_from_text(text)
        by = recipe if is_training else replace(recipe, scaling="current")  # evaluation uses no delayed scale
        yield "input", "e4m3", x.reshape(-1, x.shape[-1]), _scale(x, weight, "input", by)
        if not isinstance(weight, GatheredWeight):  # rounded already: the numbers before are not on this process
            yield "weight", "e4m3", weight, _scale_of_weight(weight, recipe)
        return
    grad, _, _, weight, text = kernel.args[:5]
    recipe = recipe_from_text(text)
    yield "gradient", recipe.gradient, grad.reshape(-1, grad.shape[-1]), _scale(grad, weight, "gradient", recipe)


def _scale(x: Tensor, weight: Tensor, role: Role, recipe: Fp8Recipe) -> Tensor:
    dtype = E4M3 if role == "input" else FORMATS[recipe.gradient]
    if recipe.granularity == "row":
        return scale_for(amax_of(x.reshape(-1, x.shape[-1]), dim=1), dtype)
    copies = copies_of(weight)
    history = None if recipe.scaling != "delayed" or copies is None else copies.histories.get(role)
    return scale_for(amax_of(x) if history is None else history.used, dtype)


def _scale_of_weight(weight: Tensor, recipe: Fp8Recipe) -> Tensor:
    if recipe.granularity == "row":
        return scale_for(amax_of(weight, dim=1), E4M3)
    copies = copies_of(weight)
    return scale_for(amax_of(weight), E4M3, HEADROOM) if copies is None else 1.0 / copies.state[INVERSE]


def _count(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    magnitude = x.abs().float()
    finite = magnitude.isfinite()
    not_zero = finite & (magnitude > 0)
    to_zero = not_zero & (round_to(x, scale, dtype).float() == 0)
    cut = finite & (magnitude * scale > LARGEST[dtype])
    counts = [tensor.sum() for tensor in (torch.ones_like(finite), not_zero, to_zero, cut, ~finite)]
    largest = torch.where(finite, magnitude, 0.0).amax() if x.numel() else magnitude.new_zeros(())
    return torch.stack([*(count.double() for count in counts), largest.double()])


def _row(key: _Key, calls: int, counts: list[float]) -> Fp8Row:
    values, not_zero, to_zero, cut, non_finite, largest = counts
    return Fp8Row(
        *key,
        calls=calls,
        values=int(values),
        largest=largest,
        to_zero_share=to_zero / not_zero if not_zero else 0.0,
        cut_share=cut / values if values else 0.0,
        non_finite=int(non_finite),
    )


@contextmanager
def collect_fp8_numbers() -> Iterator[Fp8Numbers]:
    """Count, for each operand of each FP8 product, values that round to zero and values that are clipped.

    No host synchronisation. At levels other than O3 there is nothing to count. Weights that FSDP2 gathers in FP8 are
    not counted: each process rounds only its shard.

    >>> from mezzo.amp import Fp8Recipe, auto_cast
    >>> layer, x = torch.nn.Linear(16, 16), torch.ones(16, 16)
    >>> with collect_fp8_numbers() as numbers, auto_cast(level="O3", fp8=Fp8Recipe(emulate=True, min_width=0, min_size=0)):
    ...     _ = layer(x)
    >>> [(row.role, row.to_zero_share, row.cut_share) for row in numbers.rows if row.role == "input"]
    [('input', 0.0, 0.0)]
    """
    numbers = Fp8Numbers()
    with listening(numbers):
        yield numbers
