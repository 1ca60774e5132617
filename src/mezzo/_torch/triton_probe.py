"""The smallest Triton kernel.

Whether one can be built and run here is found by building and running one.

Why: Triton may be installed and still not work: no C compiler, an old driver, a GPU that it does
not know.
Releases: Triton 3.4 or newer, which torch 2.11 to 2.15 bring along on Linux.
Without it: the first training step fails instead of falling back to torch's fused kernels.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _add_one(number):
    tl.store(number, tl.load(number) + 1.0)


def try_kernel(device_type: str) -> None:
    """Build and run it; raises whatever stands in the way."""
    _add_one[(1,)](torch.zeros(1, device=device_type))
