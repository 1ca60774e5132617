"""Tensors without memory of their own, which hold others: a subclass decides every operator on them.

Why: a weight that was gathered in FP8 has the dtype and the gradient of a half weight, and the memory of
FP8 numbers. The documented way to write such a class starts with these functions.
Releases: 2.11 to 2.15.
Without it: weights cannot be gathered in FP8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

make_wrapper: Callable[..., Any] = Tensor._make_wrapper_subclass
"""Return a tensor of a subclass with a shape, dtype and device, and without memory."""

no_function_rules: Any = torch._C._disabled_torch_function_impl
"""For `__torch_function__`: only `__torch_dispatch__` decides."""
