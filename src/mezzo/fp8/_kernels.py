"""Triton kernels of FP8 operands: the amax of a matrix, and its two layouts in FP8 from one read.

Tensor Cores need the dimension of the sum innermost in both operands. So the input of a layer and
the gradient of its output are needed as matrix and as transpose, each for one of the three
products.
"""

import triton
import triton.language as tl

from mezzo.fp8.triton_numbers import raise_to, scale_for, to_fp8


@triton.jit
def amax_kernel(x, amaxes, numel, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Write the largest absolute value of each program's share of the elements."""
    program = tl.program_id(0).to(tl.int64)
    start = program * (BLOCK * BLOCKS)
    largest = tl.zeros([BLOCK], tl.float32)
    while start < numel:
        for block in tl.static_range(BLOCKS):  # unrolled: several loads are in flight at a time
            offsets = start + block * BLOCK + tl.arange(0, BLOCK)
            value = tl.abs(tl.load(x + offsets, mask=offsets < numel, other=0.0).to(tl.float32))
            largest = tl.where(value > largest, value, largest)
        start += tl.num_programs(0).to(tl.int64) * (BLOCK * BLOCKS)
    tl.store(amaxes + program, tl.max(largest, 0))


@triton.jit
def _remember(history, newest_at, amax, used, LENGTH: tl.constexpr, BLOCK: tl.constexpr, CLEARS: tl.constexpr):
    """Insert the newest amax into a history, and store the largest in `amax`.

    The amax of this call goes to `used`. `CLEARS` sets the newest to 0, for the next call.
    """
    places = tl.arange(0, BLOCK)
    newest, before = tl.load(newest_at, volatile=True), tl.load(amax)
    known = tl.where(before < float("inf"), before, 0.0)
    # An overflow must not give the next scales
    newest = tl.where(newest < float("inf"), newest, known)
    older = tl.load(history + places - 1, mask=(places > 0) & (places < LENGTH), other=0.0)
    kept = tl.where(places == 0, newest, older)
    tl.debug_barrier()  # all reads before any write
    tl.store(used, before)
    tl.store(history + places, kept, mask=places < LENGTH)
    tl.store(amax, tl.max(kept, 0))
    if CLEARS:
        tl.store(newest_at, 0.0)


@triton.jit(do_not_specialize=["amaxes"])
def quantise_kernel(
    x,
    values,
    transposed,
    amax,
    amaxes,
    inverse,
    history,
    newest,
    used,
    arrived,
    column_sums,
    rows,
    columns,
    LARGEST: tl.constexpr,
    HEADROOM: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    HAS_TRANSPOSED: tl.constexpr,
    HISTORY: tl.constexpr,
    HISTORY_BLOCK: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    AMAXES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Write a tile of a matrix in FP8, plain and transposed.

    The scale is of the largest of `amaxes` numbers.

    If asked, also store the amax of this matrix in a history of `HISTORY` calls (0: none), which
    gives the next `amax`, and the sums of the tile's columns: `column_sums` has a row for each row
    of tiles.
    """
    tile_row, tile_column = tl.program_id(0), tl.program_id(1)
    top, left = tile_row.to(tl.int64) * TILE_ROWS, tile_column.to(tl.int64) * TILE_COLUMNS
    # Offsets count from the first element of the tile, in 32 bits: 64 bits need too many registers.
    row, column = tl.arange(0, TILE_ROWS), tl.arange(0, TILE_COLUMNS)
    inside = (row < rows - top)[:, None] & (column < columns - left)[None, :]
    first = top * columns + left
    places = row[:, None] * columns + column[None, :]
    value = tl.load(x + first + places, mask=inside, other=0.0).to(tl.float32)
    if AMAXES == 1:
        largest = tl.load(amax)
    else:
        found = tl.arange(0, AMAXES)
        largest = tl.max(tl.load(amax + found, mask=found < amaxes, other=0.0), 0)
    scale = scale_for(largest, LARGEST, HEADROOM)
    small = to_fp8(value, scale, LARGEST, DTYPE)
    if HAS_VALUES:
        tl.store(values + first + places, small, mask=inside)
    if HAS_TRANSPOSED:
        turned = column[None, :] * rows + row[:, None]
        tl.store(transposed + (left * rows + top) + turned, small, mask=inside)
    if HAS_SUMS:
        sums_at = column_sums + tile_row.to(tl.int64) * columns + left
        tl.store(sums_at + column, tl.sum(value, 0), mask=column < columns - left)
    if (tile_row == 0) & (tile_column == 0):
        tl.store(inverse, tl.div_rn(1.0, scale))
    if HISTORY > 0:
        raise_to(newest, tl.max(tl.max(tl.abs(value), 1), 0))
        tl.debug_barrier()  # every warp has read the amax
        programs = tl.num_programs(0) * tl.num_programs(1)
        if tl.atomic_add(arrived, 1, sem="acq_rel") == programs - 1:
            _remember(history, newest, amax, used, HISTORY, HISTORY_BLOCK, True)
            tl.store(arrived, 0)


@triton.jit
def turn_kernel(
    values,
    transposed,
    rows,
    columns,
    newest,
    history,
    amax,
    used,
    HISTORY: tl.constexpr,
    HISTORY_BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Transpose a matrix of bytes; one program stores `newest` in a history of `HISTORY` calls (0: none)."""
    tile_row, tile_column = tl.program_id(0), tl.program_id(1)
    top, left = tile_row.to(tl.int64) * TILE_ROWS, tile_column.to(tl.int64) * TILE_COLUMNS
    row, column = tl.arange(0, TILE_ROWS), tl.arange(0, TILE_COLUMNS)
    inside = (row < rows - top)[:, None] & (column < columns - left)[None, :]
    places = row[:, None] * columns + column[None, :]
    tile = tl.load(values + top * columns + left + places, mask=inside, other=0)
    turned = column[None, :] * rows + row[:, None]
    tl.store(transposed + (left * rows + top) + turned, tile, mask=inside)
    if HISTORY > 0:
        if (tile_row == 0) & (tile_column == 0):
            _remember(history, newest, amax, used, HISTORY, HISTORY_BLOCK, False)


@triton.jit
def line_amaxes_kernel(
    x,
    row_amaxes,
    column_amaxes,
    rows,
    columns,
    HAS_ROWS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Raise the amaxes of rows and columns, which start at 0, to those of a tile."""
    top, left = tl.program_id(0).to(tl.int64) * TILE_ROWS, tl.program_id(1).to(tl.int64) * TILE_COLUMNS
    row, column = tl.arange(0, TILE_ROWS), tl.arange(0, TILE_COLUMNS)
    is_row, is_column = row < rows - top, column < columns - left
    places = row[:, None] * columns + column[None, :]
    inside = is_row[:, None] & is_column[None, :]
    size = tl.abs(tl.load(x + top * columns + left + places, mask=inside, other=0.0).to(tl.float32))
    # Floats of one sign compare as their bits do
    if HAS_ROWS:
        amax = tl.max(size, 1).to(tl.int32, bitcast=True)
        tl.atomic_max((row_amaxes + top + row).to(tl.pointer_type(tl.int32)), amax, mask=is_row, sem="relaxed")
    if HAS_COLUMNS:
        amax = tl.max(size, 0).to(tl.int32, bitcast=True)
        tl.atomic_max(
            (column_amaxes + left + column).to(tl.pointer_type(tl.int32)), amax, mask=is_column, sem="relaxed"
        )


@triton.jit
def quantise_lines_kernel(
    x,
    values,
    transposed,
    row_amaxes,
    column_amaxes,
    row_inverses,
    column_inverses,
    column_sums,
    rows,
    columns,
    LARGEST: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    HAS_TRANSPOSED: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Write a tile in FP8, plain with the scales of its rows, transposed with those of its columns."""
    tile_row, tile_column = tl.program_id(0), tl.program_id(1)
    top, left = tile_row.to(tl.int64) * TILE_ROWS, tile_column.to(tl.int64) * TILE_COLUMNS
    row, column = tl.arange(0, TILE_ROWS), tl.arange(0, TILE_COLUMNS)
    is_row, is_column = row < rows - top, column < columns - left
    inside = is_row[:, None] & is_column[None, :]
    first = top * columns + left
    places = row[:, None] * columns + column[None, :]
    value = tl.load(x + first + places, mask=inside, other=0.0).to(tl.float32)
    if HAS_VALUES:
        scale = scale_for(tl.load(row_amaxes + top + row, mask=is_row, other=0.0), LARGEST, 1.0)
        tl.store(values + first + places, to_fp8(value, scale[:, None], LARGEST, DTYPE), mask=inside)
        if tile_column == 0:
            tl.store(row_inverses + top + row, tl.div_rn(tl.full([TILE_ROWS], 1.0, tl.float32), scale), mask=is_row)
    if HAS_TRANSPOSED:
        scale = scale_for(tl.load(column_amaxes + left + column, mask=is_column, other=0.0), LARGEST, 1.0)
        turned = column[None, :] * rows + row[:, None]
        small = to_fp8(value, scale[None, :], LARGEST, DTYPE)
        tl.store(transposed + (left * rows + top) + turned, small, mask=inside)
        if tile_row == 0:
            inverse = tl.div_rn(tl.full([TILE_COLUMNS], 1.0, tl.float32), scale)
            tl.store(column_inverses + left + column, inverse, mask=is_column)
    if HAS_SUMS:
        sums_at = column_sums + tile_row.to(tl.int64) * columns + left
        tl.store(sums_at + column, tl.sum(value, 0), mask=is_column)


@triton.jit
def sum_rows_kernel(partial, sums, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum the rows of a float32 matrix."""
    row, column = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    while tl.min(row, 0) < rows:
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        total += tl.sum(tl.load(partial + row[:, None] * columns + column[None, :], mask=inside, other=0.0), 0)
        row += ROWS
    tl.store(sums + column, total, mask=column < columns)
