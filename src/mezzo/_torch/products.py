"""Scaled matrix products of FP8 operands.

Why: tensors in FP8 have no ordinary matrix product; this is the function through which torch calls
the GPU's. `torch.nn.functional.scaled_mm`, the public name, is not in every release.
Releases: 2.11 to 2.15; None in a build without it.
Without it: level O3 refuses to run on a GPU, unless its products are emulated in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

scaled_mm: Callable[..., Tensor] | None = getattr(torch, "_scaled_mm", None)
