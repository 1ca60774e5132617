"""TorchScript: calls of scripted functions, its optimiser, and whether this thread traces.

Why: from the second call on, the optimiser derives gradients by formulas of its own, which know
nothing of a policy. A trace must see the weight itself, not a half copy that mezzo keeps.
Releases: 2.11 to 2.15.
Without it: at O2 the backward of a scripted LayerNorm meets dtypes that it does not expect; at O1
GELU returns float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mezzo._torch.patches import Around, wrap_attribute

tracing_state: Callable[[], Any] = torch._C._get_tracing_state
"""Return what `torch.jit.trace` has written so far, None outside of a trace."""
scripts_are_optimised: Callable[[], bool] = torch._C._get_graph_executor_optimize
"""Whether the optimiser is on in this thread."""
optimise_scripts: Callable[[bool], None] = torch._C._set_graph_executor_optimize
"""Switch the optimiser in this thread."""


def wrap_script_calls(around: Around) -> None:
    """Let `around` wrap the call of every scripted function and method, for the whole process."""
    for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
        wrap_attribute(kind, "__call__", around)
