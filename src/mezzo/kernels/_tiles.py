"""Tiles of kernels that work on a matrix, such as the pixels and channels of an image, and add up its columns."""

from __future__ import annotations

import torch
from torch import Tensor

from mezzo.kernels._launch import next_power_of_two, resident_programs

_TILE, _WARPS = 4096, 4
"""Elements that a program works on at a time, and its warps."""
STAGES = 3
"""Tiles in flight of the kernels that add up over rows: without them such a kernel takes twice as long."""
_PROGRAMS = 4
"""Programs per multiprocessor of the kernels that add up."""
_MOST_PARTS = 512
"""Most programs that share the rows of a column: one program joins their sums."""
_SUMS = 16
"""Columns whose sums one program joins: few, as the programs are few and wait for memory."""
_LEAST_USED = 0.5
"""Least share of a tile's columns that exist, if a narrower tile can do better."""


def in_rows(x: Tensor) -> Tensor:
    """Return images in channels-last: a matrix of pixels and channels."""
    return x.contiguous(memory_format=torch.channels_last)


def column_tile(columns: int, widest: int = 256) -> dict[str, int]:
    """Return the sizes of a tile, the widest of which most columns exist, and how many cover all columns."""
    width = min(widest, next_power_of_two(columns))
    widths = [width >> shift for shift in range(4) if width >> shift >= min(32, width)]
    used = {each: columns / (-(-columns // each) * each) for each in widths}
    block = next((each for each in widths if used[each] >= _LEAST_USED), max(widths, key=used.__getitem__))
    return {"ROWS": _TILE // block, "BLOCK": block, "COLUMNS": -(-columns // block), "num_warps": _WARPS}


def share_rows(rows: int, columns: int, tile_rows: int, device: torch.device) -> tuple[int, int]:
    """Return the number of programs that share the rows, and the tiles of each.

    The tiles of a program are 1, 2, 3, 4, 6, 8, 12, ...: each number is a kernel to compile.

    Args:
        rows: Of the matrix.
        columns: How many tiles cover its columns.
        tile_rows: Rows of a tile.
        device: Where the kernel runs.
    """
    tiles = -(-rows // tile_rows)
    wanted = min(_MOST_PARTS, max(1, _PROGRAMS * resident_programs(device) // (2 * columns)))
    least = -(-tiles // wanted)
    power = next_power_of_two(least)
    steps = power * 3 // 4 if power >= 4 and power * 3 // 4 >= least else power
    return -(-tiles // steps), steps


def add_up(parts: Tensor, *results: Tensor) -> None:
    """Write the sums over the programs: `parts` is (results, programs, size) in float32, of up to three results."""
    from mezzo.kernels._norm_kernels import column_sums_kernel

    count, size = parts.shape[1:]
    targets = [*results, *results[:1] * 2][:3]
    column_sums_kernel[-(-size // _SUMS), len(results)](
        parts, *targets, count, size, ROWS=min(256, next_power_of_two(count)), BLOCK=_SUMS, num_warps=4
    )
