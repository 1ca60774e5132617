"""The smallest Triton kernel: whether one can be built and run here is found by building and running one."""

import torch
import triton
import triton.language as tl


@triton.jit
def _add_one(number):
    tl.store(number, tl.load(number) + 1.0)


def try_kernel(device_type: str) -> None:
    """Build and run it; raises whatever stands in the way."""
    _add_one[(1,)](torch.zeros(1, device=device_type))
