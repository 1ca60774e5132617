"""FP8 operands: a matrix and its transpose, rounded, with their inverse scales."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from mezzo._torch.step_tier import uses_triton
from mezzo.fp8._numbers import E4M3, LARGEST, amax_of, round_to, scale_for
from mezzo.fp8._product import LEAST_CAPABILITY

AMAX_BLOCK, AMAX_BLOCKS, AMAX_WARPS = 2048, 4, 8
"""Elements per block of a program, blocks per iteration, and warps."""
AMAX_PROGRAMS = 512
"""Largest number of programs of an amax: every converting program reads the results of all."""
TILE_ROWS, TILE_COLUMNS, TILE_WARPS = 128, 64, 4
"""Tile of a converting program, and its warps."""
MOST_SIDE = 2**24 - 1
"""Largest side of a matrix: offsets inside a tile are 32 bits."""
TURNED_ROWS, TURNED_COLUMNS, TURNED_WARPS = 128, 128, 8
"""Tile of a program that transposes bytes, and its warps."""
SUM_ROWS, SUM_COLUMNS = 32, 64
"""Tile that a program sums at a time."""


@dataclass(slots=True)
class Operand:
    """A matrix in FP8; parts that were not asked for are empty."""

    values: Tensor
    """[rows, columns]."""
    inverse: Tensor
    """Inverse scale of the values: one number, or [rows, 1]."""
    transposed: Tensor
    """[columns, rows], contiguous."""
    transposed_inverse: Tensor
    """One number, or [columns, 1]."""
    column_sums: Tensor | None = None
    """Sums of the matrix before it was rounded."""


class AmaxHistory:
    """The amaxes of the last calls, for delayed scaling; on the device."""

    def __init__(self, length: int, device: torch.device) -> None:
        self.amaxes = torch.zeros(length, device=device)
        self.amax = torch.zeros(1, device=device)
        """The largest of them: gives the next scale."""
        self.newest = torch.zeros(1, device=device)
        self.used = torch.zeros(1, device=device)
        """The amax of the last scale, to see what it clamped."""
        self.arrived = torch.zeros(1, dtype=torch.int32, device=device)
        """Counts the finished programs of a conversion.

        The last one stores `newest` in the history.
        """
        self._first: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there was no call yet."""
        return self._first is None

    def start(self, x: Tensor) -> None:
        """Before the first call, use the amax of its own matrix."""
        if self.is_empty:
            self._first = _amaxes(x).amax()
            self.amax.copy_(self._first)

    def copy(self) -> tuple[Tensor, ...]:
        """Return a copy of the state, for `restore`."""
        return tuple(tensor.clone() for tensor in self._tensors())

    def restore(self, before: tuple[Tensor, ...] | None) -> None:
        """Restore a copied state; None: the state during the first call."""
        if before is None:
            assert self._first is not None
            before = (torch.zeros_like(self.amaxes), self._first, torch.zeros_like(self.newest), self._first)
        for tensor, value in zip(self._tensors(), before, strict=True):
            tensor.copy_(value)

    def load(self, amaxes: Tensor) -> None:
        """Continue from saved amaxes, newest first.

        In place, as a captured step knows the addresses.
        """
        self._first = amaxes.max().to(self.amax.device)
        self.restore((amaxes, self._first, torch.zeros_like(self.newest), self._first))

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.amaxes, self.amax, self.newest, self.used

    def remember(self) -> None:
        """Store `newest`, the amax of this call, in the history.

        If it is not finite, the amax before is stored: the loss scaler handles the overflow.
        """
        self.used.copy_(self.amax)
        known = torch.where(self.amax.isfinite(), self.amax, 0.0)
        newest = torch.where(self.newest.isfinite(), self.newest, known)
        self.amaxes.copy_(torch.cat([newest, self.amaxes[:-1]]))
        self.amax.copy_(self.amaxes.max())
        self.newest.zero_()


def has_fp8_kernels(tensor: Tensor) -> bool:
    """Whether mezzo's kernels convert on this device.

    Triton works, and the device has FP8 numbers.
    """
    device = tensor.device
    return uses_triton(device) and (device.type != "cuda" or _knows_fp8(device.index))


