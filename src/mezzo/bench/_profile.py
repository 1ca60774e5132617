"""Where the time of a step goes on a GPU: its kernels, by name and by kind of work."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mezzo.record import KernelTimes

PROFILED_STEPS = 3
_KINDS = (
    ("attention", r"flash|fmha|sdpa|attention|cudnn::fusion"),
    ("mezzo", r"_kernel$|_kernel_\d+$"),
    ("pointwise", r"^triton_(?:poi|for|unk)|elementwise|foreach|multi_tensor"),
    ("reductions", r"^triton_(?:red|per)|reduce_kernel|batchnorm|batch_norm|softmax|layer_norm"),
    ("convolutions", r"cudnn|conv(?!ert)|dgrad|wgrad|fprop|nhwc|nchw|depthwise|cutlass_tensorop"),
    ("products", r"gemm|nvjet|cublas|cutlass|mma|splitKreduce"),
    ("copies", r"^(?:Memcpy|Memset)"),
)
"""Kinds of work, and the names of their kernels; the first that fits is taken. Triton names a kernel after its
function: Inductor's begin with `triton_`, and mezzo's end with `_kernel`."""
OTHER = "other"


@dataclass(frozen=True, slots=True)
class KernelShare:
    """One kernel in a step."""

    name: str
    kind: str
    calls: float
    """Per step."""
    time_s: float
    """Per step, all calls together."""


def kind_of_kernel(name: str) -> str:
    """Return the kind of work of a CUDA kernel, by its name.

    >>> kind_of_kernel("triton_red_fused_native_batch_norm_backward_7")
    'reductions'
    >>> kind_of_kernel("sm90_xmma_wgrad_implicit_gemm_indexed_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x64x64")
    'convolutions'
    >>> kind_of_kernel("triton_poi_fused_native_batch_norm_backward_silu_backward_97")
    'pointwise'
    >>> kind_of_kernel("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT")
    'products'
    """
    return next((kind for kind, names in _KINDS if re.search(names, name)), OTHER)


def profile_steps(step: Callable[[], object], steps: int = PROFILED_STEPS) -> tuple[KernelShare, ...]:
    """Return the kernels of a step, the longest first; empty on a CPU, which has none.

    Args:
        step: Trains one step.
        steps: How many are profiled; the result is their mean.
    """
    times = KernelTimes()
    with times.profiled():
        for _ in range(steps):
            step()
    shares = [KernelShare(row.kernel, kind_of_kernel(row.kernel), row.calls / steps, row.time_us / 1e6 / steps)
              for row in times.rows]  # fmt: skip
    return tuple(sorted(shares, key=lambda share: -share.time_s))


def time_by_kind(kernels: Iterable[KernelShare]) -> dict[str, tuple[float, float]]:
    """Return seconds and calls per step of each kind that occurs, in a fixed order of kinds."""
    found: dict[str, tuple[float, float]] = {}
    for kind in (*(name for name, _ in _KINDS), OTHER):
        own = [kernel for kernel in kernels if kernel.kind == kind]
        if own:
            found[kind] = sum(kernel.time_s for kernel in own), sum(kernel.calls for kernel in own)
    return found
