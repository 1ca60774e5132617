"""Function modes and dispatch modes: the innermost one, and code that runs without them.

Why: a recording is a pair of modes. It must tell its own modes from others, and its own arithmetic
must not be recorded. The update reads a thousand attributes per step, each of which a function mode
would see.
Releases: 2.11 to 2.15. `UncompiledMode` overrides a hook that only newer releases call.
Without it: recordings count themselves, and cannot end in the right order.
"""

from __future__ import annotations

import torch
from torch.overrides import _get_current_function_mode as current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as no_dispatch_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode as current_dispatch_mode

__all__ = [
    "UncompiledMode",
    "current_dispatch_mode",
    "current_function_mode",
    "no_dispatch_modes",
    "no_torch_function",
]

no_torch_function = torch._C.DisableTorchFunction
"""A context in which no function mode is asked and no `__torch_function__` is called."""


class UncompiledMode(TorchDispatchMode):
    """A dispatch mode without torch's guard against compiling it, which loads Dynamo for seconds."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: callers of the mode keep Dynamo out themselves (`dynamo.kept_out`)."""
        return False
