"""torch.func: whether one of its transforms (`grad`, `vmap`, `jvp`) is at work in this thread.

Why: `torch.func.grad` has no rule for the FP8 operators of mezzo, so products stay in half under
it. In a captured graph with transforms, tensors are wrapped and have no storage.
Releases: 2.11 to 2.15.
Without it: `torch.func.grad` of a model at level O3 fails; functions with `torch.func` are not compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

innermost_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
"""Return the innermost transform, None outside of all."""


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor inside of all wrappers, which has the memory."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
