"""FP8 operands: a matrix and its transpose, rounded, with the factors that undo their scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mezzo._tier import uses_triton
from mezzo.fp8._numbers import E4M3, LARGEST, amax_of, round_to, scale_for
from mezzo.fp8._product import LEAST_CAPABILITY

_BLOCK, _BLOCKS, _WARPS = 1024, 8, 4
TILE = 64
"""Rows and columns that a program converts."""


@dataclass(slots=True)
class Operand:
    """A matrix in FP8; a part that nobody asked for is empty."""

    values: Tensor
    """[rows, columns]."""
    inverse: Tensor
    """Multiplied with it, the values are what they were: one number, or [rows, 1]."""
    transposed: Tensor
    """[columns, rows], contiguous."""
    transposed_inverse: Tensor
    """One number, or [columns, 1]."""
    column_sums: Tensor | None = None
    """Sums of the matrix before it was rounded, float32."""


class AmaxHistory:
    """The largest numbers of the last calls, for delayed scaling; all of it is on the device."""

    def __init__(self, length: int, device: torch.device) -> None:
        self.amaxes = torch.zeros(length, device=device)
        self.amax = torch.zeros(1, device=device)
        """The largest of them: what the next scale is made from."""
        self.newest = torch.zeros(1, device=device)
        self.used = torch.zeros(1, device=device)
        """What the scale of the last call was made from; for whoever looks at what it cut off."""
        self.is_empty = True

    def start(self, x: Tensor) -> None:
        """Take the scale of a first call from its own numbers."""
        if self.is_empty:
            self.amax.copy_(_amax(x))
            self.is_empty = False

    def remember(self) -> None:
        """Make `newest`, which a call has found, the latest of the history.

        One that is not finite is forgotten: an overflow is the loss scaler's to deal with, not the next scale's.
        """
        if not by_triton(self.amaxes):
            self.used.copy_(self.amax)
            known = torch.where(self.amax.isfinite(), self.amax, 0.0)
            newest = torch.where(self.newest.isfinite(), self.newest, known)
            self.amaxes.copy_(torch.cat([newest, self.amaxes[:-1]]))
            self.amax.copy_(self.amaxes.max())
            self.newest.zero_()
            return
        from mezzo.fp8 import _kernels

        length = len(self.amaxes)
        block = max(2, 1 << (length - 1).bit_length())
        _kernels.remember_kernel[(1,)](
            self.amaxes, self.newest, self.amax, self.used, LENGTH=length, BLOCK=block, num_warps=1
        )


def by_triton(tensor: Tensor) -> bool:
    """Whether kernels of ours convert: where they are built, and where the device knows FP8 numbers."""
    if not uses_triton(tensor.device):
        return False
    return tensor.device.type != "cuda" or torch.cuda.get_device_capability(tensor.device) >= LEAST_CAPABILITY


def _amax(x: Tensor) -> Tensor:
    """Return the largest absolute value of a matrix, as a float32 tensor of one number."""
    if not by_triton(x):
        return amax_of(x).reshape(1)
    from mezzo.fp8 import _kernels

    amax = torch.zeros(1, device=x.device)
    if x.numel():
        programs = -(-x.numel() // (_BLOCK * _BLOCKS))
        _kernels.amax_kernel[(programs,)](x, amax, x.numel(), BLOCK=_BLOCK, BLOCKS=_BLOCKS, num_warps=_WARPS)
    return amax


def make_operand(
    x: Tensor,
    dtype: torch.dtype = E4M3,
    *,
    values: bool = True,
    transposed: bool = True,
    sums: bool = False,
    by_row: bool = False,
    history: AmaxHistory | None = None,
    amax: Tensor | None = None,
    headroom: float = 1.0,
) -> Operand:
    """Return a matrix as FP8.

    Args:
        x: Two-dimensional, contiguous.
        dtype: The FP8 dtype.
        values: Whether the matrix is wanted.
        transposed: Whether its transpose is wanted.
        sums: Whether the sums of its columns are wanted.
        by_row: One scale for each row of the matrix, and one for each row of its transpose.
        history: Delayed scaling: the scale is made from it, and it learns the amax of this matrix.
        amax: What the scale is made from if it is known.
        headroom: How many times `amax` still fits.
    """
    if by_row:
        return _by_row(x, dtype, values, transposed, sums)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        if history is not None:
            history.start(x)
            amax = history.amax
        if amax is None:
            amax = _amax(x)
        convert = _convert_by_triton if by_triton(x) else _convert
        operand = convert(x, dtype, amax, headroom, values, transposed, sums, history)
        if history is not None:
            history.remember()
    return operand


def _convert(
    x: Tensor, dtype: torch.dtype, amax: Tensor, headroom: float, values: bool, transposed: bool, sums: bool,
    history: AmaxHistory | None,
) -> Operand:  # fmt: skip
    scale = scale_for(amax, dtype, headroom)
    small = round_to(x, scale, dtype)
    inverse = (1.0 / scale).reshape(())
    if history is not None:
        history.newest.copy_(amax_of(x))
    nothing = small.new_empty(0)
    return Operand(
        values=small if values else nothing,
        inverse=inverse,
        transposed=small.t().contiguous() if transposed else nothing,
        transposed_inverse=inverse,
        column_sums=x.float().sum(0) if sums else None,
    )


def _by_row(x: Tensor, dtype: torch.dtype, values: bool, transposed: bool, sums: bool) -> Operand:
    def rounded(matrix: Tensor, is_wanted: bool) -> tuple[Tensor, Tensor]:
        if not is_wanted:
            return x.new_empty(0, dtype=dtype), x.new_empty(0, dtype=torch.float32)
        scale = scale_for(amax_of(matrix, dim=1), dtype)
        return round_to(matrix, scale, dtype).contiguous(), 1.0 / scale

    column_sums = x.float().sum(0) if sums else None
    return Operand(*rounded(x, values), *rounded(x.t(), transposed), column_sums)


def _convert_by_triton(
    x: Tensor, dtype: torch.dtype, amax: Tensor, headroom: float, values: bool, transposed: bool, sums: bool,
    history: AmaxHistory | None,
) -> Operand:  # fmt: skip
    import triton.language as tl

    from mezzo.fp8 import _kernels

    rows, columns = x.shape
    grid = (-(-rows // TILE), -(-columns // TILE))
    nothing = x.new_empty(0, dtype=dtype)
    small = torch.empty_like(x, dtype=dtype) if values else nothing
    turned = x.new_empty((columns, rows), dtype=dtype) if transposed else nothing
    inverse = x.new_empty((), dtype=torch.float32)
    partial = x.new_empty((grid[0], columns), dtype=torch.float32) if sums else inverse
    if grid[0] * grid[1]:
        _kernels.quantise_kernel[grid](
            x, small, turned, amax, inverse, inverse if history is None else history.newest, partial, rows, columns,
            LARGEST=LARGEST[dtype], HEADROOM=headroom, DTYPE=tl.float8e4nv if dtype is E4M3 else tl.float8e5,
            HAS_VALUES=values, HAS_TRANSPOSED=transposed, HAS_NEXT_AMAX=history is not None, HAS_SUMS=sums,
            TILE_ROWS=TILE, TILE_COLUMNS=TILE, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return Operand(small, inverse, turned, inverse, column_sums=partial.sum(0) if sums else None)
