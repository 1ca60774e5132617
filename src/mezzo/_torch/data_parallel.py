"""`nn.DataParallel`: the function that runs its replicas in threads.

Why: a thread starts without a policy, so replicas would compute in float32.
Releases: 2.11 to 2.15; the function is public, but replacing it is not.
Without it: models in `nn.DataParallel` ignore `auto_cast` on all devices.
"""

from __future__ import annotations

import importlib

from mezzo._torch.patches import Around, wrap_attribute


def wrap_parallel_apply(around: Around) -> None:
    """Let `around` wrap the `parallel_apply` that `nn.DataParallel` calls with its replicas."""
    # A function has the same name
    module = importlib.import_module("torch.nn.parallel.data_parallel")
    wrap_attribute(module, "parallel_apply", around)
