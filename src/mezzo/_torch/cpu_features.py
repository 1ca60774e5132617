"""Whether oneDNN has bfloat16 kernels for this CPU.

Why: bfloat16 on a CPU without them is emulated by torch, slower than float32; mezzo warns and
computes in float32.
Releases: 2.11 to 2.15. The answer moved from an operator to functions of `torch.cpu`; this uses
whichever exists.
Without it: False is assumed, and bfloat16 on a CPU is computed in float32.
"""

from __future__ import annotations

import torch


def onednn_computes_bfloat16() -> bool:
    """Return whether oneDNN has bfloat16 kernels for this CPU.

    They need AVX-512 or AMX, or bf16 on Arm.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    probe = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    if probe is not None:
        return bool(probe())
    names = ("_is_avx512_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name)() for name in names if hasattr(torch.cpu, name))
