"""The current CUDA stream as a number, in a tenth of the time of `torch.cuda.current_stream`.

Why: every FP8 product asks whether the copy of its weight was made on another stream.
Releases: 2.11 to 2.15, builds with CUDA; others ask `torch.cuda.current_stream`.
Without it: FP8 products wait longer for the host.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda index: torch.cuda.current_stream(index).cuda_stream
)
"""Return the number of the current stream of the GPU with an index."""
