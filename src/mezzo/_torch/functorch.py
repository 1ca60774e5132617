"""torch.func: whether one of its transforms (`grad`, `vmap`, `jvp`) is at work in this thread.

Why: `torch.func.grad` has no rule for the FP8 operators of mezzo, so products stay in half under
it.
Releases: 2.11 to 2.15.
Without it: `torch.func.grad` of a model at level O3 fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

innermost_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
"""Return the innermost transform, None outside of all."""
