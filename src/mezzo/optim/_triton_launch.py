"""Launches of the step's Triton kernels.

Tuned sizes, which parameters share a launch, and how tensors are cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from mezzo.optim._triton_check import rescale_kernel

DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}

#: Elements per block of a program, blocks per program, warps; found by trial on an H200. A program
#: of Adam takes more blocks: it begins with two powers in float64.
BLOCK, SGD_BLOCKS, ADAM_BLOCKS, WARPS = 512, 2, 8, 4
CHECK_BLOCK, CHECK_BLOCKS, CHECK_WARPS = 2048, 16, 8
#: Where FP8 copies are written: rows and columns of a tile, tiles per program (one below the
#: other), warps; found by trial on an H200 (benchmarks/fp8_kernels.py).
FP8_ROWS, FP8_BLOCK, FP8_BLOCKS, FP8_WARPS = 32, 64, 8, 8


def launch(kernel: Any, programs: int, device: torch.device, *args: Any, warps: int, **options: Any) -> None:
    """Launch a kernel on a device, which need not be the current one."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, programs, torch.device("cuda", torch.cuda.current_device()), *args, warps=warps, **options)
            return
    kernel[(programs,)](*args, **options, num_warps=warps, enable_fp_fusion=False)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a device is captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def upload(values: Any, to: Tensor) -> None:
    """Copy an array to the device, without host synchronisation."""
    staged = torch.from_numpy(np.ascontiguousarray(values))
    to.copy_(staged.pin_memory() if to.device.type == "cuda" else staged, non_blocking=True)


@dataclass(frozen=True, slots=True)
class LaunchKey:
    """What parameters must share to be updated by one launch."""

    grad_dtype: torch.dtype
    half_dtype: torch.dtype | None
    switches: tuple[tuple[str, bool], ...]
    """Compile-time switches of the optimizer's kernel."""
    aligned: bool
    fp8: bool
    """Whether FP8 copies are written: chunks are tiles then."""
    compact: bool
    """Whether masters are compact."""
    state_dtype: torch.dtype
    """Of the optimizer's state, without the step count."""
    blocks: int
    """Blocks per program, unless chunks are tiles."""

    @property
    def options(self) -> dict[str, Any]:
        """The kernel's options that are the same in every step."""
        return {
            "GRAD_DTYPE": DTYPES[self.grad_dtype],
            "HALF_DTYPE": None if self.half_dtype is None else DTYPES[self.half_dtype],
            "ALIGNED": self.aligned,
            "FP8": self.fp8,
            "COMPACT": self.compact,
            "STATE_DTYPE": DTYPES[self.state_dtype],
            "ROWS": FP8_ROWS,
            "BLOCK": FP8_BLOCK if self.fp8 else BLOCK,
            "BLOCKS": FP8_BLOCKS if self.fp8 else self.blocks,
            "warps": FP8_WARPS if self.fp8 else WARPS,
            **dict(self.switches),
        }

    def count_chunks(self, shape: Sequence[int]) -> int:
        """Return how many programs update a tensor."""
        if not self.fp8:
            return -(-math.prod(shape) // (BLOCK * self.blocks))
        height, width = shape
        return -(-height // (FP8_ROWS * FP8_BLOCKS)) * -(-width // FP8_BLOCK)


@dataclass(slots=True)
class Chunks:
    """Per program of a launch, its row in the table and the number of its chunk."""

    rows: Tensor
    numbers: Tensor

    @classmethod
    def from_counts(cls, counts: Any, device: torch.device) -> Chunks:
        """Return the chunks of tensors that have `counts` chunks each."""
        rows = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        numbers = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        both = torch.empty((2, len(rows)), dtype=torch.int32, device=device)
        upload(np.stack([rows, numbers.astype(np.int32)]), both)
        return cls(both[0], both[1])

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(slots=True)
class Batch:
    """One launch of the check and one of the update: its chunks and its rows of the table."""

    key: LaunchKey
    rows: int
    options: dict[str, Any]
    update_chunks: Chunks
    check_chunks: Chunks
    table: Tensor
    between: Tensor
    """Counts the programs that are done; the last one finishes the FP8 copies."""

    @classmethod
    def of_targets(cls, key: LaunchKey, targets: Sequence[Tensor], table: Tensor) -> Batch:
        """Return the batch of tensors that an update writes; `table` begins with their rows."""
        device = table.device
        numels = np.array([target.numel() for target in targets])
        return cls(
            key=key,
            rows=len(targets),
            options=key.options,
            update_chunks=Chunks.from_counts(np.array([key.count_chunks(target.shape) for target in targets]), device),
            check_chunks=Chunks.from_counts(-(-numels // (CHECK_BLOCK * CHECK_BLOCKS)), device),
            table=table,
            between=torch.zeros(1, dtype=torch.int32, device=device),
        )


def rescale(verdict: Tensor, scale: Tensor, counts: Tensor, rule: Any, dynamic: bool) -> Tensor:
    """Advance the loss-scaling state machine in one launch; see `mezzo.optim.rescale`."""
    report = torch.empty(4, dtype=torch.float32, device=scale.device)
    launch(
        rescale_kernel,
        1,
        scale.device,
        verdict,
        scale,
        counts,
        report,
        rule.incr_ratio,
        rule.decr_ratio,
        rule.min_loss_scaling,
        rule.incr_every_n_steps,
        rule.decr_every_n_nan_or_inf,
        DYNAMIC=dynamic,
        warps=1,
    )
    return report
