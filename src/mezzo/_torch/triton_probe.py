"""The smallest Triton kernel, to find out whether Triton can build and run one here.

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
    """Build and run the kernel; raises any error of Triton."""
    _add_one[(1,)](torch.zeros(1, device=device_type))
