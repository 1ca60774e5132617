"""Which device kernels the recorded operators launched, how long they ran, and whether they used Tensor Cores.

On a GPU the times are the profiler's: each operator runs inside a numbered range, and a kernel belongs to the range that
launched it. On a CPU an operator is its own kernel, timed by the host's clock.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mezzo._torch.profiler import DeviceType
from mezzo.dtypes import dtype_name
from mezzo.record._kernel_runs import KernelOp, KernelRun, Phase, floating

FP8 = "float8"
"""The dtype of a kernel that belongs to a product in FP8: it multiplies, or converts an operand."""

RANGE = "mezzo#"
"""Prefix of the name of a range in the profile; its number follows."""

# Names of the libraries' kernels that multiply on Tensor Cores: the instruction's shape (884, 1688, 16816: Volta to
# Ampere), CUTLASS' tensorop, cuDNN's and cuBLAS' xmma with a tensor shape or, on Hopper, with warp groups, cuBLAS' nvjet,
# fused attention.
_TENSOR_CORES = re.compile(
    r"[shib](?:884|1688|16816|16832)|tensorop|tensor\d+x\d+x\d+|xmma.*warpgroupsize|[hib]mma|gmma|nvjet"
    r"|flash_(?:fwd|bwd)|flashattn|fmha|sdpa",
    re.IGNORECASE,
)
# Kernels of the same families that run on the ordinary units.
_ORDINARY_UNITS = re.compile(r"simt|ffma|depthwise|_sgemm|_dgemm|fmha.*_f32_.*sm(?:50|70|75)", re.IGNORECASE)


def uses_tensor_cores(kernel: str) -> bool:
    """Whether a CUDA kernel multiplies on Tensor Cores, by its name.

    >>> uses_tensor_cores("sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_gmma")
    True
    >>> uses_tensor_cores("ampere_sgemm_128x64_tn")
    False
    """
    return bool(_TENSOR_CORES.search(kernel)) and not _ORDINARY_UNITS.search(kernel)


@dataclass(frozen=True, slots=True)
class KernelRow:
    """All runs of a kernel for one operator at one place."""

    kernel: str
    """On a CPU the operator's name."""
    op: str
    """Empty for kernels that were launched without the dispatcher, such as Triton's in an optimizer step."""
    phase: Phase | None
    module: str
    api_op: str
    dtype: str
    """Of the operator's first floating input, else of its result; empty if neither is floating; `float8` for products that
    convert their operands."""
    is_cast: bool
    """Whether the operator copied one floating dtype into another."""
    on_tensor_cores: bool | None
    """None on a CPU."""
    calls: int
    time_us: float


_Place = tuple[str, Phase | None, str, str, str, bool]
_NOWHERE: _Place = ("", None, "", "", "", False)
_Launched = tuple[str, int, float, bool | None]
"""Name of a kernel, number of its range, time in microseconds, whether it used Tensor Cores."""


class KernelTimes:
    """A listener inside `profiled`: it matches recorded operators with the kernels of the profile."""

    wants_lines = False
    wants_times = True

    def __init__(self) -> None:
        self.rows: list[KernelRow] = []
        self._places: dict[int, _Place] = {}
        self._host: dict[int, float] = {}
        self._lock = threading.Lock()

    def wants(self, op: KernelOp) -> bool:
        """Whether an operator is timed: only if it computes."""
        return op.has_tensors and op.computes

    def receive(self, kernel: KernelRun) -> None:
        """Remember which operator the range belongs to."""
        first = next(floating((*kernel.args, *kernel.kwargs.values(), kernel.out)), None)
        dtype = FP8 if kernel.op.is_fp8 else "" if first is None else dtype_name(first.dtype)
        with self._lock:
            self._places[kernel.number] = (
                kernel.op.name,
                kernel.phase,
                kernel.module,
                kernel.api_op,
                dtype,
                kernel.cast is not None,
            )
            self._host[kernel.number] = kernel.seconds

    @contextmanager
    def profiled(self) -> Iterator[None]:
        """Profile what runs inside, and fill `rows` at the end; after an exception they stay empty."""
        if not torch.cuda.is_available():
            yield
            self._fill(self._on_host())
            return
        torch.cuda.synchronize()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA],
            acc_events=True,  # without it torch warns
        ) as profile:
            yield
            torch.cuda.synchronize()
        self._fill(list(_launched(profile.events())) or self._on_host())

    def _on_host(self) -> list[_Launched]:
        return [(self._places[number][0], number, 1e6 * seconds, None) for number, seconds in self._host.items()]

    def _fill(self, launched: list[_Launched]) -> None:
        sums: dict[tuple[str, _Place, bool | None], list[float]] = {}
        for kernel, number, time_us, on_tensor_cores in launched:
            place = self._places.get(number, _NOWHERE)
            total = sums.setdefault((kernel, place, on_tensor_cores), [0, 0.0])
            total[0] += 1
            total[1] += time_us
        rows = [
            KernelRow(kernel, *place, on_tensor_cores, int(calls), time_us)
            for (kernel, place, on_tensor_cores), (calls, time_us) in sums.items()
        ]
        self.rows = sorted(rows, key=lambda row: (-row.time_us, row.kernel, row.module))


def _launched(events: Any) -> Iterator[_Launched]:
    """Yield the kernels of a profile; range -1 means launched without the dispatcher, as Triton does."""
    unclaimed: dict[str, list[float]] = {}
    for event in events:
        is_ours = getattr(event, "is_user_annotation", False) or event.name.startswith(RANGE)
        if event.device_type == DeviceType.CUDA and not is_ours:
            unclaimed.setdefault(event.name, []).append(event.device_time_total)
    for event in events:
        if event.device_type != DeviceType.CPU or not event.kernels:
            continue
        parent = event
        while parent is not None and not parent.name.startswith(RANGE):
            parent = parent.cpu_parent
        if parent is None:
            continue
        for kernel in event.kernels:
            times = unclaimed.get(kernel.name, [])
            if kernel.duration in times:
                times.remove(kernel.duration)
            yield kernel.name, int(parent.name.removeprefix(RANGE)), kernel.duration, uses_tensor_cores(kernel.name)
    for name, times in unclaimed.items():
        for time_us in times:
            yield name, -1, time_us, uses_tensor_cores(name)
