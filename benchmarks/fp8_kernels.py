"""Bandwidth of the kernels that make FP8 operands and copies, against a copy in the same run; block sizes are tried.

PYTHONPATH=src python benchmarks/fp8_kernels.py [--json FILE]      # a GPU with FP8, half a minute
TRITON_INTERPRET=1 python benchmarks/fp8_kernels.py --small        # a smoke test
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from mezzo import amp
from mezzo.fp8 import _operands, keep_copies, make_operand
from mezzo.optim import _triton_launch, engine_of
from mezzo.proof import copy_bandwidth
from mezzo.record import time_on_device

TILES = [
    (64, 64, 4), (64, 64, 8), (64, 128, 4), (64, 128, 8), (128, 64, 4), (128, 64, 8), (128, 128, 8), (32, 128, 4), (32, 64, 4),
    (128, 32, 4),
]  # fmt: skip
"""Rows and columns that a program converts, and its warps."""
AMAX_BLOCKS = [
    (512, 1024, 8, 4), (264, 1024, 8, 4), (528, 1024, 4, 4), (264, 2048, 8, 8), (1056, 1024, 4, 4), (1056, 1024, 8, 4),
    (528, 2048, 4, 8), (2112, 1024, 8, 4),
]  # fmt: skip
"""Programs, numbers that one looks at at a time, how often in one go, and its warps."""
UPDATE_BLOCKS = [
    (32, 64, 4, 4), (32, 64, 8, 4), (32, 64, 2, 4), (32, 64, 4, 8), (64, 64, 2, 4), (64, 64, 2, 8), (32, 128, 4, 4),
    (32, 128, 4, 8), (32, 32, 4, 4), (16, 64, 8, 4), (16, 128, 8, 4), (64, 32, 4, 4), (32, 128, 1, 8), (64, 128, 1, 8),
]  # fmt: skip
"""Rows and columns that a program of the update works on at a time, how often, and its warps."""


REPEATS = 10
"""Calls in one CUDA graph: a kernel of some microseconds is otherwise as slow as its launch."""


def gigabytes_a_second(call: Callable[[], object], moved: int, device: torch.device, calls: int) -> float:
    call()
    if device.type != "cuda":
        return moved / time_on_device(call, calls=calls, warmup_calls=3, device=device).median_s / 1e9
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            call()
    return REPEATS * moved / time_on_device(graph.replay, calls=calls, warmup_calls=3, device=device).median_s / 1e9


def operands(rows: int, columns: int, device: torch.device, calls: int) -> dict[str, float]:
    """Return what converting a matrix reaches: 2 bytes read and 2 written a number; and its amax, 2 bytes read."""
    x = torch.randn(rows, columns, device=device).bfloat16()
    amax = x.abs().max().float().reshape(1)
    found = {}
    usual = _operands.TILE_ROWS, _operands.TILE_COLUMNS, _operands.TILE_WARPS
    for tile in TILES:
        _operands.TILE_ROWS, _operands.TILE_COLUMNS, _operands.TILE_WARPS = tile
        rate = gigabytes_a_second(lambda: make_operand(x, amax=amax), 4 * x.numel(), device, calls)
        found[f"quantise, {tile[0]} x {tile[1]}, {tile[2]} warps"] = rate
    _operands.TILE_ROWS, _operands.TILE_COLUMNS, _operands.TILE_WARPS = usual
    found["quantise with sums"] = gigabytes_a_second(
        lambda: make_operand(x, amax=amax, sums=torch.float32), 4 * x.numel(), device, calls
    )
    many = amax.expand(_operands.AMAX_PROGRAMS).contiguous()
    found["quantise by many amaxes"] = gigabytes_a_second(
        lambda: make_operand(x, amax=many), 4 * x.numel(), device, calls
    )
    usual = _operands.AMAX_PROGRAMS, _operands.AMAX_BLOCK, _operands.AMAX_BLOCKS, _operands.AMAX_WARPS
    for blocks in AMAX_BLOCKS:
        _operands.AMAX_PROGRAMS, _operands.AMAX_BLOCK, _operands.AMAX_BLOCKS, _operands.AMAX_WARPS = blocks
        rate = gigabytes_a_second(lambda: _operands._amaxes(x), 2 * x.numel(), device, calls)
        found[f"amax, {blocks[0]} programs, {blocks[1]} x {blocks[2]}, {blocks[3]} warps"] = rate
    _operands.AMAX_PROGRAMS, _operands.AMAX_BLOCK, _operands.AMAX_BLOCKS, _operands.AMAX_WARPS = usual
    found["amax by torch"] = gigabytes_a_second(
        lambda: torch.linalg.vector_norm(x, float("inf")), 2 * x.numel(), device, calls
    )
    return found


def update(
    kind: type[torch.optim.Optimizer], size: int, device: torch.device, calls: int, block: tuple[int, ...] | None
) -> float:
    """Return what the update of one weight reaches: SGD moves 12 bytes a parameter, 2 more with FP8 copies; AdamW 16 more."""
    layer = nn.Linear(size, size, bias=False, device=device)
    optimizer = kind(layer.parameters(), lr=1e-3)
    amp.decorate(layer, optimizer, level="O2", dtype="bfloat16")
    if block is not None:
        names = ("FP8_ROWS", "FP8_BLOCK", "FP8_BLOCKS", "FP8_WARPS")
        for name, number in zip(names, block, strict=True):
            setattr(_triton_launch, name, number)
        copies = keep_copies(layer.weight)
        assert copies is not None
        copies.renew(layer.weight)
    layer.weight.grad = torch.randn_like(layer.weight)
    plan = engine_of(optimizer)._prepare_plan()
    assert plan is not None, "Triton does not take this step here"
    moved = (12 + (0 if block is None else 2) + (16 if kind is torch.optim.AdamW else 0)) * size * size
    return gigabytes_a_second(lambda: plan.update(None, None, None), moved, device, calls)


def updates(size: int, device: torch.device, calls: int) -> dict[str, float]:
    found = {}
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        for block in (None, *UPDATE_BLOCKS):
            name = (
                "without copies"
                if block is None
                else f"with copies, {block[0]} x {block[1]}, {block[2]} times, {block[3]} warps"
            )
            found[f"{kind.__name__} {name}"] = update(kind, size, device, calls, block)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true", help="tiny matrices, as a smoke test")
    options = parser.parse_args()
    device = torch.device("cpu" if options.small else "cuda")
    calls = 2 if options.small else 30
    copied = copy_bandwidth(device) / 1e9
    found = {"copy": copied}
    for rows, columns in [(64, 128)] if options.small else [(2048, 8192), (16384, 4096)]:
        rates = operands(rows, columns, device, calls)
        found |= {f"{rows} x {columns}: {name}": rate for name, rate in rates.items()}
    size = 128 if options.small else 8192
    found |= {f"{size} x {size}: {name}": rate for name, rate in updates(size, device, calls).items()}
    for name, rate in found.items():
        print(f"{name:55} {rate:9.1f} GB/s  {rate / copied:5.0%}")
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "GB/s": found}, indent=2))


if __name__ == "__main__":
    main()