@functools.cache
def _knows_fp8(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= LEAST_CAPABILITY


def _amaxes(x: Tensor) -> Tensor:
    """Return the largest absolute values that each program found, float32.

    Their maximum is the amax.
    """
    if not has_fp8_kernels(x) or not x.numel():
        return amax_of(x).reshape(1)
    from mezzo.fp8 import _kernels

    programs = min(AMAX_PROGRAMS, -(-x.numel() // (AMAX_BLOCK * AMAX_BLOCKS)))
    amaxes = x.new_empty(programs, dtype=torch.float32)
    _kernels.amax_kernel[(programs,)](x, amaxes, x.numel(), BLOCK=AMAX_BLOCK, BLOCKS=AMAX_BLOCKS, num_warps=AMAX_WARPS)
    return amaxes


def make_operand(
    x: Tensor,
    dtype: torch.dtype = E4M3,
    *,
    values: bool = True,
    transposed: bool = True,
    sums: torch.dtype | None = None,
    by_row: bool = False,
    history: AmaxHistory | None = None,
    amax: Tensor | None = None,
    headroom: float = 1.0,
) -> Operand:
    """Return a matrix as FP8.

    Args:
        x: Two-dimensional, contiguous.
        dtype: The FP8 dtype.
        values: Return the matrix.
        transposed: Return its transpose.
        sums: Return the sums of its columns in this dtype, computed in float32; None: no sums.
        by_row: One scale per row of the matrix, and one per row of its transpose.
        history: Delayed scaling: gives the scale, and stores the amax of this matrix.
        amax: The amax if it is known, as the maximum of these numbers.
        headroom: Numbers up to `headroom * amax` fit.
    """
    is_elsewhere = x.is_cuda and x.device.index != torch.cuda.current_device()
    by_triton = has_fp8_kernels(x) and bool(x.numel()) and max(x.shape) <= MOST_SIDE
    # Triton launches on the current device
    with torch.cuda.device(x.device) if is_elsewhere else nullcontext():
        if by_row:
            return (_by_row_with_triton if by_triton else _by_row)(x, dtype, values, transposed, sums)
        if history is not None:
            history.start(x)
            amax = history.amax
        if amax is None:
            amax = _amaxes(x)
        convert = _convert_by_triton if by_triton else _convert
        return convert(x, dtype, amax, headroom, values, transposed, sums, history)


def _convert(
    x: Tensor, dtype: torch.dtype, amax: Tensor, headroom: float, values: bool, transposed: bool,
    sums: torch.dtype | None,
    history: AmaxHistory | None,
) -> Operand:  # fmt: skip
    scale = scale_for(amax.max(), dtype, headroom)
    small = round_to(x, scale, dtype)
    inverse = (1.0 / scale).reshape(())
    if history is not None:
        history.newest.copy_(amax_of(x))
        history.remember()
    nothing = small.new_empty(0)
    return Operand(
        values=small if values else nothing,
        inverse=inverse,
        transposed=small.t().contiguous() if transposed else nothing,
        transposed_inverse=inverse,
        column_sums=None if sums is None else x.float().sum(0).to(sums),
    )


def _by_row(x: Tensor, dtype: torch.dtype, values: bool, transposed: bool, sums: torch.dtype | None) -> Operand:
    def rounded(matrix: Tensor, is_wanted: bool) -> tuple[Tensor, Tensor]:
        if not is_wanted:
            return x.new_empty(0, dtype=dtype), x.new_empty(0, dtype=torch.float32)
        scale = scale_for(amax_of(matrix, dim=1), dtype)
        return round_to(matrix, scale, dtype).contiguous(), 1.0 / scale

    column_sums = None if sums is None else x.float().sum(0).to(sums)
    return Operand(*rounded(x, values), *rounded(x.t(), transposed), column_sums)


def _by_row_with_triton(
    x: Tensor, dtype: torch.dtype, values: bool, transposed: bool, sums: torch.dtype | None
) -> Operand:
    """Return what `_by_row` returns, reading the matrix twice."""
    import triton.language as tl

    from mezzo.fp8 import _kernels

    rows, columns = x.shape
    grid = (-(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS))
    tile = {"TILE_ROWS": TILE_ROWS, "TILE_COLUMNS": TILE_COLUMNS, "num_warps": TILE_WARPS}
    # one tensor, so that one launch clears both
    amaxes = x.new_zeros(rows + columns, dtype=torch.float32)
    of_rows, of_columns = amaxes[:rows], amaxes[rows:]
    if values or transposed:
        _kernels.line_amaxes_kernel[grid](
            x, of_rows, of_columns, rows, columns, HAS_ROWS=values, HAS_COLUMNS=transposed, **tile
        )
    small = x.new_empty((rows, columns) if values else 0, dtype=dtype)
    turned = x.new_empty((columns, rows) if transposed else 0, dtype=dtype)
    inverse = x.new_empty((rows, 1) if values else 0, dtype=torch.float32)
    turned_inverse = x.new_empty((columns, 1) if transposed else 0, dtype=torch.float32)
    partial = amaxes if sums is None else x.new_empty((grid[0], columns), dtype=torch.float32)
    _kernels.quantise_lines_kernel[grid](
        x, small, turned, of_rows, of_columns, inverse, turned_inverse, partial, rows, columns,
        LARGEST=LARGEST[dtype], DTYPE=tl.float8e4nv if dtype is E4M3 else tl.float8e5, HAS_VALUES=values,
        HAS_TRANSPOSED=transposed, HAS_SUMS=sums is not None, enable_fp_fusion=False, **tile,
    )  # fmt: skip
    return Operand(small, inverse, turned, turned_inverse, None if sums is None else _sum_rows(partial, sums))


def _convert_by_triton(
    x: Tensor, dtype: torch.dtype, amax: Tensor, headroom: float, values: bool, transposed: bool,
    sums: torch.dtype | None,
    history: AmaxHistory | None,
) -> Operand:  # fmt: skip
    import triton.language as tl

    from mezzo.fp8 import _kernels

    rows, columns = x.shape
    grid = (-(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS))
    small = torch.empty_like(x, dtype=dtype) if values else x.new_empty(0, dtype=dtype)
    turned = x.new_empty((columns, rows) if transposed else 0, dtype=dtype)
    inverse = x.new_empty((), dtype=torch.float32)
    partial = inverse if sums is None else x.new_empty((grid[0], columns), dtype=torch.float32)
    length = 0 if history is None else len(history.amaxes)
    known = (inverse,) * 4 if history is None else (history.amaxes, history.newest, history.used, history.arrived)
    _kernels.quantise_kernel[grid](
        x, small, turned, amax, len(amax), inverse, *known, partial, rows, columns,
        LARGEST=LARGEST[dtype], HEADROOM=headroom, DTYPE=tl.float8e4nv if dtype is E4M3 else tl.float8e5,
        HAS_VALUES=values, HAS_TRANSPOSED=transposed, HISTORY=length, HISTORY_BLOCK=max(2, 1 << (length - 1).bit_length()),
        HAS_SUMS=sums is not None, AMAXES=1 << (len(amax) - 1).bit_length(), TILE_ROWS=TILE_ROWS,
        TILE_COLUMNS=TILE_COLUMNS, num_warps=TILE_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return Operand(small, inverse, turned, inverse, None if sums is None else _sum_rows(partial, sums))


def turn_operand(values: Tensor, amax: Tensor, history: AmaxHistory | None) -> Tensor:
    """Return an FP8 matrix transposed, and store the amax of its numbers in a history.

    Args:
        values: Two-dimensional, contiguous.
        amax: One number, float32.
        history: None: nothing is stored.
    """
    if not (has_fp8_kernels(values) and values.numel() and max(values.shape) <= MOST_SIDE):
        if history is not None:
            history.newest.copy_(amax)
            history.remember()
        return values.t().contiguous()
    from mezzo.fp8 import _kernels

    rows, columns = values.shape
    turned = values.new_empty(columns, rows)
    grid = (-(-rows // TURNED_ROWS), -(-columns // TURNED_COLUMNS))
    length = 0 if history is None else len(history.amaxes)
    known = (amax,) * 3 if history is None else (history.amaxes, history.amax, history.used)
    with torch.cuda.device(values.device) if values.is_cuda else nullcontext():
        _kernels.turn_kernel[grid](
            values.view(torch.uint8), turned.view(torch.uint8), rows, columns, amax, *known,
            HISTORY=length, HISTORY_BLOCK=max(2, 1 << (length - 1).bit_length()),
            TILE_ROWS=TURNED_ROWS, TILE_COLUMNS=TURNED_COLUMNS, num_warps=TURNED_WARPS,
        )  # fmt: skip
    return turned


def _sum_rows(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    from mezzo.fp8 import _kernels

    rows, columns = matrix.shape
    sums = matrix.new_empty(columns, dtype=dtype)
    if columns:
        programs = -(-columns // SUM_COLUMNS)
        _kernels.sum_rows_kernel[(programs,)](matrix, sums, rows, columns, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS)
    return sums
